"""Folders of this user: the cache, and a private temporary folder that others cannot replace."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtcli.core.runtime.variables import restored

READ_ONLY = "MTCLI_READ_ONLY"  # set where nothing is added to a cache, and what is there is read


def adds_to_caches() -> bool:
    """Says whether this process may write caches: of a user, a machine or a data set."""
    return os.environ.get(READ_ONLY) != "1"


@contextmanager
def adding_to_no_cache() -> Iterator[None]:
    """Inside, caches are read and not written, by this process and those that it starts."""
    with restored(READ_ONLY):
        os.environ[READ_ONLY] = "1"
        yield


def user_cache() -> Path:
    """mtcli's folder in the user's cache (XDG_CACHE_HOME); it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mtcli"


def private_folder() -> Path:
    """The user's private temporary folder, created if missing; it lasts until the next boot.

    Raises OSError where another user owns it or may write in it, as anyone can create its name.
    """
    folder = Path(tempfile.gettempdir()) / f"mtcli-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not ours or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
