"""Writing a complete Hugging Face folder: config, generation config, tokenizer, weights, index."""

import json
from collections.abc import Iterator
from functools import partial as partial_of
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.aside import written_aside
from mtcli.core.checkpoint.dtype_names import CODE_BYTES
from mtcli.core.checkpoint.dtypes import code_of, dtype_name
from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.family import Family, Part, Table
from mtcli.core.checkpoint.huggingface.reader import GENERATION, INDEX, SINGLE
from mtcli.core.checkpoint.huggingface.registry import BY_TYPE
from mtcli.core.checkpoint.names import require_inside
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.safetensors_file import PlannedTensor
from mtcli.core.checkpoint.writer import write_bytes, write_tensors
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.convert.to_mtcli import WriteOptions, original_config, tokenizer_files
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import BOX_BYTES, boxes_of_at_most
from mtcli.core.runtime.process_pool import ProcessMemory, Progress, run_parts, shares


class Export(NamedTuple):
    """A Hugging Face tensor to write: what it is made of, and in which dtype."""

    parameter: str
    part: Part
    dtype: torch.dtype

    @property
    def planned(self) -> PlannedTensor:
        """Its entry of a file's header."""
        return PlannedTensor(self.part.name, code_of(self.dtype), self.part.shape)

    @property
    def bytes(self) -> int:
        """Its size in a file."""
        return prod(self.part.shape) * self.dtype.itemsize


def to_hf(
    source: Checkpoint, final: Path, max_shard_bytes: int, options: WriteOptions
) -> ProcessMemory:
    """Writes the weights of `source` as a Hugging Face folder that transformers loads.

    Tensors go to shards in order, each of at most `max_shard_bytes` or one tensor. Returns what its
    workers took at most. Raises MtcliError for a model that no family has.
    """
    source.require_model(source.model)
    original = original_config(source)
    family = _family(source, original)
    exports = _exports(source, family, options)
    shards = _shards(exports, max_shard_bytes)
    with written_aside(final, sum(e.bytes for e in exports), options.force) as partial:
        files, sizes = list(shards.items()), [sum(e.bytes for e in s) for s in shards.values()]
        parts = [[files[i] for i in part] for part in shares(sizes, options.nproc)]
        work = partial_of(_write_shards, source, partial)
        _, memory = run_parts(work, parts, options.progress)
        if len(shards) > 1:
            _write_json(partial / INDEX, _index(shards))
        for name, path in tokenizer_files(source, "").items():
            write_bytes(partial / name, read_untrusted(path))
        _write_configs(partial, source, family, original, exports[0].dtype)
    return memory


def _family(source: Checkpoint, original: Path | None) -> Family:
    if original is None:
        return config_json.family_of(source.model)
    return BY_TYPE[config_json.read_json(original)["model_type"]]


def _exports(source: Checkpoint, family: Family, options: WriteOptions) -> list[Export]:
    return [
        Export(name, part, options.dtype or source.dtype(name))
        for name, parameter in parameters(source.model).items()
        for part in family.parts(parameter, source.model)
    ]


def _shards(exports: list[Export], limit: int) -> dict[str, list[Export]]:
    groups: list[list[Export]] = [[]]
    size = 0
    for export in exports:
        if groups[-1] and size + export.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(export)
        size += export.bytes
    for group in groups:
        group.sort(key=lambda export: -CODE_BYTES[export.planned.code])  # all stay aligned
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def _write_shards(
    source: Checkpoint, folder: Path, shards: list[tuple[str, list[Export]]], progress: Progress
) -> None:
    for name, exports in shards:
        plan = [export.planned for export in exports]
        tensors = _read_all(source, exports, progress)
        write_tensors(folder / name, plan, tensors, {"format": "pt"})


def _read_all(source: Checkpoint, exports: list[Export], progress: Progress) -> Iterator[Tensor]:
    for parameter, part, dtype in exports:
        order = [part.axes.index(axis) for axis in range(len(part.axes))]
        for slab in boxes_of_at_most(part.view, BOX_BYTES // dtype.itemsize):
            block = source.read(parameter, part.box_of(slab))
            yield block.permute(order).to(dtype)
            progress(block.nbytes)


def _index(shards: dict[str, list[Export]]) -> Table:
    files = {export.part.name: name for name, shard in shards.items() for export in shard}
    total = sum(export.bytes for shard in shards.values() for export in shard)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}


def _write_configs(
    folder: Path, source: Checkpoint, family: Family, original: Path | None, dtype: torch.dtype
) -> None:
    """config.json and generation_config.json: the originals where the weights came with them."""
    tokens = _token_ids(source)
    if original is None:
        table = config_json.config_to_hf(source.model, family) | tokens
    else:
        table = config_json.read_json(original)
    names = {"torch_dtype", "dtype"} & set(table) or {"torch_dtype"}
    if original is not None and all(table.get(name) == dtype_name(dtype) for name in names):
        write_bytes(folder / config_json.NAME, read_untrusted(original))
    else:
        _write_json(folder / config_json.NAME, table | dict.fromkeys(names, dtype_name(dtype)))
    generation = original.with_name(GENERATION) if original is not None else None
    if generation is not None and generation.is_file():
        require_inside(source.folder, generation)
        write_bytes(folder / GENERATION, read_untrusted(generation))
    else:
        kept = {name: table.get(name) for name in tokens}
        _write_json(folder / GENERATION, {"_from_model_config": True} | kept)


def _token_ids(source: Checkpoint) -> Table:
    """The ids that begin and end a text: the end-of-document token, or none."""
    if source.tokenizer_folder is None:
        return {"bos_token_id": None, "eos_token_id": None}
    from mtcli.core.data.tokenize import load_tokenizer

    end = load_tokenizer(source.tokenizer_folder).eod_id
    return {"bos_token_id": end, "eos_token_id": end}


def _write_json(path: Path, table: Table) -> None:
    write_bytes(path, (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())
