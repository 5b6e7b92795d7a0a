"""Folders of this user: the cache, and one on this machine alone for what no other can take."""

import os
import stat
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """The user's cache of ours, which may not be there; XDG_CACHE_HOME names another."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mtcli"


def private_folder() -> Path:
    """The user's folder of temporary files, made if need be; it lasts until the next boot.

    Raises OSError where another user owns it or may write in it: anyone may have made a folder of
    its name in a place that all users share.
    """
    folder = Path(tempfile.gettempdir()) / f"mtcli-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not ours or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
