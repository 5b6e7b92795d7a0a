"""The manifest of a checkpoint folder: tensors by name, their global shapes, and their shards.

A tensor has the name of its parameter, or `optimizer.<kind>/<parameter>`. Data-parallel replicas
that have the same elements write them once; where replicas differ, a shard says whose it is, and
the manifest how many there are.

A manifest is read as untrusted: names may not leave the folder, and the shards of every tensor, of
each replica, must tile it, each element exactly once. It ends with a hash of its own bytes, so that
damage to it is never laid on the files whose hashes it holds.
"""

import re
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.sharding import Box

NAME = "manifest.json"
Version = Literal[2, 3, 4]  # 4 is written where replicas differ, and 3 elsewhere
OPTIMIZER = "optimizer."  # tensors "optimizer.<kind>/<parameter>"
BLOCK_BYTES = 2 << 20  # of hashes and writing
MAX_MANIFEST_BYTES = 1 << 30
MAX_CELLS = 1 << 24  # of the grid that proves that boxes tile a tensor

Int64 = Annotated[int, Field(ge=0, lt=2**63)]
Extents = Annotated[tuple[Int64, ...], Field(max_length=16)]
_PART = r"[^/\\\x00.][^/\\\x00]*"
FileName = Annotated[str, Field(pattern=rf"^{_PART}(/{_PART})?$")]  # cannot leave the folder
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_SEAL = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"}$')


class ManifestSection(BaseModel):
    """A frozen section of the manifest that refuses unknown keys and guesses no types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )


class FileRecord(ManifestSection):
    """A file of the checkpoint."""

    bytes: Int64
    """its size"""
    xxh3_128: list[Hash]
    """of each BLOCK_BYTES of it in turn"""


class ShardRecord(ManifestSection):
    """A box of a global tensor, stored as one tensor of one file."""

    file: FileName
    key: str
    start: Extents
    size: Extents
    replica: Int64 | None = None
    """the data-parallel replica that has these elements; None: all have them"""

    @property
    def box(self) -> Box:
        """The box of the global tensor."""
        return Box(self.start, self.size)


class TensorRecord(ManifestSection):
    """A global tensor and the shards that tile it."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    shape: Extents
    shards: Annotated[list[ShardRecord], Field(alias="pieces")]


class RankManifest(ManifestSection):
    """Lists the tensors and files that one rank wrote."""

    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}


class Manifest(ManifestSection):
    """Lists the tensors, shards and files of a checkpoint folder."""

    format: Literal["mtcli-checkpoint"] = "mtcli-checkpoint"
    version: Version = 3
    step: Int64
    """optimizer steps done"""
    world: Annotated[int, Field(ge=1)]
    """ranks that wrote it; config.toml says their layout"""
    replicas: Annotated[int, Field(ge=1)] = 1
    """data-parallel replicas whose tensors differ; 1: all are equal"""
    extra: dict[str, Any]
    """what the writer wanted to keep: consumed samples, random state, ..."""
    tensors: Annotated[dict[str, TensorRecord], Field(min_length=1)]
    files: dict[FileName, FileRecord]
    """every file but this one"""
    xxh3_128: Hash | None = Field(default=None, exclude=True)
    """of the JSON without it, where it comes last; version 2 has none"""

    def to_bytes(self) -> bytes:
        """The manifest as the JSON of its file; nothing of replicas where they are equal."""
        equal = {"replicas": True, "tensors": {"__all__": {"shards": {"__all__": {"replica"}}}}}
        text = self.model_dump_json(exclude=equal if self.replicas == 1 else None).encode()
        return text[:-1] + b',"xxh3_128":"%b"}' % xxhash.xxh3_128_hexdigest(text).encode()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint folder; checks that every file is there and of its size.

    Raises MtcliError that names the file: missing, damaged, or of another version.
    """
    path = folder / NAME
    try:
        text = read_untrusted(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is it a checkpoint?") from None
    is_sealed = _check_seal(path, text)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("version",) and isinstance(first["input"], int):
            *known, last = map(str, get_args(Version))
            message = f"{path} is of version {first['input']} of the format, and this mtcli reads "
            hint = "the mtcli that wrote it can hand it on: `mtcli shard SRC DST --to hf`"
            raise wrong(f"{message}{', '.join(known)} and {last}", hint) from None
        where = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    if not is_sealed and (manifest.xxh3_128 or manifest.version > 2):
        raise damaged(path, "it does not end with its own hash")
    check_shards(path, manifest)
    check_sizes(folder, manifest)
    return manifest


def _check_seal(path: Path, text: bytes) -> bool:
    """Whether a manifest ends with a hash. Raises MtcliError where that is of other bytes."""
    seal = _SEAL.search(text, max(0, len(text) - 64))
    if seal is None:
        return False
    hasher = xxhash.xxh3_128(memoryview(text)[: seal.start()])
    hasher.update(b"}")
    if hasher.hexdigest().encode() != seal[1]:
        raise damaged(path, "its bytes do not have the hash at its end")
    return True


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises MtcliError that names the first file that is missing or of another size."""
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise damaged(path, f"it cannot be opened ({error.strerror})") from None
        if size != record.bytes:
            raise damaged(path, f"it has {size} bytes and the manifest says {record.bytes}")


