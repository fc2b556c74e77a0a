"""Writes files completely or not at all, and decodes text files that users give."""

import codecs
import contextlib
import errno
import io
import os
import re
import tempfile
from collections.abc import Iterator

NO_LINKS = (
    errno.EPERM,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EMLINK,
)  # os.link's errors without hard links
MARKS = {  # byte order marks; UTF-32 comes first, as its mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
MOUNTS = "/proc/self/mountinfo"
REMOTE = re.compile(r"nfs|cifs|smb|ceph|lustre|gpfs|beegfs|afs|9p|virtiofs|fuse")  # types of network file systems


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a file is on a network file system, where other machines may change it; False if unknown."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(FileNotFoundError), open(MOUNTS) as mounts:
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == device:
                return REMOTE.match(kind) is not None
    return False


def decoded(data: bytes, name: str | os.PathLike) -> str:
    """Decode a text in UTF-8, or in the encoding of its byte order mark, and turn all line ends into \\n. Raises
    ValueError, which names the file and the wrong byte's offset, for bytes that are not text in that encoding."""
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
    """Yield the path of a temporary file, which the block writes and which then replaces `path`. After an error `path`
    is unchanged. Raises OSError if nothing can be written, and ValueError if `path` is not a regular file.

    replace  False: raise FileExistsError if `path` exists
    sync     whether the data must be on the disk before the file gets its name
    """
    # A private folder beside `path` keeps processes that write the same path apart.
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
        raise OSError(error.errno, error.strerror, path) from None  # names `path`, not the temporary file
    if sync:
        _sync(folder)


def _place(temporary: str, path: str) -> None:
    """Give a temporary file the name `path`. Raises FileExistsError if `path` exists. On file systems with hard links
    no other process can take the name between the test and the naming."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        os.replace(temporary, path)


def write(path: str | os.PathLike, data: str | bytes, mode: int = 0o666, replace: bool = True) -> None:
    """Write bytes, or text in UTF-8, to a file, completely or not at all. mode: the file's permissions; replace=False:
    raise FileExistsError if the file exists."""
    with replacing(path, replace) as temporary, open(os.open(temporary, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def staying(path: str | os.PathLike) -> Iterator[str | os.PathLike]:
    """Yield a path by which the block can read a file even if `path` is removed meanwhile: a temporary hard link, or
    `path` itself if no link can be made. Raises FileNotFoundError if `path` does not exist."""
    folder, name = os.path.split(path)
    with contextlib.ExitStack() as stack:
        try:
            own = tempfile.TemporaryDirectory(dir=folder, prefix=".kvevict-", ignore_cleanup_errors=True)
            other: str | os.PathLike = os.path.join(stack.enter_context(own), name)
            os.link(path, other)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links, or a full disk
            other = path
        yield other


def _sync(path: str) -> None:
    """Wait until a file's data, or the names in a folder, are on the disk. Errors of file systems that cannot do this
    for folders are ignored."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
