"""Agreement of all ranks before the first step: on errors, the checkpoint and the data.

Every rank reads its files for itself, and a folder need not be the same one everywhere: a directory
cache may be stale, or a disk one machine's own. Ranks would then train from mixed weights.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.folder import CheckpointFolder, find_checkpoint
from mtcli.core.checkpoint.manifest import NAME
from mtcli.core.checkpoint.names import step_folders, step_of
from mtcli.core.checkpoint.opening import open_found
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Axis
from mtcli.core.runtime.atomic_writes import folder_of

Value = TypeVar("Value")
SHARED = "put it where all machines see the same files, or wait until their caches are up to date"


def together(axis: Axis, work: Callable[[], Value]) -> Value:
    """Runs `work` on every rank and returns this rank's result. Collective.

    Raises the MtcliError of the first rank that raises one on every rank.
    """
    fault, value = None, []
    try:
        value.append(work())
    except MtcliError as error:
        fault = error.dump()
    for found in gather_values(fault, axis):
        if found:
            raise MtcliError.load(found)
    return value[0]


def require_alike(axis: Axis, fact: object, what: str, field: str = "") -> None:
    """Raises MtcliError on every rank where a fact is not the same on all; it is told as `what`.

    Collective.
    """
    facts = gather_values((fact, f"{what} {fact}"), axis)
    hosts = gather_values(socket.gethostname(), axis)
    for rank, (other, told) in enumerate(facts):
        if other != facts[0][0]:
            message = f"rank {rank} on {hosts[rank]} {told}, and rank 0 on {hosts[0]} {facts[0][1]}"
            raise wrong(message, SHARED, field)


def newest_step(root: Path, axis: Axis) -> Path | None:
    """The newest checkpoint under a folder as rank 0 sees it, if any. Collective.

    Raises MtcliError on every rank where another sees a newer one: rank 0 would go back to an old
    step, or begin anew, beside it.
    """

    def listed() -> list[Path]:
        with folder_of("train.output", root):
            return step_folders(root)

    folders = together(axis, listed)
    seen = gather_values((str(folders[-1]) if folders else None, socket.gethostname()), axis)
    newest, first_host = seen[0]
    for rank, (folder, host) in enumerate(seen):
        if folder and (newest is None or step_of(Path(folder)) > step_of(Path(newest))):
            message = f"rank {rank} on {host} sees the checkpoint {folder}, and rank 0 on "
            message += f"{first_host} sees {newest or 'none'}"
            raise wrong(message, SHARED, "train.output")
    return Path(newest) if newest else None


def open_agreed(path: Path, axis: Axis) -> Checkpoint:
    """The checkpoint in a folder, of a run its newest, as rank 0 finds it. Collective.

    Raises MtcliError on every rank where one cannot open it, or finds another one there.
    """
    own = together(axis, lambda: find_checkpoint(path) if axis.rank == 0 else None)
    form, folder, of_run = gather_values(own and (own.format, str(own.folder), own.of_run), axis)[0]
    found = CheckpointFolder(form, Path(folder), of_run)

    def opened() -> Checkpoint:
        try:
            return open_found(found)
        except MtcliError as error:
            if axis.rank == 0:
                raise
            where = f"rank {axis.rank} on {socket.gethostname()}"
            message = f"{where}: {error.problems[0].message}, and rank 0 has opened it"
            raise wrong(message, SHARED) from None

    checkpoint = together(axis, opened)
    if axis.size > 1:
        fact = f"{checkpoint.folder} of step {checkpoint.step} with the hash {_hash(checkpoint)}"
        require_alike(axis, fact, "has opened")
    return checkpoint


def _hash(checkpoint: Checkpoint) -> str:
    """A hash that another checkpoint changes: of the manifest, which holds those of all files, or
    where there is none of blocks of every file."""
    folder = checkpoint.folder
    if checkpoint.format == "mtcli":
        return sampled_hash([folder / NAME])
    files = (path for path in folder.iterdir() if path.is_file() and os.access(path, os.R_OK))
    return sampled_hash(sorted(files))
