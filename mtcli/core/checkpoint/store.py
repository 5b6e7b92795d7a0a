"""Saving a checkpoint: every rank writes the rectangles that it owns, and a rename makes it real.

A folder under its final name is complete: it is written aside, every file is fsynced, and the
manifest comes last. A save that fails on any rank fails on all, and leaves what was there before.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mtcli.core.checkpoint.dtypes import code_of, dtype_name
from mtcli.core.checkpoint.manifest import (
    NAME,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    check_pieces,
)
from mtcli.core.checkpoint.names import (
    CONFIG,
    PARTIAL,
    TOKENIZER,
    rank_file,
    step_folders,
    step_name,
)
from mtcli.core.checkpoint.tensorfile import Planned
from mtcli.core.checkpoint.writer import sync_folder, write_bytes, write_tensors
from mtcli.core.spec.errors import MtcliError, failed

Gather = Callable[[object], list[Any]]


class Piece(NamedTuple):
    """A rank's block of a global tensor: without padding, and given by one rank only."""

    name: str
    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Written(NamedTuple):
    """What a rank wrote: its files, and its pieces as (name, dtype, global shape, record)."""

    files: dict[str, FileRecord]
    pieces: list[tuple[str, str, tuple[int, ...], PieceRecord]]


class About(NamedTuple):
    """What a checkpoint says besides its tensors; `attached` maps a name in it to a file."""

    step: int
    extra: dict[str, Any]
    config_toml: str
    attached: dict[str, Path]


def save(  # noqa: PLR0913 - what a checkpoint holds, by name; a bundle would only rename it
    root: Path,
    step: int,
    pieces: list[Piece],
    *,
    rank: int,
    gather: Gather,
    extra: dict[str, Any],
    config_toml: str,
    tokenizer: Path | None,
    keep: int,
) -> Path:
    """Writes root/step-<step> from all ranks together and returns it; every rank calls it.

    `gather` returns every rank's object on every rank, in rank order, and is a barrier. `extra` is
    JSON. Then the newest `keep` checkpoints are kept, and 0 keeps all. Raises MtcliError (exit 1)
    on every rank where any could not write; the checkpoints that were there remain.
    """
    partial, final = root / (step_name(step) + PARTIAL), root / step_name(step)
    about = About(step, extra, config_toml, tokenizer_files(tokenizer))
    try:
        _together(gather, rank == 0, lambda: prepare(partial))
        written = _together(gather, True, lambda: write_pieces(partial, rank, pieces))
        _together(gather, rank == 0, lambda: commit(partial, final, written, about))
    except MtcliError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if rank == 0:
        _prune(root, keep, final)
    gather(None)
    return final


def prepare(partial: Path) -> None:
    """Makes the folder to write in, and removes what killed runs have left beside it."""
    for stale in partial.parent.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(stale)
    partial.mkdir(parents=True)


def write_pieces(folder: Path, rank: int, pieces: list[Piece]) -> Written:
    """Writes a rank's file in `folder`; none where the rank owns nothing."""
    pieces = sorted(
        (piece for piece in pieces if piece.tensor.numel()),
        key=lambda piece: -piece.tensor.element_size(),  # so that all are aligned to their size
    )
    if not pieces:
        return Written({}, [])
    name, keys = rank_file(rank), _keys([piece.name for piece in pieces])
    plan = [
        Planned(key, code_of(piece.tensor.dtype), tuple(piece.tensor.shape))
        for key, piece in zip(keys, pieces, strict=True)
    ]
    record = write_tensors(folder / name, plan, (piece.tensor for piece in pieces), {})
    found = [
        (piece.name, dtype_name(piece.tensor.dtype), piece.shape, _record(name, key, piece))
        for key, piece in zip(keys, pieces, strict=True)
    ]
    return Written({name: record}, found)


def commit(partial: Path, final: Path, written: list[Written], about: About) -> None:
    """Adds the small files and the manifest to `partial`, makes it durable, and renames it."""
    files = {name: record for part in written for name, record in part.files.items()}
    files[CONFIG] = write_bytes(partial / CONFIG, about.config_toml.encode())
    for name, source in sorted(about.attached.items()):
        (partial / name).parent.mkdir(exist_ok=True)
        files[name] = write_bytes(partial / name, source.read_bytes())
    manifest = Manifest(
        step=about.step,
        world=len(written),
        extra=about.extra,
        tensors=_tensors(written),
        files=files,
    )
    check_pieces(partial / NAME, manifest)
    write_bytes(partial / NAME, manifest.to_bytes())
    for folder in {(partial / name).parent for name in files}:
        sync_folder(folder)
    replace_folder(partial, final)


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name, over one that may be there."""
    old = final.with_name(final.name + ".old" + PARTIAL)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def tokenizer_files(folder: Path | None) -> dict[str, Path]:
    """The files of a tokenizer's folder by their names in a checkpoint."""
    if folder is None:
        return {}
    found = (path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return {f"{TOKENIZER}/{path.name}": path for path in found}


def _keys(names: list[str]) -> list[str]:
    count: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append(f"{name}#{count[name]}" if count[name] else name)
        count[name] += 1
    return keys


def _record(file: str, key: str, piece: Piece) -> PieceRecord:
    return PieceRecord(file=file, key=key, start=piece.start, size=tuple(piece.tensor.shape))


def _tensors(written: list[Written]) -> dict[str, TensorRecord]:
    kinds: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for part in written:
        for name, dtype, shape, record in part.pieces:
            kinds.setdefault(name, set()).add((dtype, tuple(shape)))
            pieces.setdefault(name, []).append(record)
    for name, kind in kinds.items():
        if len(kind) != 1:
            raise failed(f"ranks do not agree on the dtype and shape of {name}: {sorted(kind)}")
    return {
        name: TensorRecord.model_validate({"dtype": dtype, "shape": shape, "pieces": pieces[name]})
        for name, ((dtype, shape),) in kinds.items()
    }


def _together(gather: Gather, mine: bool, work: Callable[[], Any]) -> list[Any]:
    result, fault = _attempt(work) if mine else (None, "")
    answers = gather((result, fault))
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(answers) if fault]
    if faults:
        hint = "the checkpoints saved before are whole; free some space and --resume"
        raise failed(f"the checkpoint was not saved ({'; '.join(faults)})", hint)
    return [result for result, _ in answers]


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except MtcliError as error:
        return None, error.problems[0].message
    except OSError as error:
        return None, f"{error.filename or 'writing'}: {error.strerror}"
    except Exception as error:  # any: the other ranks wait in gather and must be told
        return None, f"{type(error).__name__}: {error}"


def _prune(root: Path, keep: int, newest: Path) -> None:
    steps = step_folders(root)
    for old in steps[: max(0, len(steps) - keep)] if keep else []:
        if old != newest:
            old.rename(old.with_name(old.name + PARTIAL))  # never half of one under its name
            shutil.rmtree(old.with_name(old.name + PARTIAL), ignore_errors=True)
