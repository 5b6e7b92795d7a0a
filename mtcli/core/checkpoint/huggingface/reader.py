"""Hugging Face folders read as checkpoints: names and shapes are translated, nothing is copied."""

import re
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch

from mtcli.core.checkpoint.boxes import read_box
from mtcli.core.checkpoint.dtypes import dtype_of_code
from mtcli.core.checkpoint.folder import TOKENIZERS, CheckpointFolder
from mtcli.core.checkpoint.huggingface.config_json import family_in, model_of, read_json
from mtcli.core.checkpoint.huggingface.family import Family, Part
from mtcli.core.checkpoint.reader import Checkpoint, StoredBox, StoredTensor
from mtcli.core.checkpoint.safetensors_file import TensorEntry, damaged, read_header
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_text, listed, shown
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import BOX_BYTES, Box, Parameter, boxes_of_at_most

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
TOKENIZER_FILES = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class TensorSource(NamedTuple):
    """Where a tensor is: its file, its name in it, and its entry there."""

    file: str
    key: str
    entry: TensorEntry


TensorSources = dict[str, TensorSource]  # by tensor name, with the family's prefix


def open_hf(folder: Path) -> Checkpoint:
    """The checkpoint in a Hugging Face folder.

    Raises MtcliError for a model we cannot represent, for damaged or missing files, and for
    tensors that are missing, unknown or of another shape.
    """
    table = read_json(folder / CONFIG)
    family, model = family_in(table, folder / CONFIG), model_of(table, folder / CONFIG)
    found, headers = _find_tensors(folder)
    found = _with_base(found, family)
    tensors, used = {}, set()
    for name, parameter in parameters(model).items():
        parts = family.parts(parameter, model)
        tensors[name] = _stored(folder, parameter, parts, found)
        used.update(part.name for part in parts)
    checkpoint = Checkpoint(
        folder=folder,
        model=model,
        config=None,
        step=0,
        extra={},
        tensors=tensors,
        files={},
        tokenizer_folder=CheckpointFolder("hf", folder).tokenizer_folder,
        headers=headers,
        format="hf",
    )
    _refuse_unknown(checkpoint, family, {n: at for n, at in found.items() if n not in used})
    return checkpoint


def _find_tensors(folder: Path) -> tuple[TensorSources, dict[str, dict[str, TensorEntry]]]:
    """Every tensor of the folder and its file, and the headers of the files."""
    if (folder / INDEX).exists():
        files = _index(folder)
    elif (folder / SINGLE).exists():
        files = dict.fromkeys(read_header(folder / SINGLE), SINGLE)
    else:
        hint = "convert it with transformers: save_pretrained(...) writes safetensors"
        pickled = [p.name for p in sorted(folder.glob("*.bin"))][:1]
        has = f"only {pickled[0]}, a pickle that is never loaded" if pickled else "neither"
        raise wrong(f"{folder} should hold {SINGLE} or {INDEX} and has {has}", hint)
    headers = {file: read_header(folder / file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise damaged(folder / INDEX, f"it says that {name} is in {file}, which has no such")
    found = {name: TensorSource(file, name, headers[file][name]) for name, file in files.items()}
    return found, headers


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise damaged(path, "it has no weight_map")
    for name, file in files.items():
        if not is_text(file) or not re.fullmatch(r"[^/\\\x00.][^/\\\x00]*", file):
            what = f"{shown(name)} is in {shown(file)}"
            raise damaged(path, f"{what}, which is not a file of its folder")
    return files


def _with_base(found: TensorSources, family: Family) -> TensorSources:
    if any(name.startswith(family.base) for name in found):
        return found
    return {name if name == HEAD else family.base + name: at for name, at in found.items()}


def _stored(
    folder: Path, parameter: Parameter, parts: list[Part], found: TensorSources
) -> StoredTensor:
    missing = [part.name for part in parts if part.name not in found]
    if missing:
        message = f"{folder} has no tensor {missing[0]}, which {parameter.name} is made of"
        raise wrong(message, "is the folder complete?")
    regions, dtypes = [], []
    for part in parts:
        file, key, entry = found[part.name]
        if entry.shape != part.shape:
            message = f"{key} is {list(entry.shape)} in {folder / file}"
            raise wrong(f"{message} and {list(part.shape)} by its {CONFIG}", "is it of this model?")
        dtype = dtype_of_code(entry.code)
        if dtype is None:
            message = f"{key} is {entry.code} in {folder / file}, which cannot be loaded"
            raise wrong(message, "F64, F32, BF16 or F16; quantised weights are not read")
        dtypes.append(dtype)
        regions.append(
            StoredBox(file, key, entry.code, entry.shape, part.view, part.axes, part.start)
        )
    return StoredTensor(reduce(torch.promote_types, dtypes), parameter.shape, tuple(regions))


def _refuse_unknown(checkpoint: Checkpoint, family: Family, rest: TensorSources) -> None:
    if HEAD in rest and checkpoint.model.tie_embeddings:
        _require_tied(checkpoint, rest.pop(HEAD))
    ignored = re.compile("|".join(family.ignored))
    unknown = [at.key for name, at in rest.items() if not ignored.fullmatch(name)]
    if unknown:
        what = f"tensors that {family.model_type} does not"
        message = f"{checkpoint.folder} has {what}: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently; is model_type right?")


def _require_tied(checkpoint: Checkpoint, at: TensorSource) -> None:
    """A stored copy of a tied head must be the embedding: else the model is not what it says."""
    path, shape = checkpoint.folder / at.file, checkpoint.shape("embedding.weight")
    dtype = checkpoint.dtype("embedding.weight")
    same = at.entry.shape == shape and dtype_of_code(at.entry.code) == dtype

    def is_embedding(slab: Box) -> bool:
        head = torch.empty(slab.size, dtype=dtype)
        read_box(checkpoint.open_files.get(path), at.entry.offset, shape, slab, head)
        embedding = checkpoint.read("embedding.weight", slab)
        return torch.equal(head.view(torch.uint8), embedding.view(torch.uint8))

    if not same or not all(map(is_embedding, boxes_of_at_most(shape, BOX_BYTES // dtype.itemsize))):
        hint = f"set tie_word_embeddings to false in its {CONFIG}, or remove {HEAD}"
        raise wrong(f"{path} holds a {HEAD} that differs from the embedding it is tied to", hint)
