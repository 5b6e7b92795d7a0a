"""Work folders: unfinished output, locked so that one run at a time writes it.

A work folder has a file MARK, written by mtcli, which is also its lock. Anything else with a work
folder's name is the user's: it is refused and left untouched.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import append_untrusted

MARK = "mtcli.lock"
TEXT = b"mtcli keeps unfinished work in this folder, and removes it\n"


class WorkFolder:
    """A work folder that this process has locked, until it is closed or removed."""

    def __init__(self, path: Path, output: Path) -> None:
        """Creates the work folder of an output, or reopens that of a killed run with its content.

        Raises MtcliError where another run has locked it, or it has no mark.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileNotFoundError):  # a run that ends removes the folder meanwhile
                require_work_folder(path)
            path.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                self._lock = lock_output(path / MARK, output)
                break
        if not self._lock.tell():
            self._lock.write(TEXT)
            self._lock.flush()

    def clear(self) -> None:
        """Removes all content but the mark."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()

    def close(self) -> None:
        """Unlocks the folder, which a later run can resume."""
        self._lock.close()

    def remove(self) -> None:
        """Removes the folder and its content, but not that of a run that starts meanwhile."""
        with suppress(OSError):  # the disk fails, or NFS keeps open files by other names
            self.clear()
            (self.path / MARK).unlink()
        self.close()
        with suppress(OSError):
            self.path.rmdir()


def require_work_folder(path: Path) -> None:
    """Raises MtcliError where a work folder's name belongs to something else: a link, a file, or a
    folder that holds files and no mark."""
    mark = path / MARK
    if path.is_symlink():
        problem = "is a link"
    elif not path.exists() or (mark.is_file() and not mark.is_symlink()):
        return
    elif not path.is_dir():
        problem = "is a file"
    elif first := next(path.iterdir(), None):
        problem = f"was not made by mtcli, and holds {first.name}"
    else:
        return
    message = f"{path} {problem}: unfinished work would be kept there"
    raise wrong(message, "move it away, or write to another name")


def lock_output(path: Path, output: Path) -> IO[bytes]:
    """Opens a file (read and append) as the lock of an output, until it is closed or the process
    ends.

    Raises MtcliError where another run has it.
    """
    while True:
        lock = append_untrusted(path)
        try:
            # lockf, not flock: workers forked later must not hold it when we are killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.lstat(path)):
                return lock
        except FileNotFoundError:  # the run that had it has removed it since it was opened here
            pass
        except OSError:
            lock.close()
            raise wrong(f"another run is writing {output}", "wait for it, or end it") from None
        lock.close()
