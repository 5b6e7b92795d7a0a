"""Conversion: any checkpoint to ours on any layout.

A slab of one tensor's rectangle is held at a time, so peak memory is bounded by SLAB_BYTES, and
neither by the model nor by its largest tensor.
"""

from collections.abc import Iterator
from functools import partial as partial_of
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint import hfconfig
from mtcli.core.checkpoint.aside import written_aside
from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.cuts import Cut, cuts_of
from mtcli.core.checkpoint.hf import GENERATION, TOKENIZER_FILES
from mtcli.core.checkpoint.layouts import output_config
from mtcli.core.checkpoint.names import HUGGINGFACE, TOKENIZER, require_inside
from mtcli.core.checkpoint.store import About, Outline, Written, commit, write_outlined
from mtcli.core.checkpoint.workers import Memory, Progress, run_parts, shares
from mtcli.core.spec.config import ParallelConfig
from mtcli.core.spec.load import dump_toml
from mtcli.core.spec.sharding import SLAB_BYTES, slabs


class Options(NamedTuple):
    """How to write: weights in a dtype (None keeps each tensor's), over what is there or not, and
    how many processes share the files."""

    dtype: torch.dtype | None = None
    force: bool = False
    progress: Progress = lambda _: None
    nproc: int = 1


def to_mtcli(
    source: Checkpoint, final: Path, parallel: ParallelConfig, world: int, options: Options
) -> Memory:
    """Writes `source` as a checkpoint of ours, one file per rank of a layout that owns anything.

    Optimizer state is cut as a run of that layout cuts it, and keeps its dtype. Returns what its
    workers took at most.
    """
    config = output_config(source, parallel, world)
    ranks = [
        [_outline(source, cut, options) for cut in cuts]
        for cuts in cuts_of(source, source.names(), config, world)
    ]
    attached = tokenizer_files(source, f"{TOKENIZER}/") | _originals(source)
    about = About(source.step, source.extra, dump_toml(config), attached)
    sizes = [sum(_bytes(outline) for outline in outlines) for outlines in ranks]
    with written_aside(final, sum(sizes), options.force) as partial:
        parts = [[(rank, ranks[rank]) for rank in part] for part in shares(sizes, options.nproc)]
        work = partial_of(_write_ranks, source, partial)
        results, memory = run_parts(work, parts, options.progress)
        written = dict(pair for pairs in results for pair in pairs)
        commit(partial, [written[rank] for rank in range(world)], about)
    return memory


def tokenizer_files(source: Checkpoint, prefix: str) -> dict[str, Path]:
    """The tokenizer's files of a checkpoint, by prefixed name."""
    folder = source.tokenizer_folder
    if folder is None:
        return {}
    is_ours = source.config is not None  # whose folder holds nothing else
    return {
        prefix + path.name: require_inside(source.folder, path)
        for path in sorted(folder.iterdir())
        if path.is_file() and (is_ours or path.name in TOKENIZER_FILES) and path.name[0] != "."
    }


def original_config(source: Checkpoint) -> Path | None:
    """The config.json that the weights came with, where there is one that is still true."""
    folder = source.folder if source.config is None else source.folder / HUGGINGFACE
    path = folder / hfconfig.NAME
    if not path.is_file():
        return None
    model = hfconfig.model_of(hfconfig.read_json(require_inside(source.folder, path)), path)
    return path if hfconfig.says_the_same(model, source.model) else None


def _originals(source: Checkpoint) -> dict[str, Path]:
    path = original_config(source)
    if path is None:
        return {}
    files = (path, path.with_name(GENERATION))
    return {
        f"{HUGGINGFACE}/{file.name}": require_inside(source.folder, file)
        for file in files
        if file.is_file()
    }


def _outline(source: Checkpoint, cut: Cut, options: Options) -> Outline:
    keep = options.dtype is None or source.keeps_dtype(cut.name)
    dtype = source.dtype(cut.name) if keep else options.dtype
    return Outline(cut.name, dtype, cut.box, source.shape(cut.name))


def _bytes(outline: Outline) -> int:
    return prod(outline.box.size) * outline.dtype.itemsize


def _write_ranks(
    source: Checkpoint, folder: Path, ranks: list[tuple[int, list[Outline]]], progress: Progress
) -> list[tuple[int, Written]]:
    """Writes the files of some ranks."""
    written = []
    for rank, outlines in ranks:
        full = [outline for outline in outlines if prod(outline.box.size)]
        full.sort(key=lambda outline: -outline.dtype.itemsize)
        tensors = _read_all(source, full, progress)
        written.append((rank, write_outlined(folder, rank, full, tensors)))
    return written


def _read_all(source: Checkpoint, outlines: list[Outline], progress: Progress) -> Iterator[Tensor]:
    for outline in outlines:
        for slab in slabs(outline.box.size, SLAB_BYTES // outline.dtype.itemsize):
            block = source.read(outline.name, slab.moved(outline.box.start))
            yield block.to(outline.dtype)
            progress(block.nbytes)
