"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import tempfile


@contextlib.contextmanager
def replacing(path):
    """The name of a file to write, which takes the place of `path`, or of what a link there leads to, in the end.

    The new file lies beside the old one, in a folder of its own that nobody else can write to, so that processes which
    write the same path do not meet. It is on the disk before it gets its name. After an error in the block or in the
    writing `path` is as it was and nothing else is left.

    Raises the file system's OSError where nothing can be written, and ValueError for what is not a regular file, such
    as a device.
    """
    path = os.path.realpath(os.fsdecode(path))
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file and cannot be replaced; give another path")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".kvevict-", ignore_cleanup_errors=True) as own:
            temporary = os.path.join(own, name)
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None  # with the name that the caller knows
    _sync(folder)


def write(path, data: str | bytes, mode: int = 0o666) -> None:
    """A whole new file, of bytes or of text in UTF-8, or after an error the old one; see `replacing`. mode: as of
    `os.open`."""
    with replacing(path) as temporary, open(os.open(temporary, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _sync(path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Some file systems cannot do the latter."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