def check_shards(path: Path, manifest: Manifest) -> None:
    """Raises MtcliError where the shards of a tensor, of any replica, do not tile it, or name no
    known file or replica, or one tensor of a file twice."""
    seen: set[tuple[str, str]] = set()
    for name, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            if shard.file not in manifest.files:
                raise damaged(path, f"{name} is in {shard.file}, which it does not list")
            if (shard.file, shard.key) in seen:  # a small file would be a model of any size
                raise damaged(path, f"{shard.key} of {shard.file} is in it twice")
            seen.add((shard.file, shard.key))
            if shard.replica is not None and shard.replica >= manifest.replicas:
                has = f"replica {shard.replica} of {name}"
                raise damaged(path, f"it has {has} and says that there are {manifest.replicas}")
        differs = any(shard.replica is not None for shard in tensor.shards)
        for replica in range(manifest.replicas) if differs else (None,):
            boxes = [shard.box for shard in tensor.shards if shard.replica in (None, replica)]
            if fault := tiling_fault(tensor.shape, boxes):
                which = name if replica is None else f"replica {replica} of {name}"
                raise damaged(path, f"the pieces of {which} {fault}")


def tiling_fault(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Words how boxes fail to cover every element of a tensor once; "" if they do."""
    for box in boxes:
        if not len(box.start) == len(box.size) == len(shape):
            return f"do not have the {len(shape)} dimensions of its shape"
        if any(a + n > size for a, n, size in zip(box.start, box.size, shape, strict=True)):
            return f"leave its shape {list(shape)}: start {box.start}, size {box.size}"
    if sum(prod(box.size) for box in boxes) != prod(shape):
        return f"hold {sum(prod(box.size) for box in boxes)} of its {prod(shape)} elements"
    return "" if len(boxes) < 2 else _overlap(boxes)


def _overlap(boxes: list[Box]) -> str:
    import numpy as np  # a tenth of a second, which `mtcli plan` has no need of

    starts = np.array([box.start for box in boxes], dtype=np.int64)
    ends = starts + np.array([box.size for box in boxes], dtype=np.int64)
    edges = [np.unique(np.concatenate([a, b])) for a, b in zip(starts.T, ends.T, strict=True)]
    if prod(len(edge) for edge in edges) > MAX_CELLS:
        return f"are cut in more than {MAX_CELLS} ways"
    cells = np.zeros([len(edge) for edge in edges], dtype=bool)
    for start, end in zip(starts, ends, strict=True):
        index = tuple(
            slice(*np.searchsorted(edge, (a, b)))
            for edge, a, b in zip(edges, start, end, strict=True)
        )
        if cells[index].any():
            return f"overlap at {start.tolist()}"
        cells[index] = True
    return ""


def is_optimizer(name: str) -> bool:
    """Whether a tensor is optimizer state."""
    return name.startswith(OPTIMIZER)


def parameter_of(name: str) -> str:
    """The parameter that a tensor belongs to: itself, or what follows `optimizer.<kind>/`."""
    return name.partition("/")[2] if is_optimizer(name) else name
