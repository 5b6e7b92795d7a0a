"""Saving a checkpoint: every rank writes the rectangles that it owns, and a rename makes it real.

A folder under its final name is complete: it is written aside, every file is fsynced, and the
manifest comes last. A save that fails on any rank fails on all, and leaves what was there before.
"""

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.aside import replace_folder, require_space
from mtcli.core.checkpoint.dtypes import code_of, dtype_name
from mtcli.core.checkpoint.manifest import (
    NAME,
    FileRecord,
    Manifest,
    ManifestPart,
    ShardRecord,
    TensorRecord,
    check_shards,
)
from mtcli.core.checkpoint.names import (
    CONFIG,
    PARTIAL,
    TOKENIZER,
    rank_file,
    require_inside,
    step_name,
)
from mtcli.core.checkpoint.retention import prune
from mtcli.core.checkpoint.safetensors_file import PlannedTensor
from mtcli.core.checkpoint.writer import write_bytes, write_tensors
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.sharding import BOX_BYTES, Box, boxes_of_at_most
from mtcli.core.runtime.atomic_writes import make_folder

Gather = Callable[[object], list[Any]]


class Shard(NamedTuple):
    """A rank's block of a global tensor: without padding, and given by one rank only."""

    name: str
    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Outline(NamedTuple):
    """A piece without its elements: its place in a global tensor of a dtype and shape."""

    name: str
    dtype: torch.dtype
    box: Box
    shape: tuple[int, ...]


class SavedPart(ManifestPart):
    """The part of the manifest that one rank wrote."""

    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}


class About(NamedTuple):
    """What a checkpoint says besides its tensors; `attached` maps a name in it to a file."""

    step: int
    extra: dict[str, Any]
    config_toml: str
    attached: dict[str, Path]


def save(  # noqa: PLR0913 - what a checkpoint holds, by name; a bundle would only rename it
    root: Path,
    step: int,
    pieces: list[Shard],
    *,
    rank: int,
    gather: Gather,
    progress: Callable[[], None] = lambda: None,
    extra: dict[str, Any],
    config_toml: str,
    tokenizer: Path | None,
    keep: int,
    keep_every: int = 0,
) -> Path:
    """Writes root/step-<step> from all ranks together and returns it; every rank calls it.

    `gather` returns every rank's JSON on every rank, in rank order, and is a barrier. `progress` is
    called as the save goes on. `extra` is JSON. Then the newest `keep` checkpoints stay (0: all),
    and those of multiples of `keep_every`.
    Raises MtcliError (exit 1) on every rank where any could not write; the checkpoints that were
    there remain.
    """
    partial, final = root / (step_name(step) + PARTIAL), root / step_name(step)

    def write() -> dict[str, Any]:
        try:
            return write_shards(partial, rank, pieces, progress).model_dump(mode="json")
        except OSError as error:
            raise _counted(error, root, needed) from None

    def finish(written: list[SavedPart]) -> None:
        commit(partial, written, About(step, extra, config_toml, tokenizer_files(tokenizer)))
        replace_folder(partial, final)

    needed = sum(gather(sum(piece.tensor.nbytes for piece in pieces)))
    try:
        together(gather, rank == 0, lambda: prepare(partial, needed))
        written = [SavedPart.model_validate(part) for part in together(gather, True, write)]
        together(gather, rank == 0, lambda: finish(written))
    except MtcliError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, keep, keep_every, final)
    gather(None)
    return final


def prepare(partial: Path, needed_bytes: int) -> None:
    """Makes the folder to write in, and removes what killed runs have left beside it.

    Raises MtcliError (exit 1) where the disk has no room for it.
    """
    for stale in partial.parent.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(stale)
    make_folder(partial.parent)
    partial.mkdir()
    require_space(partial, needed_bytes)


def write_shards(
    folder: Path, rank: int, pieces: list[Shard], progress: Callable[[], None] = lambda: None
) -> SavedPart:
    """Writes a rank's file in `folder`; none where the rank owns nothing.

    `progress` is called after at most SLAB_BYTES each.
    """
    full = [piece for piece in pieces if piece.tensor.numel()]
    full.sort(key=lambda piece: -piece.tensor.element_size())  # all aligned to their item's size
    outlines = [
        Outline(p.name, p.tensor.dtype, Box(p.start, tuple(p.tensor.shape)), p.shape) for p in full
    ]

    def tensors() -> Iterator[Tensor]:
        for piece in full:
            most = BOX_BYTES // piece.tensor.element_size()
            for box in boxes_of_at_most(tuple(piece.tensor.shape), most):
                yield piece.tensor[box.slices]
                progress()

    return write_outlined(folder, rank, outlines, tensors())


