"""Writes a checkpoint as a GGUF file by the package `gguf`, and compares it with its reader.

Tensors are read, laid out, encoded and written in chunks of rows, so memory does not grow with
them. Those that llama.cpp keeps in float32 are vectors, biases, routers, and learned positions.
Rows that 32 does not divide have no q8_0, and are float16, as llama.cpp has them.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.json_files import read_json
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import dtype_name
from mtcli.core.config.errors import failed, wrong
from mtcli.core.config.untrusted import open_untrusted
from mtcli.core.convert.gguf.metadata import architecture_of, facts_of, notes
from mtcli.core.convert.gguf.tensors import GgufTensor, gguf_tensors
from mtcli.core.convert.gguf.token_table import name_of, vocabulary_of
from mtcli.core.convert.to_mtcli import original_config
from mtcli.core.data.chat_template import load_chat_template
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.mesh.sharding import BOX_BYTES, boxes_of_at_most
from mtcli.core.runtime.atomic_writes import atomic_file, folder_of
from mtcli.core.runtime.outputs import require_apart

SUFFIX, MAGIC = ".gguf", b"GGUF"
BLOCK = 32  # of q8_0, which has a float16 scale and an int8 for each
# By the name of --dtype: GGUF's type, llama.cpp's number of a file that is mostly so.
TYPES = {"fp32": ("F32", 0), "fp16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}
BITS = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8}
EXACT = ("ffn_gate_inp", "position_embd")  # stay float32


class GgufPlan(NamedTuple):
    """The plan of a file: what llama.cpp calls the architecture, each tensor with GGUF's type, and
    the type of most of them by its name in --dtype."""

    architecture: str
    tensors: list[tuple[GgufTensor, str]]
    dtype: str


def plan_gguf(source: Checkpoint, family: str | None, dtype: str | None) -> GgufPlan:
    """Plans the file of a checkpoint. Raises MtcliError where llama.cpp cannot run its model."""
    require_package()
    require_model(source, source.model)
    original = original_config(source)
    if family is None and original is not None:
        family = config_json.family_in(read_json(original), original).model_type
    architecture = architecture_of(source.model, family)
    name = dtype or OF_DTYPE[dtype_name(source.dtype("embedding.weight"))]
    if name not in TYPES:
        raise wrong(f"--dtype {name} with --to gguf", f"one of {', '.join(TYPES)}", "--dtype")
    tensors = [
        (one, _type_of(one, TYPES[name][0])) for one in gguf_tensors(source.model, architecture)
    ]
    return GgufPlan(architecture, tensors, name)


def require_package() -> ModuleType:
    """Imports the package `gguf`. Raises MtcliError where it is missing."""
    try:
        return import_module("gguf")
    except ModuleNotFoundError:
        raise wrong("GGUF needs the package gguf", "pip install 'mtcli[gguf]'") from None


def require_free_file(final: Path, force: bool) -> None:
    """Raises MtcliError where DST is no name of a GGUF file, or taken by something that may not be
    replaced."""
    if final.suffix != SUFFIX:
        raise wrong(f"{final} does not end in {SUFFIX}", f"{final}{SUFFIX}", "DST")
    if not final.exists() and not final.is_symlink():
        return
    is_gguf = False
    if final.is_file() and not final.is_symlink():
        with open_untrusted(final) as file:
            is_gguf = file.read(4) == MAGIC
    if not is_gguf:
        message = f"{final} exists and is no GGUF file, and --force replaces nothing else"
        raise wrong(message, "name another file, or remove it yourself", "DST")
    if not force:
        raise wrong(f"{final} exists", "name another file, or give --force to replace it", "DST")


def to_gguf(source: Checkpoint, final: Path, plan: GgufPlan, verify: bool) -> dict[str, Any]:
    """Writes a checkpoint; returns the result in numbers. With `verify` every tensor is read back.

    Replicas that differ are averaged. Raises MtcliError (exit 1) where the disk fails, or a tensor
    differs.
    """
    source = source.averaged()
    require_apart(source.folders, [final], "DST")
    with folder_of("DST", final), atomic_file(final) as partial_file:
        _write(source, partial_file, plan)
        facts = _verified(source, partial_file, plan) if verify else {}
    sizes = {kind: 0 for kind in BITS}
    for _, kind in plan.tensors:
        sizes[kind] += 1
    return {
        "format": "gguf",
        "source": str(source.folder),
        "output": str(final),
        "architecture": plan.architecture,
        "dtype": plan.dtype,
        "tensors": {kind.lower(): count for kind, count in sizes.items() if count},
        "bytes": final.stat().st_size,
        "notes": notes(source.model, plan.architecture),
    } | facts


def _write(source: Checkpoint, path: Path, plan: GgufPlan) -> None:
    gguf = require_package()
    writer = gguf.GGUFWriter(path, plan.architecture)
    _describe(writer, source, plan)
    for tensor, kind in plan.tensors:
        quantised = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), _bytes(tensor, kind), quantised
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in plan.tensors:
            writer.write_tensor_data(_Rows(source, tensor, kind))
    finally:
        writer.close()


def _describe(writer: Any, source: Checkpoint, plan: GgufPlan) -> None:
    """Adds the keys of the model and of its vocabulary."""
    model = source.model
    name = source.folder.absolute().name
    writer.add_file_type(TYPES[plan.dtype][1])
    writer.add_quantization_version(2)
    for key, value in facts_of(model, plan.architecture).items():
        _add(writer, f"{plan.architecture}.{key}", value)
    folder = source.tokenizer_folder
    if folder is None:
        writer.add_name(name)
        writer.add_tokenizer_model("no_vocab")
        return
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer.config)
    vocabulary = vocabulary_of(tokenizer, model.vocab_size, template.source if template else None)
    writer.add_name(name_of(name, plan.architecture, vocabulary))
    for key, value in vocabulary.facts.items():
        _add(writer, f"tokenizer.{key}", value)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)


def _add(writer: Any, key: str, value: int | float | str) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _type_of(tensor: GgufTensor, kind: str) -> str:
    """Chooses GGUF's type of a tensor, as llama.cpp does."""
    is_vector = len(tensor.shape) == 1 or not tensor.name.endswith(".weight")
    if is_vector or any(name in tensor.name for name in EXACT):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % BLOCK else kind


