"""Converts any checkpoint to ours, on any layout.

A box of BOX_BYTES is in memory at a time, so the peak depends neither on the model nor on its
largest tensor.
"""

from collections.abc import Iterator
from functools import partial as partial_of
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.compatibility import keeps_dtype
from mtcli.core.checkpoint.folder import (
    HUGGINGFACE,
    TOKENIZER,
    TOKENIZER_FILES,
    require_free,
    require_inside,
    tokenizer_files,
)
from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.json_files import (
    CONFIG_JSON,
    GENERATION_JSON,
    read_json,
)
from mtcli.core.checkpoint.manifest import is_optimizer, parameter_of
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.checkpoint.store import (
    Shard,
    block_bytes_of,
    commit,
    dump_written,
    merge_written,
    write_shards,
)
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
from mtcli.core.runtime.atomic_writes import atomic_folder
from mtcli.core.runtime.process_pool import ProcessMemory, Progress, run_parts, shares


class WriteOptions(NamedTuple):
    """Options of writing: the dtype of weights (None: each tensor's own), whether to replace the
    target, the number of processes, and the Hugging Face family (None: the first that fits)."""

    dtype: torch.dtype | None = None
    force: bool = False
    progress: Progress = lambda _: None
    nproc: int = 1
    family: str | None = None


def to_mtcli(
    source: Checkpoint, final: Path, parallel: ParallelConfig, world: int, options: WriteOptions
) -> ProcessMemory:
    """Writes `source` as a checkpoint of ours, with one file per rank of the layout that owns
    anything.

    Optimizer state keeps its dtype and is sharded as in a run on the layout. Returns the peak
    memory of the workers.
    """
    config = output_config(source, parallel, world)
    ranks = list(rank_shards(source, config, world, options.dtype))
    attached = {f"{TOKENIZER}/{name}": path for name, path in tokenizer_of(source).items()}
    if original := original_config(source):
        paths = (original, original.with_name(GENERATION_JSON))
        attached |= {
            f"{HUGGINGFACE}/{path.name}": require_inside(source.folder, path)
            for path in paths
            if path.is_file()
        }
    facts = {"step": source.step, "world": world, "extra": source.extra}
    facts["replicas"] = source.replicas
    sizes = [sum(shard.tensor.nbytes for shard in shards) for shards in ranks]
    require_free(final, options.force)
    with atomic_folder(final, sum(sizes)) as partial:
        parts = [[(rank, ranks[rank]) for rank in part] for part in shares(sizes, options.nproc)]
        work = partial_of(_write_ranks, source, partial, block_bytes_of(sum(sizes)))
        results, memory = run_parts(work, parts, options.progress)
        written = dict(pair for pairs in results for pair in pairs)
        merged = merge_written([written[rank] for rank in range(world)])
        commit(partial, merged, facts, dump_toml(config), attached)
    return memory


def rank_shards(
    source: Checkpoint, config: RunConfig, world: int, dtype: torch.dtype | None
) -> Iterator[list[Shard]]:
    """Yields for each rank the shards that it saves of a checkpoint, on the meta device.

    Optimizer state is sharded like its parameter, with zero = 1 also over data ranks; with zero =
    3, so are weights. Rank 0 owns a tensor that belongs to no parameter. Together the shards tile
    every tensor, of each replica, once; some ranks may have none.
    """
    layout, table = ParallelLayout.of(config.parallel, world), parameters(config.model)
    names: dict[str, list[str]] = {}
    for name in source.names():
        names.setdefault(parameter_of(name), []).append(name)

    def shards(name: str, boxes: list[Box]) -> Iterator[Shard]:
        keep = dtype is None or keeps_dtype(source, name)
        kind = source.dtype(name) if keep else dtype
        for box in boxes:
            tensor = torch.empty(box.size, dtype=kind, device="meta")
            for replica in source.replicas_of(name):
                yield Shard(name, tensor, box.start, source.shape(name), replica)

    unowned = [name for name in source.names() if parameter_of(name) not in table]
    for rank in range(world):
        saved = list[Shard]()
        for parameter in _saved_parameters(config, layout, rank):
            boxes, owned = _boxes(parameter, config, layout, rank)
            for name in names.get(parameter.name, []):
                is_owned = is_optimizer(name) or config.parallel.zero == 3
                saved += shards(name, owned if is_owned else boxes)
        for name in unowned if rank == 0 else ():
            saved += shards(name, [Box.of(source.shape(name))])
        yield saved


def _saved_parameters(config: RunConfig, layout: ParallelLayout, rank: int) -> list[Parameter]:
    """Lists the parameters of a rank's stages that it may save: a tied embedding on the first stage
    alone."""
    layers = stage_layers(config.model, layout, config.parallel.stage_layers)
    last, table = layout.num_stages - 1, parameters(config.model)
    return [
        parameter
        for stage in layout.stages(layout.coordinates(rank)["pp"])
        for parameter in stage_parameters(table, layers[stage], stage == 0, stage == last)
        if parameter.layer != "first" or stage == 0
    ]


def _boxes(
    parameter: Parameter, config: RunConfig, layout: ParallelLayout, rank: int
) -> tuple[list[Box], list[Box]]:
    """Returns the boxes that a rank saves of a parameter, and of its optimizer state, which owners
    share by rows."""
    boxes = [parameter.box(layout, rank)] if parameter.is_primary(layout, rank) else []
    if not config.parallel.zero:
        return boxes, boxes
    owners = owner_axes(parameter, layout, config.parallel.sequence_parallel)
    if not parameter.is_primary(layout, rank, owners):
        return boxes, []
    rows = rows_of_rank(parameter, layout, rank, owners)
    return boxes, [box for _, box in parameter.row_boxes(layout, rank, rows)]


def _write_ranks(
    source: Checkpoint,
    folder: Path,
    block_bytes: int,
    ranks: list[tuple[int, list[Shard]]],
    progress: Progress,
) -> list[tuple[int, dict[str, Any]]]:
    def read(shard: Shard) -> Iterator[Tensor]:
        stored = StoredBox.plain("", shard.name, "", shard.box, shard.replica)
        return read_stored(source, shard.name, stored, shard.tensor.dtype, progress)

    return [
        (rank, dump_written(write_shards(folder, rank, shards, read, block_bytes)))
        for rank, shards in ranks
    ]


def read_stored(
    source: Checkpoint, name: str, stored: StoredBox, dtype: torch.dtype, progress: Progress
) -> Iterator[Tensor]:
    """Reads a tensor in the order of its stored box, by boxes of at most BOX_BYTES."""
    for part in boxes_of_at_most(stored.view, BOX_BYTES // dtype.itemsize):
        values = source.read(name, stored.box_of(part), stored.replica)
        yield values.permute(stored.order).to(dtype)
        progress(values.nbytes)


def tokenizer_of(source: Checkpoint) -> dict[str, Path]:
    """Returns the files of a checkpoint's tokenizer by name; a Hugging Face folder holds other
    files too."""
    names = None if source.config is not None else TOKENIZER_FILES
    return tokenizer_files(source.tokenizer_folder, source.folder, names)


def original_config(source: Checkpoint) -> Path | None:
    """Returns the config.json that the weights came with, where it still describes the model."""
    folder = source.folder if source.config is None else source.folder / HUGGINGFACE
    path = folder / CONFIG_JSON
    if not path.is_file():
        return None
    model = config_json.model_of(read_json(require_inside(source.folder, path)), path)
    return None if config_json.differing_fields(model, source.model) else path
