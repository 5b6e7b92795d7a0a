"""A folder of this user alone, on this machine, for what other folders cannot take."""

import os
import stat
import tempfile
from pathlib import Path


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
