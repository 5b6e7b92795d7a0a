"""Opens untrusted files: regular files only, so that no pipe or device is waited for or read.

What a name leads to is asked of the file that was opened, not of the name: nothing can be put in
its place between the two. Links are followed, as the Hugging Face cache is made of them.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO

MAX_BYTES = 1 << 30  # of a file that is read into memory, where its reader names no limit
# A FIFO is opened without waiting for a writer, a terminal without becoming this process's own.
QUIETLY = os.O_NONBLOCK | os.O_NOCTTY
KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_untrusted(path: str | Path, buffering: int = -1) -> IO[bytes]:
    """A regular file, open to be read.

    Raises OSError, whose strerror says what it is instead, for anything else.
    """
    return open(path, "rb", buffering, opener=_open_regular)


def read_untrusted(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """All bytes of a regular file. Raises OSError for any other, and for more than `most` bytes."""
    with open_untrusted(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return data


def append_untrusted(path: str | Path) -> IO[bytes]:
    """A regular file of a folder that may be a stranger's, made where there is none, to append to.

    Raises OSError for anything else, and for a link, which could lead to a file of the user's.
    """
    return open(path, "ab", opener=lambda name, flags: _open_regular(name, flags | os.O_NOFOLLOW))


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | QUIETLY, 0o666)
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind in (stat.S_IFREG, stat.S_IFDIR):  # open() refuses a folder by itself
        return handle
    os.close(handle)
    what = KINDS.get(kind, "no file")
    raise OSError(errno.EINVAL, f"it is {what}, and a regular file is needed", path)
