"""Opens Hugging Face folders as checkpoints by mapping names and shapes; copies nothing."""

import re
from functools import reduce
from pathlib import Path

import torch

from mtcli.core.checkpoint.folder import CheckpointFolder
from mtcli.core.checkpoint.huggingface.config_json import family_in, model_of
from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.checkpoint.huggingface.fp8_blocks import SCALES as FACTORS
from mtcli.core.checkpoint.huggingface.fp8_blocks import in_blocks
from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON, read_json
from mtcli.core.checkpoint.huggingface.multimodal import TEXT_MODELS, text_sources
from mtcli.core.checkpoint.huggingface.mxfp4 import BLOCKS, SCALES, packed
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE, OpenFiles, read_box
from mtcli.core.checkpoint.safetensors_file import StoredBox, TensorEntry, damaged, read_header
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import is_text, listed, shown
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import BOX_BYTES, Box, Parameter, boxes_of_at_most

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Sources = dict[str, tuple[str, str]]  # by a family's name of a tensor: its file, and its name there
Headers = dict[str, dict[str, TensorEntry]]


def open_hf(folder: Path) -> Checkpoint:
    """Opens the checkpoint in a Hugging Face folder.

    Raises MtcliError for a model that we cannot represent, for damaged or missing files, and for
    tensors that are missing, unknown or of another shape.
    """
    table = read_json(folder / CONFIG_JSON)
    family_in(table, folder / CONFIG_JSON)  # before the files are looked for
    sources, headers = _find_tensors(folder)
    sources, parts = text_sources(sources) if table["model_type"] in TEXT_MODELS else (sources, ())
    family = family_in(table, folder / CONFIG_JSON, sources)
    model = model_of(table, folder / CONFIG_JSON, sources)
    for old, new in family.older_names:
        sources = {re.sub(f"{re.escape(old)}$", new, n): at for n, at in sources.items()}
    if not any(name.startswith(family.base) for name in sources):
        head = family.tied_head
        sources = {n if n == head else family.base + n: at for n, at in sources.items()}
    tensors, used, files = {}, set[str](), OpenFiles()
    for name, parameter in parameters(model).items():
        for box in family.packed_boxes(parameter, model):
            if keys := {box.key + kind for kind in (BLOCKS, SCALES)} & sources.keys():
                used |= keys
                tensors[name] = _packed(folder, parameter, box, sources, headers, files)
        if name not in tensors:
            boxes = family.boxes(parameter, model)
            used.update(box.key for box in boxes)
            if factors := {box.key + FACTORS for box in boxes} & sources.keys():
                used |= factors
                tensors[name] = _in_blocks(folder, parameter, boxes, sources, headers, files)
            else:
                tensors[name] = _stored(folder, parameter, boxes, sources, headers)
    checkpoint = Checkpoint(
        open_files=files,
        folder=folder,
        model=model,
        tensors=tensors,
        tokenizer_folder=CheckpointFolder("hf", folder).tokenizer_folder,
        headers=headers,
        format="hf",
        unread=parts,
    )
    _refuse_unknown(checkpoint, family, {n: at for n, at in sources.items() if n not in used})
    return checkpoint


def weight_map(folder: Path) -> dict[str, str]:
    """Reads the file of each tensor in a folder of several. Raises MtcliError where the index is
    damaged, or names a file outside of the folder."""
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise damaged(path, "it has no weight_map")
    for name, file in files.items():
        if not is_text(file) or not re.fullmatch(r"[^/\\\x00.][^/\\\x00]*", file):
            what = f"{shown(name)} is in {shown(file)}"
            raise damaged(path, f"{what}, which is not a file of its folder")
    return files


