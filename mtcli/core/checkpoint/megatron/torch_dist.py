"""Folders of torch.distributed.checkpoint: which tensors there are, and where their chunks lie."""

from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.checkpoint.megatron.pickles import (
    NamedClass,
    PickledObject,
    pairs_of,
    read_pickle,
)
from mtcli.core.checkpoint.megatron.torch_zip import ByteRange
from mtcli.core.checkpoint.safetensors_file import MAX_DIMS, damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.sharding import Box

NAME = ".metadata"
MAX_BYTES = 1 << 30
MODULE = "torch.distributed.checkpoint."
NEEDED = {"torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"}
CODES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
}
KINDS = {f"torch.{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
KINDS |= {"torch.bool", "torch.float8_e4m3fn", "torch.float8_e5m2", *CODES}


class SavedChunk(NamedTuple):
    """A rectangle of a saved tensor, and the archive that holds it."""

    box: Box
    file: str
    offset: int
    length: int

    def span(self, folder: Path) -> ByteRange:
        """Where the archive is."""
        return ByteRange(folder / self.file, self.offset, self.length)


class SavedTensor(NamedTuple):
    """A saved tensor: the safetensors code of its dtype ("" where we have none), its shape, and
    the chunks that should tile it."""

    code: str
    shape: tuple[int, ...]
    chunks: list[SavedChunk]


class DistcpContents(NamedTuple):
    """What a folder holds: tensors, and the names of other objects, by name."""

    tensors: dict[str, SavedTensor]
    objects: list[str]


def read_contents(folder: Path) -> DistcpContents:
    """The contents of a folder, by its .metadata, which is read as data.

    Raises MtcliError that names what is missing, damaged or more than data.
    """
    path = folder / NAME
    try:
        data = read_untrusted(path, MAX_BYTES)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is the folder complete?") from None
    record = read_pickle(data, path, _allowed)
    try:
        return _contents(path, record)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
        raise damaged(path, "it is not the metadata of torch.distributed.checkpoint") from None


def _allowed(name: str) -> bool:
    if name in NEEDED or name in KINDS or name == "pathlib.PosixPath":
        return True
    return name.startswith((MODULE, "megatron.core.dist_checkpointing."))


def _contents(path: Path, record: Any) -> DistcpContents:
    places = {}
    for key, value in pairs_of(record.get("storage_data")):
        offsets = _size(key.get("offset")) if key.get("offset") is not None else None
        places[(key.get("fqn"), offsets)] = value
    tensors, objects = {}, []
    for name, value in pairs_of(record.get("state_dict_metadata")):
        if not isinstance(name, str):
            raise TypeError
        if value.name.endswith(".TensorStorageMetadata"):
            tensors[name] = _saved(path, name, value, places)
        else:
            objects.append(name)
    return DistcpContents(tensors, objects)


def _saved(
    path: Path, name: str, value: PickledObject, places: dict[Any, PickledObject]
) -> SavedTensor:
    dtype = _dtype(value.get("properties"))
    shape = _size(value.get("size"))
    chunks = []
    for given in value.get("chunks"):
        box = Box(_size(given.get("offsets")), _size(given.get("sizes")))
        place = places.get((name, box.start))
        if place is None:
            raise damaged(path, f"{name} has a chunk at {box.start} that is nowhere")
        if place.get("transform_descriptors"):
            raise wrong(f"{path}: {name} is compressed, which is not read", "save it as it is")
        chunks.append(SavedChunk(box, _file(path, place), place.get("offset"), place.get("length")))
    return SavedTensor(CODES.get(dtype, ""), shape, chunks)


def _dtype(properties: PickledObject) -> str:
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    return dtype.name if isinstance(dtype, NamedClass) else ""


def _size(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    ((numbers,),) = (value.arguments,) if isinstance(value, PickledObject) else ((value,),)
    sizes = tuple(numbers)
    if len(sizes) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**48 for n in sizes):
        raise ValueError
    return sizes


def _file(path: Path, place: PickledObject) -> str:
    name, at = place.get("relative_path"), (place.get("offset"), place.get("length"))
    if not isinstance(name, str) or "/" in name or name in ("", ".", "..") or "\0" in name:
        raise damaged(path, "it names a file outside of its folder")
    if not all(type(n) is int and n >= 0 for n in at):
        raise ValueError
    return name
