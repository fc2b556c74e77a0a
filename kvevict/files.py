"""Files that are written whole or not at all."""

import contextlib
import errno
import os


@contextlib.contextmanager
def replacing(path):
    """The name of a new, empty file beside `path`, or beside what a link there leads to, which takes its place in the
    end. After an error `path` is as it was and the new file gone. Raises the file system's OSError where nothing can be
    written, and ValueError for what is no regular file, such as a device."""
    path = os.path.realpath(os.fsdecode(path))
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no regular file and cannot be replaced; give another path")
    temporary = f"{path}.{os.getpid()}.part"  # ranks that have all heads each write the whole file
    try:
        open(temporary, "wb").close()
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from None
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