def _find_tensors(folder: Path) -> tuple[Sources, Headers]:
    """Finds every tensor of the folder by the headers of its files."""
    if (folder / INDEX).exists():
        files = weight_map(folder)
        if (folder / SINGLE).exists() and SINGLE not in files.values():
            message = f"{folder} has {SINGLE}, and {INDEX} of other files"
            raise wrong(message, "remove what is not its weights; transformers reads the first")
    elif (folder / SINGLE).exists():
        files = dict.fromkeys(read_header(folder / SINGLE), SINGLE)
    else:
        hint = "is it complete? transformers' save_pretrained(...) writes such a folder"
        pickled = [p.name for p in sorted(folder.glob("*.bin"))][:1]
        has = f"only {pickled[0]}, a pickle that is never loaded" if pickled else "neither"
        raise wrong(f"{folder} should hold {SINGLE} or {INDEX} and has {has}", hint)
    headers = {file: read_header(folder / file) for file in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in headers[file]:
            raise damaged(folder / INDEX, f"it says that {name} is in {file}, which has no such")
    return {name: (file, name) for name, file in files.items()}, headers


def _stored(
    folder: Path, parameter: Parameter, boxes: list[StoredBox], sources: Sources, headers: Headers
) -> StoredTensor:
    missing = [box.key for box in boxes if box.key not in sources]
    if missing:
        raise _missing(folder, missing[0], parameter)
    stored, dtypes = [], []
    for box in boxes:
        file, key = sources[box.key]
        entry = headers[file][key]
        if entry.shape != box.shape:
            message = f"{key} is {list(entry.shape)} in {folder / file}"
            raise wrong(
                f"{message} and {list(box.shape)} by its {CONFIG_JSON}", "is it of this model?"
            )
        if entry.code not in DTYPE_OF_CODE:
            message = f"{key} is {entry.code} in {folder / file}, which cannot be loaded"
            raise wrong(message, "F64, F32, BF16 or F16; quantised weights are not read")
        dtypes.append(DTYPE_OF_CODE[entry.code])
        stored.append(box._replace(key=key, file=file, code=entry.code))
    return StoredTensor(reduce(torch.promote_types, dtypes), parameter.shape, tuple(stored))


def _packed(
    folder: Path,
    parameter: Parameter,
    box: StoredBox,
    sources: Sources,
    headers: Headers,
    files: OpenFiles,
) -> StoredTensor:
    keys = (box.key + kind for kind in (BLOCKS, SCALES))
    blocks, scales = (_entry(folder, parameter, key, sources, headers) for key in keys)
    return packed(parameter.shape, box, (blocks, scales), files)


def _in_blocks(
    folder: Path,
    parameter: Parameter,
    boxes: list[StoredBox],
    sources: Sources,
    headers: Headers,
    files: OpenFiles,
) -> StoredTensor:
    stored = []
    for box in boxes:
        keys = box.key, box.key + FACTORS
        numbers, factors = (_entry(folder, parameter, key, sources, headers) for key in keys)
        stored.append((box, numbers, factors))
    return in_blocks(parameter.shape, stored, files)


def _entry(
    folder: Path, parameter: Parameter, key: str, sources: Sources, headers: Headers
) -> tuple[Path, TensorEntry]:
    """Finds a tensor's file and its entry there."""
    if key not in sources:
        raise _missing(folder, key, parameter)
    file, name = sources[key]
    return folder / file, headers[file][name]


def _missing(folder: Path, key: str, parameter: Parameter) -> MtcliError:
    message = f"{folder} has no tensor {key}, which {parameter.name} is made of"
    return wrong(message, "is the folder complete?")


def _refuse_unknown(checkpoint: Checkpoint, family: Family, unread: Sources) -> None:
    if family.tied_head in unread and checkpoint.model.tie_embeddings:
        _require_tied(checkpoint, *unread.pop(family.tied_head))
    layers = str(checkpoint.model.num_layers)
    ignored = re.compile("|".join(family.ignored).replace("{num_layers}", layers))
    unknown = [key for name, (_, key) in unread.items() if not ignored.fullmatch(name)]
    if unknown:
        what = f"tensors that {family.model_type} does not"
        message = f"{checkpoint.folder} has {what}: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently; is model_type right?")


def _require_tied(checkpoint: Checkpoint, file: str, key: str) -> None:
    """Raises MtcliError where a stored copy of a tied head differs from the embedding."""
    path, entry = checkpoint.folder / file, checkpoint.headers[file][key]
    shape, dtype = checkpoint.shape("embedding.weight"), checkpoint.dtype("embedding.weight")
    same = entry.shape == shape and DTYPE_OF_CODE.get(entry.code) == dtype

    def is_embedding(box: Box) -> bool:
        head = torch.empty(box.size, dtype=dtype)
        read_box(checkpoint.open_files.get(path), entry.offset, shape, box, head)
        embedding = checkpoint.read("embedding.weight", box)
        return torch.equal(head.view(torch.uint8), embedding.view(torch.uint8))

    if not same or not all(map(is_embedding, boxes_of_at_most(shape, BOX_BYTES // dtype.itemsize))):
        hint = f"set tie_word_embeddings to false in its {CONFIG_JSON}, or remove {key}"
        raise wrong(f"{path} holds a {key} that differs from the embedding it is tied to", hint)