def _bytes(tensor: GgufTensor, kind: str) -> int:
    count = prod(tensor.shape)
    scales = count // BLOCK * 2 if kind == "Q8_0" else 0
    return count * BITS[kind] // 8 + scales


class _Rows:
    """A tensor as the package's writer takes it, which is written chunk by chunk."""

    def __init__(self, source: Checkpoint, tensor: GgufTensor, kind: str) -> None:
        self.nbytes = _bytes(tensor, kind)
        self._chunks = partial(encoded_chunks, source, tensor, kind)

    def tofile(self, file: Any) -> None:
        for chunk in self._chunks():
            file.write(chunk.data)


def encoded_chunks(source: Checkpoint, tensor: GgufTensor, kind: str) -> Iterator[np.ndarray]:
    """Yields the bytes of a tensor in GGUF's type, in chunks of whole rows: uint8 arrays."""
    gguf = require_package()
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    for values in value_chunks(source, tensor):
        with np.errstate(over="ignore"):
            encoded = gguf.quantize(values, quantised)
        if not np.isfinite(values).all() or (kind == "F16" and np.isinf(encoded).any()):
            raise failed(f"{tensor.name} holds values that {kind.lower()} has not", "--dtype bf16")
        yield np.ascontiguousarray(encoded).reshape(-1).view(np.uint8)


def value_chunks(source: Checkpoint, tensor: GgufTensor) -> Iterator[np.ndarray]:
    """Yields the values of a tensor in chunks of whole rows, a vector's of any part of it: float32
    [rows, width]."""
    width = tensor.shape[-1] if len(tensor.shape) > 1 else -1
    if tensor.values:
        yield np.array(tensor.values, np.float32).reshape(1, -1)
    for name, box in tensor.boxes:
        most = prod(box.size) if tensor.turned else BOX_BYTES // 4
        for part in boxes_of_at_most(box.size, most):
            values = source.read(name, part.moved(box.start)).float().numpy()
            if tensor.turned:
                values = _neighbours(values.reshape(-1, *values.shape[2:]), tensor.turned)
            values = values + np.float32(tensor.offset)
            yield values.reshape(-1, width) if width > 0 else values.reshape(1, -1)


def _neighbours(rows: np.ndarray, dim: int) -> np.ndarray:
    """Reorders the rows of heads [heads, D, ...] so that the halves of a head are neighbours."""
    heads, _, *inner = rows.shape
    return rows.reshape(heads, 2, dim // 2, *inner).swapaxes(1, 2).reshape(rows.shape)


def _verified(source: Checkpoint, path: Path, plan: GgufPlan) -> dict[str, Any]:
    """Compares each tensor of a file, as the package reads it, with the checkpoint's.

    Returns how many are equal and the largest rounding, relative to the largest value of a row.
    Raises MtcliError (exit 1) with the first that differs.
    """
    gguf = require_package()
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    rounding = 0.0
    for tensor, kind in plan.tensors:
        theirs = found.pop(tensor.name, None)
        shape = None if theirs is None else tuple(reversed([int(n) for n in theirs.shape]))
        if theirs is None or shape != tensor.shape or theirs.tensor_type.name != kind:
            raise failed(f"{path}: {tensor.name} is {shape}, and not {tensor.shape}", "write again")
        data, start = theirs.data.reshape(-1).view(np.uint8), 0
        for values, chunk in zip(
            value_chunks(source, tensor), encoded_chunks(source, tensor, kind), strict=True
        ):
            stored = data[start : start + chunk.size]
            start += chunk.size
            if not np.array_equal(stored, chunk):
                raise failed(f"{path}: {tensor.name} is not what was written", "is the disk sound?")
            rounding = max(rounding, _rounding(gguf, values, stored, kind))
    if found:
        raise failed(f"{path} also holds {', '.join(found)}", "write it again")
    return {"tensors_equal": len(plan.tensors), "largest_rounding": rounding}


def _rounding(gguf: ModuleType, values: np.ndarray, stored: np.ndarray, kind: str) -> float:
    """The largest difference of a row's values from their decoded ones, over its largest value."""
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    decoded = gguf.dequantize(stored.reshape(len(values), -1), quantised).reshape(values.shape)
    largest = np.abs(values).max(-1, keepdims=True)
    apart = np.abs(decoded - values) / np.where(largest > 0, largest, 1.0)
    return float(apart.max(initial=0.0))
