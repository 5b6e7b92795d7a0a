"""Conversion: any checkpoint to ours on any layout.

A slab of one tensor's rectangle is held at a time, so peak memory is bounded by SLAB_BYTES, and
neither by the model nor by its largest tensor.

Which rectangles of which tensors each rank of a layout saves.
"""

from collections.abc import Iterator
from functools import partial as partial_of
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.aside import written_aside
from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.reader import GENERATION, TOKENIZER_FILES
from mtcli.core.checkpoint.names import (
    HUGGINGFACE,
    TOKENIZER,
    is_optimizer,
    parameter_of,
    require_inside,
)
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.store import About, Outline, SavedPart, commit, write_outlined
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import ParallelConfig, RunConfig
from mtcli.core.convert.layout import output_config
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters, stage_layers, stage_parameters
from mtcli.core.mesh.sharding import (
    BOX_BYTES,
    Box,
    Parameter,
    boxes_of_at_most,
    owner_axes,
    rows_of_rank,
)
from mtcli.core.runtime.process_pool import ProcessMemory, Progress, run_parts, shares


class RankShard(NamedTuple):
    """A rectangle of a tensor, for one rank."""

    name: str
    box: Box


def rank_shards(
    checkpoint: Checkpoint, names: list[str], config: RunConfig, world: int
) -> list[list[RankShard]]:
    """For each rank, the cuts that it saves of some tensors of a checkpoint.

    Optimizer state is cut like its parameter, with zero = 1 over data ranks too, and with zero = 3
    so are weights. A tensor that belongs to no parameter is whole, on rank 0. Together the cuts
    tile every tensor once; some ranks may have none.
    """
    layout = ParallelLayout.of(config.parallel, world)
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(parameter_of(name), []).append(name)
    table = parameters(config.model)
    ranks: list[list[RankShard]] = []
    for rank in range(world):
        ranks.append([])
        for parameter in _held(config, layout, rank):
            whole, rows = _boxes(parameter, config, layout, rank)
            for name in wanted.get(parameter.name, []):
                is_cut = is_optimizer(name) or config.parallel.zero == 3
                ranks[-1] += [RankShard(name, box) for box in (rows if is_cut else whole)]
    for name in names:
        if parameter_of(name) not in table:
            shape = checkpoint.shape(name)
            ranks[0].append(RankShard(name, Box((0,) * len(shape), shape)))
    return ranks


def _boxes(
    parameter: Parameter, config: RunConfig, layout: ParallelLayout, rank: int
) -> tuple[list[Box], list[Box]]:
    """What a rank saves of a parameter, and of what the optimizer's owners cut like it."""
    whole = [parameter.box(layout, rank)] if parameter.is_primary(layout, rank) else []
    if not config.parallel.zero:
        return whole, whole
    owners = owner_axes(parameter, layout, config.parallel.sequence_parallel)
    if not parameter.is_primary(layout, rank, owners):
        return whole, []
    rows = rows_of_rank(parameter, layout, rank, owners)
    return whole, [box for _, box in parameter.row_boxes(layout, rank, rows)]


def _held(config: RunConfig, layout: ParallelLayout, rank: int) -> list[Parameter]:
    """The parameters of a rank's stages that it may save: a tied embedding on the first alone."""
    layers = stage_layers(config.model, layout, config.parallel.stage_layers)
    last = layout.num_stages - 1
    return [
        parameter
        for stage in layout.stages(layout.coordinates(rank)["pp"])
        for parameter in stage_parameters(config.model, layers[stage], stage == 0, stage == last)
        if parameter.owner != "first" or stage == 0
    ]


class WriteOptions(NamedTuple):
    """How to write: weights in a dtype (None keeps each tensor's), over what is there or not, and
    how many processes share the files."""

    dtype: torch.dtype | None = None
    force: bool = False
    progress: Progress = lambda _: None
    nproc: int = 1


def to_mtcli(
    source: Checkpoint, final: Path, parallel: ParallelConfig, world: int, options: WriteOptions
) -> ProcessMemory:
    """Writes `source` as a checkpoint of ours, one file per rank of a layout that owns anything.

    Optimizer state is cut as a run of that layout cuts it, and keeps its dtype. Returns what its
    workers took at most.
    """
    config = output_config(source, parallel, world)
    ranks = [
        [_outline(source, cut, options) for cut in cuts]
        for cuts in rank_shards(source, source.names(), config, world)
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
    path = folder / config_json.NAME
    if not path.is_file():
        return None
    model = config_json.model_of(config_json.read_json(require_inside(source.folder, path)), path)
    return path if config_json.says_the_same(model, source.model) else None


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


def _outline(source: Checkpoint, cut: RankShard, options: WriteOptions) -> Outline:
    keep = options.dtype is None or source.keeps_dtype(cut.name)
    dtype = source.dtype(cut.name) if keep else options.dtype
    return Outline(cut.name, dtype, cut.box, source.shape(cut.name))


def _bytes(outline: Outline) -> int:
    return prod(outline.box.size) * outline.dtype.itemsize


def _write_ranks(
    source: Checkpoint, folder: Path, ranks: list[tuple[int, list[Outline]]], progress: Progress
) -> list[tuple[int, SavedPart]]:
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
        for slab in boxes_of_at_most(outline.box.size, BOX_BYTES // outline.dtype.itemsize):
            block = source.read(outline.name, slab.moved(outline.box.start))
            yield block.to(outline.dtype)
            progress(block.nbytes)
