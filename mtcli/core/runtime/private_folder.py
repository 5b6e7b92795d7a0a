"""Folders of this user: the cache, and a private temporary folder that others cannot replace."""

import os
import stat
import tempfile
from pathlib import Path


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
