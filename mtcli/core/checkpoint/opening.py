"""Opens a checkpoint, ours, Hugging Face's or Megatron's, on one rank or the same one on all.

Rank 0 reads and checks our manifest and broadcasts it. Each rank checks sizes, headers and hashes
of its share of the files, and opens the files with its boxes. Machines may see different folders,
through a stale directory cache or on a local disk, and would train from mixed weights. So before
the first step, ranks check that errors, the checkpoint and the data are the same on all.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
from mtcli.core.checkpoint.huggingface.peft import WEIGHTS, open_peft
from mtcli.core.checkpoint.huggingface.reader import INDEX, SINGLE, open_hf, weight_map
from mtcli.core.checkpoint.integrity import check_headers, check_sizes
from mtcli.core.checkpoint.manifest import Manifest, read_manifest, seal_of
from mtcli.core.checkpoint.megatron.reader import open_megatron
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPES
from mtcli.core.checkpoint.retention import ReadLock, lock_for_reading
from mtcli.core.checkpoint.safetensors_file import CODES, OF_DAMAGE
from mtcli.core.checkpoint.shard_index import StoredShards
from mtcli.core.checkpoint.torchtitan.reader import open_titan
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.phases import in_force
from mtcli.core.parallel.collectives import first_bytes, first_value
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.together import SHARED, require_alike, together
from mtcli.core.runtime.atomic_writes import folder_of
from mtcli.core.runtime.hub import fetch_files, fetch_small, is_hub, parse_hub

Result = TypeVar("Result")


def open_checkpoint(path: Path, model: ModelConfig | None = None) -> Checkpoint:
    """Opens the checkpoint in a folder: ours, the newest of a run folder, Hugging Face's, or
    Megatron's, whose architecture is `model` where given.

    Raises MtcliError where there is none, or where it is damaged; where the newest checkpoint of a
    run is damaged, the error offers the one before.
    """
    return open_folder(find_checkpoint(path), model)


def open_folder(
    source: CheckpointFolder, model: ModelConfig | None = None, alone: bool = False
) -> Checkpoint:
    """Opens a checkpoint that was found; see `open_checkpoint`. With `alone`, one of our adapters
    is opened without the base weights."""
    try:
        if source.hub:
            source = _fetched(source)
        if source.format == "hf":
            return open_hf(source.folder)
        if source.format == "megatron":
            return open_megatron(source.folder, model)
        if source.format == "dcp":
            return open_titan(source.folder, model)
        if source.format == "peft":
            return open_peft(source, open_checkpoint)
        with offering_earlier(source.folder) if source.of_run else nullcontext():
            checkpoint = _open_ours(source.folder)
        if alone or not _has_adapters(checkpoint):
            return checkpoint
        return with_base(checkpoint, open_checkpoint, source.base)
    except OSError as error:  # of a folder that may not be read
        raise wrong(f"{source.folder} cannot be opened: {error.strerror}", KINDS) from None


def _fetched(source: CheckpointFolder) -> CheckpointFolder:
    """Fetches the weights of a model of the hub; all of it where another machine found it."""
    if not source.folder.is_dir():
        name = parse_hub(source.hub)._replace(revision=source.folder.name)
        source = source._replace(folder=fetch_small(str(name)))
    fetch_files(source.hub, source.folder, _weight_files(source))
    return source


def _weight_files(source: CheckpointFolder) -> list[str]:
    """Lists the files of weights by a folder's config and index, which are there."""
    if source.format == "peft":
        return [WEIGHTS]
    if (source.folder / INDEX).exists():
        files = {*weight_map(source.folder).values()}
        return sorted(file for file in files if file.endswith(".safetensors"))
    return [SINGLE]


@contextmanager
def offering_earlier(folder: Path) -> Iterator[None]:
    """Suggests, in an error about a run's checkpoint, the newest intact one before it, or says
    that a damaged one has none."""
    try:
        yield
    except MtcliError as error:
        steps = step_folders(folder.parent)
        earlier = steps[: steps.index(folder)] if folder in steps else []
        intact = next((path for path in reversed(earlier) if _opens(path)), None)
        if intact is None:
            offer = f"{folder.parent} has no other that is whole: use another copy of {folder.name}"
            problems = (
                p._replace(hint=offer) if p.hint == OF_DAMAGE else p for p in error.problems
            )
            raise MtcliError(*problems, code=error.code, hint=error.hint) from None
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
    checkpoint = _described(folder, read_manifest(folder), lock)
    check_sizes(checkpoint)
    check_headers(checkpoint)
    return checkpoint


def _described(folder: Path, manifest: Manifest, lock: ReadLock) -> Checkpoint:
    """Builds a checkpoint of ours from its manifest, without opening its files."""
    config, index = in_force(config_in(folder), manifest.step), manifest.index
    tensors = {
        name: StoredTensor(
            DTYPES[tensor.dtype], tensor.shape, StoredShards(index, tensor, CODES[tensor.dtype])
        )
        for name, tensor in index.tensors.items()
    }
    return Checkpoint(
        folder=folder,
        model=config.model,
        config=config,
        step=manifest.step,
        extra=manifest.extra,
        tensors=tensors,
        files=manifest.files,
        tokenizer_folder=CheckpointFolder("mtcli", folder).tokenizer_folder,
        world=manifest.world,
        lock=lock,
        replicas=manifest.replicas,
    )


