"""Converts a checkpoint to a Hugging Face folder: config, generation config, tokenizer, weights,
index."""

import json
from functools import partial as partial_of
from math import prod
from pathlib import Path

import torch

from mtcli.core.checkpoint.blocks import write_bytes, write_tensors
from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.folder import require_free, require_inside
from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.family import Family, Table
from mtcli.core.checkpoint.huggingface.json_files import (
    CONFIG_JSON,
    GENERATION_JSON,
    read_json,
)
from mtcli.core.checkpoint.huggingface.multimodal import text_of
from mtcli.core.checkpoint.huggingface.reader import INDEX, SINGLE
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE, code_of, dtype_name
from mtcli.core.checkpoint.safetensors_file import CODE_BYTES, StoredBox
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.convert.to_mtcli import WriteOptions, original_config, read_stored, tokenizer_of
from mtcli.core.mesh.parameters import parameters
from mtcli.core.runtime.atomic_writes import atomic_folder
from mtcli.core.runtime.process_pool import ProcessMemory, Progress, run_parts, shares

# Of a Hugging Face tensor, in its order: boxes of parameters, with their names.
Export = list[tuple[str, StoredBox]]


def to_hf(
    source: Checkpoint, final: Path, max_shard_bytes: int, options: WriteOptions
) -> ProcessMemory:
    """Writes the weights of `source` as a Hugging Face folder that transformers loads.

    Tensors go to files in order, each of at most `max_shard_bytes` or one tensor. Replicas that
    differ are averaged. Returns the peak memory of the workers. Raises MtcliError for a model that
    no family has, or the named one has not.
    """
    source = source.averaged()
    require_model(source, source.model)
    original = original_config(source)
    if original is not None:
        family = config_json.family_in(read_json(original), original)
    if options.family and (original is None or family.model_type != options.family):
        family, original = config_json.family_named(options.family, source.model), None
    elif original is None:
        family = config_json.family_of(source.model)
    by_key: dict[str, Export] = {}
    for name, parameter in parameters(source.model).items():
        code = code_of(options.dtype or source.dtype(name))
        for box in family.boxes(parameter, source.model):
            by_key.setdefault(box.key, []).append((name, box._replace(code=code)))
    exports = list(by_key.values())
    files = _files(exports, max_shard_bytes)
    sizes = [sum(map(_bytes, tensors)) for tensors in files.values()]
    require_free(final, options.force)
    with atomic_folder(final, sum(sizes)) as partial:
        items = list(files.items())
        parts = [[items[i] for i in part] for part in shares(sizes, options.nproc)]
        work = partial_of(_write_files, source, partial)
        _, memory = run_parts(work, parts, options.progress)
        if len(files) > 1:
            names = {export[0][1].key: file for file, t in files.items() for export in t}
            weight_map = dict(sorted(names.items()))
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            _write_json(partial / INDEX, index)
        for name, path in tokenizer_of(source).items():
            write_bytes(partial / name, read_untrusted(path))
        _write_configs(partial, source, family, original, DTYPE_OF_CODE[exports[0][0][1].code])
    return memory


def _bytes(export: Export) -> int:
    (_, box), *_ = export
    return prod(box.shape) * CODE_BYTES[box.code]


def _files(exports: list[Export], limit: int) -> dict[str, list[Export]]:
    groups: list[list[Export]] = [[]]
    size = 0
    for export in exports:
        if groups[-1] and size + _bytes(export) > limit:
            groups.append([])
            size = 0
        groups[-1].append(export)
        size += _bytes(export)
    for group in groups:
        group.sort(key=lambda export: -CODE_BYTES[export[0][1].code])  # all stay aligned
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def _write_files(
    source: Checkpoint, folder: Path, files: list[tuple[str, list[Export]]], progress: Progress
) -> None:
    for file, exports in files:
        tensors = (
            tensor
            for export in exports
            for name, box in export
            for tensor in read_stored(source, name, box, DTYPE_OF_CODE[box.code], progress)
        )
        plan = [(box.key, box.code, box.shape) for (_, box), *_ in exports]
        write_tensors(folder / file, plan, tensors, {"format": "pt"})


def _write_configs(
    folder: Path, source: Checkpoint, family: Family, original: Path | None, dtype: torch.dtype
) -> None:
    """Writes config.json and generation_config.json; the originals where the weights came with
    them and are of text alone."""
    tokens, given = _token_ids(source), None
    if original is None:
        table = config_json.config_to_hf(source.model, family) | tokens
    else:
        given = read_json(original)
        table = text_of(given, original)
    # of MXFP4 and float8 folders, whose weights are written decoded
    was_packed = table.pop("quantization_config", None) is not None
    names = {"torch_dtype", "dtype"} & set(table) or {"torch_dtype"}
    is_same = all(table.get(name) == dtype_name(dtype) for name in names)
    if original is not None and table is given and is_same and not was_packed:
        write_bytes(folder / CONFIG_JSON, read_untrusted(original))
    else:
        written = {"architectures": [family.architecture]} | dict.fromkeys(names, dtype_name(dtype))
        _write_json(folder / CONFIG_JSON, table | written)
    generation = original.with_name(GENERATION_JSON) if original is not None else None
    if generation is not None and generation.is_file():
        require_inside(source.folder, generation)
        write_bytes(folder / GENERATION_JSON, read_untrusted(generation))
    else:
        token_ids = {name: table.get(name) for name in tokens}
        _write_json(folder / GENERATION_JSON, {"_from_model_config": True} | token_ids)


def _token_ids(source: Checkpoint) -> Table:
    """Returns the ids that begin and end a text: the end-of-document token, or none."""
    if source.tokenizer_folder is None:
        return {"bos_token_id": None, "eos_token_id": None}
    from mtcli.core.data.tokenize import load_tokenizer

    end = load_tokenizer(source.tokenizer_folder).eod_id
    return {"bos_token_id": end, "eos_token_id": end}


def _write_json(path: Path, table: Table) -> None:
    write_bytes(path, (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode())