def write_outlined(
    folder: Path, rank: int, outlines: list[Outline], tensors: Iterable[Tensor]
) -> SavedPart:
    """As `write_pieces`, of tensors that may be made one at a time, in the outlines' order."""
    if not outlines:
        return SavedPart()
    file, keys = rank_file(rank), _keys([outline.name for outline in outlines])
    plan = [
        PlannedTensor(key, code_of(outline.dtype), outline.box.size)
        for key, outline in zip(keys, outlines, strict=True)
    ]
    record = write_tensors(folder / file, plan, tensors, {})
    tensors = {
        outline.name: TensorRecord(dtype=dtype_name(outline.dtype), shape=outline.shape, pieces=[])
        for outline in outlines
    }
    for key, outline in zip(keys, outlines, strict=True):
        piece = ShardRecord(file=file, key=key, start=outline.box.start, size=outline.box.size)
        tensors[outline.name].pieces.append(piece)
    return SavedPart(files={file: record}, tensors=tensors)


def commit(partial: Path, written: list[SavedPart], about: About) -> None:
    """Adds the small files and, last, the manifest to a folder that holds the ranks' files."""
    files = {name: record for part in written for name, record in part.files.items()}
    files[CONFIG] = write_bytes(partial / CONFIG, about.config_toml.encode())
    for name, source in sorted(about.attached.items()):
        (partial / name).parent.mkdir(exist_ok=True)
        files[name] = write_bytes(partial / name, read_untrusted(source))
    manifest = Manifest(
        step=about.step,
        world=len(written),
        extra=about.extra,
        tensors=_tensors(written),
        files=files,
    )
    check_shards(partial / NAME, manifest)
    write_bytes(partial / NAME, manifest.to_bytes())


def tokenizer_files(folder: Path | None) -> dict[str, Path]:
    """The files of a tokenizer's folder by their names in a checkpoint."""
    if folder is None:
        return {}
    found = (path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return {f"{TOKENIZER}/{path.name}": require_inside(folder, path) for path in found}


def _keys(names: list[str]) -> list[str]:
    count: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append(f"{name}#{count[name]}" if count[name] else name)
        count[name] += 1
    return keys


def _tensors(written: list[SavedPart]) -> dict[str, TensorRecord]:
    tensors: dict[str, TensorRecord] = {}
    for name, record in (item for part in written for item in part.tensors.items()):
        known = tensors.setdefault(name, record.model_copy(update={"pieces": []}))
        kind, before = (record.dtype, record.shape), (known.dtype, known.shape)
        if kind != before:
            raise failed(f"{name} is {kind} on one rank and {before} before")
        known.pieces.extend(record.pieces)
    return tensors


def together(gather: Gather, mine: bool, work: Callable[[], Any]) -> list[Any]:
    """What the work gave on each rank whose it is (`mine`), in rank order.

    Raises MtcliError (exit 1) on every rank where it failed on any, with that one's reason.
    """
    result, fault = _attempt(work) if mine else (None, "")
    answers = gather((result, fault))
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(answers) if fault]
    if faults:
        hint = "the checkpoints saved before are whole; free some space and --resume"
        raise failed(f"the checkpoint was not saved ({'; '.join(faults)})", hint)
    return [result for result, _ in answers]


def _counted(error: OSError, root: Path, needed_bytes: int) -> Exception:
    """The error, with both numbers where the disk is full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = shutil.disk_usage(root).free
    message = f"{error.filename or root}: {error.strerror}"
    return failed(f"{message}: the checkpoint takes {needed_bytes} bytes and {free} are free")


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except MtcliError as error:
        return None, error.problems[0].message
    except OSError as error:
        return None, f"{error.filename or 'writing'}: {error.strerror or error}"
    except Exception as error:  # any: the other ranks wait in gather and must be told
        return None, f"{type(error).__name__}: {error}"