def _has_adapters(checkpoint: Checkpoint) -> bool:
    return checkpoint.config is not None and checkpoint.config.lora.rank > 0


def newest_step(root: Path, axis: Axis) -> Path | None:
    """Returns the newest checkpoint under a folder as rank 0 sees it, if any. Collective.

    Raises MtcliError on every rank where another rank sees a newer one, as rank 0 would go back to
    an old step, or start over.
    """

    def list_steps() -> list[Path]:
        with folder_of("train.output", root):
            return step_folders(root)

    folders = together(axis, list_steps)
    own_newest, host = (str(folders[-1]) if folders else None), socket.gethostname()
    newest, first_host = first_value((own_newest, host) if axis.rank == 0 else None, axis)
    message = None
    if own_newest and (newest is None or step_of(Path(own_newest)) > step_of(Path(newest))):
        message = f"rank {axis.rank} on {host} sees the checkpoint {own_newest}, and rank 0 on "
        message += f"{first_host} sees {newest or 'none'}"
    if first := first_value(message, axis):
        raise wrong(first, SHARED, "train.output")
    return Path(newest) if newest else None


def open_agreed(
    path: Path, axis: Axis, base: str | None = None, flag: str = "--base"
) -> Checkpoint:
    """Opens the checkpoint in a folder, the newest of a run, as rank 0 finds it. Collective.

    `base` replaces the base weights that adapters name; `flag` names it in errors. Raises
    MtcliError on every rank where any rank cannot open the checkpoint, or finds another one.
    """
    located = together(axis, lambda: find_checkpoint(path) if axis.rank == 0 else None)
    facts = located and (located.format, str(located.folder), located.of_run)
    form, folder, of_run = first_value(facts, axis)
    hub = str(path) if is_hub(path) else ""
    source = CheckpointFolder(form, Path(folder), of_run, Path(base) if base else None, hub)
    if form == "mtcli":
        checkpoint = _open_ours_together(source, axis)
        if _has_adapters(checkpoint):
            read = partial(with_base, checkpoint, open_checkpoint, source.base, flag)
            return together(axis, read)
        return checkpoint
    checkpoint = together(axis, lambda: _as_rank_0(axis, lambda: open_folder(source)))
    if axis.size > 1:
        fact = f"{checkpoint.folder} of step {checkpoint.step} with the hash {_hash(checkpoint)}"
        require_alike(axis, fact, "has opened")
    return checkpoint


def _open_ours_together(source: CheckpointFolder, axis: Axis) -> Checkpoint:
    """Opens a checkpoint of ours by rank 0's manifest; each rank checks a share of its files."""
    folder, with_hint = source.folder, nullcontext if not source.of_run else offering_earlier

    def read() -> tuple[ReadLock, Manifest] | None:
        if axis.rank:
            return None
        with with_hint(folder):
            lock, manifest = lock_for_reading(folder), read_manifest(folder)
            check_sizes(_described(folder, manifest, lock))
        return lock, manifest

    opened = together(axis, read)
    manifest_bytes = opened[1].as_tables().to_bytes() if opened and axis.size > 1 else None
    manifest_bytes = first_bytes(manifest_bytes, axis)

    def describe() -> tuple[Checkpoint, str]:
        if opened is not None:
            return _described(folder, opened[1], opened[0]), seal_of(folder)
        lock, seal = lock_for_reading(folder), seal_of(folder)
        checkpoint = _described(folder, Manifest.model_validate_json(manifest_bytes or b""), lock)
        check_sizes(checkpoint, axis.rank, axis.size)
        return checkpoint, seal

    checkpoint, seal = together(axis, lambda: _as_rank_0(axis, describe))
    require_alike(axis, f"{folder} of step {checkpoint.step} with the hash {seal}", "has opened")

    def check_share() -> None:
        with with_hint(folder):
            check_headers(checkpoint, axis.rank, axis.size)

    together(axis, check_share)
    return checkpoint


def _as_rank_0(axis: Axis, work: Callable[[], Result]) -> Result:
    """Runs work that rank 0 has done, or does too; an error says that this rank cannot."""
    try:
        return work()
    except MtcliError as error:
        if axis.rank == 0:
            raise
        where = f"rank {axis.rank} on {socket.gethostname()}"
        message = f"{where}: {error.problems[0].message}, and rank 0 has opened it"
        raise wrong(message, SHARED) from None


def _hash(checkpoint: Checkpoint) -> str:
    """Hashes blocks of every file of a folder that has no manifest."""
    files = (path for path in checkpoint.folder.iterdir() if path.is_file())
    return sampled_hash(sorted(path for path in files if os.access(path, os.R_OK)))
