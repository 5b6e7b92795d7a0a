"""Prunes a run's checkpoints, but none that a reader has locked.

A reader holds a shared lock on the manifest, released when the `Checkpoint` is closed or collected,
and with the process. Pruning takes an exclusive lock, and skips a checkpoint where it cannot.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from mtcli.core.checkpoint.folder import (
    BEST,
    MANIFEST,
    step_folders,
    step_name,
    step_of,
    unrelated_files,
)
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import listed, open_to_lock, open_untrusted
from mtcli.core.runtime.atomic_writes import partial_name


class ReadLock:
    """A shared lock on a checkpoint, held until this object is collected.

    A pickled copy, in a worker of the process with the lock, holds none.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file

    def __reduce__(self) -> tuple[type["ReadLock"], tuple[()]]:
        return ReadLock, ()

    def release(self) -> None:
        """Allows the checkpoint to be pruned."""
        if self._file:
            self._file.close()


def lock_for_reading(folder: Path) -> ReadLock:
    """Takes a shared lock that keeps a checkpoint from being pruned.

    The lock is empty where there is no manifest, or the file system has no locks. Raises MtcliError
    where the checkpoint is being removed.
    """
    path = folder / MANIFEST
    try:
        file = open_untrusted(path)
    except OSError:
        return ReadLock()  # whoever reads it says why
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return ReadLock(file)
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return ReadLock()
    message = f"{folder} is being removed by its run, which keeps newer checkpoints"
    raise wrong(message, "open the run's folder, or raise train.keep")


class Best(NamedTuple):
    """How many of the best checkpoints are kept, and the steps by validation loss, lowest first."""

    keep: int = 0
    steps: tuple[int, ...] = ()

    def among(self, steps: Collection[int]) -> list[int]:
        """Returns the best of the steps that there are, the best first."""
        return [step for step in self.steps if step in steps][: self.keep]


NO_BEST = Best()


def steps_to_remove(
    steps: list[int], keep: int, keep_every: int, best: Best = NO_BEST
) -> list[int]:
    """Selects all steps but the newest `keep` (0: all), multiples of `keep_every` (0: none) and the
    best."""
    old = sorted(steps)[:-keep] if keep else []
    best_steps = best.among(steps)
    return [s for s in old if s not in best_steps and (not keep_every or s % keep_every)]


def prune(
    root: Path,
    keep: int,
    keep_every: int,
    newest: Path,
    warn: Callable[[str], None] = lambda text: None,
    best: Best = NO_BEST,
) -> None:
    """Removes all checkpoints but the newest `keep`, multiples of `keep_every`, `newest` and the
    best, to the first of which the link `best` then leads.

    A link to a checkpoint stays. A checkpoint that is being read stays until the next save. `warn`
    is called where a checkpoint cannot be removed, holds other files, or is on a file system
    without locks, where readers are unknown.
    """
    folders = {step_of(folder): folder for folder in step_folders(root)}
    try:
        _link_best(root, best.among(folders))
    except OSError as error:
        warn(f"{root / BEST} cannot be a link to the best checkpoint: {error.strerror}")
    for step in steps_to_remove(list(folders), keep, keep_every, best):
        if folders[step] == newest or folders[step].is_symlink():
            continue
        if unrelated := unrelated_files(folders[step]):
            warn(f"{folders[step]} stays: {listed(unrelated)} in it is of no checkpoint")
            continue
        try:
            remove_checkpoint(folders[step], warn)
        except BlockingIOError:
            pass  # it is being read
        except OSError as error:
            warn(f"old checkpoints in {root} stay, and it fills: {error.strerror}")
    link = root / BEST
    with suppress(OSError):
        if link.is_symlink() and not link.exists():  # its run keeps no best ones any longer
            link.unlink()


def _link_best(root: Path, best_steps: list[int]) -> None:
    """Lets the link `best` lead to the first of some steps, if there are any."""
    for step in best_steps[:1]:
        new = partial_name(root / BEST)
        new.unlink(missing_ok=True)
        new.symlink_to(step_name(step))
        new.replace(root / BEST)


def remove_checkpoint(folder: Path, warn: Callable[[str], None]) -> None:
    """Removes a checkpoint. Raises BlockingIOError where it is being read."""
    try:
        file = open_to_lock(folder / MANIFEST)
    except FileNotFoundError:
        return  # another process removes it
    partial = partial_name(folder)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            warn(
                f"{folder.parent} is on a file system without locks ({error.strerror}): train.keep "
                "removes old checkpoints whether they are being read or not"
            )
        folder.rename(partial)  # never half of one under its name
    shutil.rmtree(partial)  # once no file of it is open here, which NFS would keep
