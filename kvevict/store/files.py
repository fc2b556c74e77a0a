"""Files that are written whole or not at all, and the texts in a user's files."""

import codecs
import contextlib
import errno
import io
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

NO_LINKS = errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK  # of file systems
MARKS = {  # what a text in these encodings begins with; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
MOUNTS = "/proc/self/mountinfo"
REMOTE = re.compile(r"nfs|cifs|smb|ceph|lustre|gpfs|beegfs|afs|9p|virtiofs|fuse")  # kinds of file systems


def is_remote(path: str | os.PathLike) -> bool:
    """Tell whether other machines may change a file. False where the system does not say."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(FileNotFoundError), open(MOUNTS) as mounts:
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == device:
                return REMOTE.match(kind) is not None
    return False


def decoded(data: bytes, name: str | os.PathLike) -> str:
    """Return the text of a file, with line ends \\n: in UTF-8, or in the encoding that its mark names. ValueError, with
    `name` and the byte's place, for other bytes."""
    encoding = next((encoding for mark, encoding in MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return io.StringIO(data.decode(encoding).removeprefix("\ufeff"), newline=None).getvalue()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: byte {error.start} is not {encoding.upper()} ({error.reason}); give a text "
            "in UTF-8, or in UTF-16 or UTF-32 with their mark"
        ) from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike, replace: bool = True, sync: bool = True) -> Iterator[str]:
    """Yield the name of a temporary file to write. At the block's end it replaces `path`, or the target of a link
    there. replace: False raises FileExistsError where there is one already.

    The temporary file is in a private folder beside the old one, so that processes that write the same path do not
    collide. With `sync` it is on the disk before it gets its name. After an error `path` is unchanged and nothing else
    is left.

    Raises the file system's OSError if nothing can be written, and ValueError if `path` is not a regular file (a
    device, for example).
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
            if sync:
                _sync(temporary)
            (os.replace if replace else _place)(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None  # with the name that the caller knows
    if sync:
        _sync(folder)


def _place(temporary: Any, path: str | os.PathLike) -> None:
    """Give a file its name. Where the file system has hard links, only one process succeeds."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.replace(temporary, path)


def write(path: str | os.PathLike, data: str | bytes, mode: int = 0o666, replace: bool = True) -> None:
    """Write bytes, or text in UTF-8, to a file, whole or not at all (`replacing`). mode: as `os.open` takes it."""
    with replacing(path, replace) as temporary, open(os.open(temporary, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def staying(path: str | os.PathLike) -> Iterator[str | os.PathLike]:
    """Yield a name under which a file stays while it is read, even if another process or machine removes `path`. That
    takes hard links; without them this yields `path`. Raises FileNotFoundError if `path` does not exist."""
    folder, name = os.path.split(path)
    with contextlib.ExitStack() as stack:
        try:
            own = tempfile.TemporaryDirectory(dir=folder, prefix=".kvevict-", ignore_cleanup_errors=True)
            other: str | os.PathLike = os.path.join(stack.enter_context(own), name)
            os.link(path, other)
        except FileNotFoundError:
            raise
        except OSError:  # a full disk, too
            other = path
        yield other


def _sync(path: str) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Some file systems cannot do the latter."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
