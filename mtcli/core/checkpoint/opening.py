"""Opens a checkpoint, of ours, of Hugging Face or Megatron, on one rank or the same on all.

Every rank reads its files for itself, and a folder need not be the same one everywhere: a directory
cache may be stale, or a disk one machine's own. Ranks would then train from mixed weights, so
before the first step they agree on errors, on the checkpoint and on the data.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from mtcli.core.checkpoint.adapters import with_base
from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.folder import (
    KINDS,
    CheckpointFolder,
    config_in,
    find_checkpoint,
    step_folders,
    step_of,
)
from mtcli.core.checkpoint.huggingface.peft import open_peft
from mtcli.core.checkpoint.huggingface.reader import open_hf
from mtcli.core.checkpoint.manifest import NAME, TensorRecord, read_manifest
from mtcli.core.checkpoint.megatron.reader import open_megatron
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPES
from mtcli.core.checkpoint.retention import lock_for_reading
from mtcli.core.checkpoint.safetensors_file import CODES, StoredBox
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Axis
from mtcli.core.runtime.atomic_writes import folder_of

Result = TypeVar("Result")
SHARED = "put it where all machines see the same files, or wait until their caches are up to date"


def open_checkpoint(path: Path, model: ModelConfig | None = None) -> Checkpoint:
    """Opens the checkpoint in a folder: one of ours, the newest of a run folder, Hugging Face's, or
    Megatron's, whose architecture is `model` where that is given.

    Raises MtcliError where there is none, or where it is damaged; a damaged newest checkpoint of a
    run is refused, and the error offers the one before it.
    """
    return open_found(find_checkpoint(path), model)


def open_found(found: CheckpointFolder, model: ModelConfig | None = None) -> Checkpoint:
    """Opens a checkpoint that was found; see `open_checkpoint`."""
    try:
        if found.format == "hf":
            return open_hf(found.folder)
        if found.format == "megatron":
            return open_megatron(found.folder, model)
        if found.format == "peft":
            return open_peft(found.folder, open_checkpoint)
        with offering_earlier(found.folder) if found.of_run else nullcontext():
            own = _open_ours(found.folder)
        has_adapters = own.config is not None and own.config.lora.rank > 0
        return with_base(own, open_checkpoint) if has_adapters else own
    except OSError as error:  # of a folder that may not be read
        raise wrong(f"{found.folder} cannot be opened: {error.strerror}", KINDS) from None


@contextmanager
def offering_earlier(folder: Path) -> Iterator[None]:
    """Suggests, in an error about a run's checkpoint, the newest intact one before it, if any."""
    try:
        yield
    except MtcliError as error:
        steps = step_folders(folder.parent)
        earlier = steps[: steps.index(folder)] if folder in steps else []
        intact = next((path for path in reversed(earlier) if _opens(path)), None)
        if intact is None:
            raise
        offer = f"the checkpoint before it is whole: {intact}; "
        offer += f"move {folder.name} away to go on there"
        raise MtcliError(*(p._replace(hint=offer) for p in error.problems)) from None


def _opens(folder: Path) -> bool:
    try:
        _open_ours(folder)
    except MtcliError:
        return False
    return True


def _open_ours(folder: Path) -> Checkpoint:
    lock = lock_for_reading(folder)
    manifest = read_manifest(folder)
    config = config_in(folder)
    checkpoint = Checkpoint(
        folder=folder,
        model=config.model,
        config=config,
        step=manifest.step,
        extra=manifest.extra,
        tensors={name: _stored(record) for name, record in manifest.tensors.items()},
        files=manifest.files,
        tokenizer_folder=CheckpointFolder("mtcli", folder).tokenizer_folder,
        world=manifest.world,
        lock=lock,
        replicas=manifest.replicas,
    )
    checkpoint.check_headers()
    return checkpoint


def _stored(record: TensorRecord) -> StoredTensor:
    code = CODES[record.dtype]
    boxes = (StoredBox.plain(s.file, s.key, code, s.box, s.replica) for s in record.shards)
    return StoredTensor(DTYPES[record.dtype], record.shape, tuple(boxes))


def together(axis: Axis, work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank and returns this rank's result. Collective.

    Raises the MtcliError of the first rank that raises one on every rank.
    """
    fault, value = None, []
    try:
        value.append(work())
    except MtcliError as error:
        fault = error.dump()
    if first := next(filter(None, gather_values(fault, axis)), None):
        raise MtcliError.load(first)
    return value[0]


def require_alike(axis: Axis, fact: object, what: str, field: str = "") -> None:
    """Raises MtcliError on every rank where a fact is not the same on all; `what` names it in the
    error. Collective.
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

    def list_steps() -> list[Path]:
        with folder_of("train.output", root):
            return step_folders(root)

    folders = together(axis, list_steps)
    seen = gather_values((str(folders[-1]) if folders else None, socket.gethostname()), axis)
    newest, first_host = seen[0]
    for rank, (folder, host) in enumerate(seen):
        if folder and (newest is None or step_of(Path(folder)) > step_of(Path(newest))):
            message = f"rank {rank} on {host} sees the checkpoint {folder}, and rank 0 on "
            message += f"{first_host} sees {newest or 'none'}"
            raise wrong(message, SHARED, "train.output")
    return Path(newest) if newest else None


def open_agreed(path: Path, axis: Axis) -> Checkpoint:
    """Opens the checkpoint in a folder, of a run its newest, as rank 0 finds it. Collective.

    Raises MtcliError on every rank where one cannot open it, or finds another one there.
    """
    own = together(axis, lambda: find_checkpoint(path) if axis.rank == 0 else None)
    form, folder, of_run = gather_values(own and (own.format, str(own.folder), own.of_run), axis)[0]

    def open_here() -> Checkpoint:
        try:
            return open_found(CheckpointFolder(form, Path(folder), of_run))
        except MtcliError as error:
            if axis.rank == 0:
                raise
            where = f"rank {axis.rank} on {socket.gethostname()}"
            message = f"{where}: {error.problems[0].message}, and rank 0 has opened it"
            raise wrong(message, SHARED) from None

    checkpoint = together(axis, open_here)
    if axis.size > 1:
        fact = f"{checkpoint.folder} of step {checkpoint.step} with the hash {_hash(checkpoint)}"
        require_alike(axis, fact, "has opened")
    return checkpoint


def _hash(checkpoint: Checkpoint) -> str:
    """Hashes the manifest, which holds the hashes of all files, or where there is none blocks of
    every file."""
    folder = checkpoint.folder
    if checkpoint.format == "mtcli":
        return sampled_hash([folder / NAME])
    files = (path for path in folder.iterdir() if path.is_file() and os.access(path, os.R_OK))
    return sampled_hash(sorted(files))
