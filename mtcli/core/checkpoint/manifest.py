"""Defines the manifest of a checkpoint folder: tensors by name, their global shapes, and their
shards.

A tensor has the name of its parameter, or `optimizer.<kind>/<parameter>`. Data-parallel replicas
with equal elements write them once; where replicas differ, a shard names its replica, and the
manifest counts them.

A manifest is untrusted: names may not leave the folder, and the shards of every tensor, of each
replica, must tile it. It ends with a hash of its own bytes, so that damage to the manifest is not
attributed to the files whose hashes it holds.

With more than MAX_RECORDS shards, or blocks of hashes larger than BLOCK_BYTES, shards are tables
(`shard_index`) instead of records: version 5. A model of 405B parameters on 16,384 ranks has three
million.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtcli.core.checkpoint.folder import MANIFEST
from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted, read_untrusted
from mtcli.core.mesh.sharding import Box

if TYPE_CHECKING:  # numpy takes a tenth of a second, which `mtcli plan` has no need of
    from mtcli.core.checkpoint.shard_index import ShardIndex

Version = Literal[2, 3, 4, 5]  # 5 is written of tables, 4 where replicas differ, and 3 elsewhere
OPTIMIZER = "optimizer."  # tensors "optimizer.<kind>/<parameter>"
BLOCK_BYTES = 2 << 20  # of hashes and writing
MAX_BLOCKS = 1 << 17  # of a checkpoint: blocks are larger where it would have more
MAX_RECORDS = 1 << 16
MAX_MANIFEST_BYTES = 1 << 30

Int64 = Annotated[int, Field(ge=0, lt=2**63)]
Extents = Annotated[tuple[Int64, ...], Field(max_length=16)]
_PART = r"[^/\\\x00.][^/\\\x00]*"
FileName = Annotated[str, Field(pattern=rf"^{_PART}(/{_PART})?$")]  # cannot leave the folder
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_SEAL = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"}$')


class ManifestSection(BaseModel):
    """A frozen section of the manifest, which refuses unknown keys and converts no types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )


class FileRecord(ManifestSection):
    """A file of the checkpoint."""

    bytes: Int64
    """size of the file"""
    xxh3_128: list[Hash]
    """hash of each block in order"""
    block_bytes: Annotated[int, Field(ge=BLOCK_BYTES, lt=2**63)] = BLOCK_BYTES
    """size of each block but the last"""


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
    shards: list[ShardRecord] = Field(alias="pieces", default_factory=list)
    keys: tuple[str, ...] = ()
    """keys in their files of the shards of a table"""
    table: Int64 | None = None
    """the number of the shards' table"""


class RankManifest(ManifestSection):
    """The tensors and files that one rank wrote."""

    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}


class Manifest(ManifestSection):
    """The tensors, shards and files of a checkpoint folder."""

    format: Literal["mtcli-checkpoint"] = "mtcli-checkpoint"
    version: Version = 3
    step: Int64
    """optimizer steps done"""
    world: Annotated[int, Field(ge=1)]
    """ranks that wrote it; config.toml says their layout"""
    replicas: Annotated[int, Field(ge=1)] = 1
    """data-parallel replicas whose tensors differ; 1: all are equal"""
    extra: dict[str, Any]
    """the progress of the run: consumed samples, random state, ..."""
    tensors: Annotated[dict[str, TensorRecord], Field(min_length=1)]
    tables: list[tuple[Annotated[int, Field(ge=3, le=35)], str]] = []
    """tables of shards: columns and rows, as `shard_index.pack` writes them"""
    files: dict[FileName, FileRecord]
    """every file but the manifest; tables refer to files by number, in this order"""
    xxh3_128: Hash | None = Field(default=None, exclude=True)
    """hash of the JSON before this last key; version 2 has none"""

    @cached_property
    def index(self) -> "ShardIndex":
        """Converts the shards to tables. Raises ValueError where records are in unlisted files,
        have other dimensions than their tensor, or are of another version."""
        if all(tensor.table is None for tensor in self.tensors.values()) and self.version < 5:
            return index_of(self)
        from mtcli.core.checkpoint.shard_index import IndexedTensor, ShardIndex

        index = ShardIndex(self.files, self.tables)
        for name, entry in self.tensors.items():
            if entry.table is None or self.version < 5:
                raise ValueError(f"{name} is not as version {self.version} has tensors")
            index.tensors[name] = IndexedTensor(entry.dtype, entry.shape, entry.keys, entry.table)
        return index

    def to_bytes(self) -> bytes:
        """Encodes the manifest as the JSON of its file, with the keys of its version alone."""
        of_shards = {"replica"} if self.replicas == 1 else set[str]()
        of_tensors: dict[str, Any] = {"keys": True, "table": True}
        of_tensors["shards"] = {"__all__": of_shards}
        absent: dict[str, Any] = {"tables": True, "files": {"__all__": {"block_bytes"}}}
        if self.version == 5:
            absent, of_tensors = {}, {"shards": True}
        if self.replicas == 1:
            absent["replicas"] = True
        text = self.model_dump_json(exclude=absent | {"tensors": {"__all__": of_tensors}}).encode()
        return text[:-1] + b',"xxh3_128":"%b"}' % xxhash.xxh3_128_hexdigest(text).encode()

    @classmethod
    def of(cls, index: "ShardIndex", files: dict[str, Any], **facts: Any) -> "Manifest":
        """Builds a manifest with tables; `files` are records of the index's files and then of
        others.

        pydantic makes the records of plain values, thousands of them in milliseconds.
        """
        tensors = {name: tensor._asdict() for name, tensor in index.tensors.items()}
        facts |= {"tensors": tensors, "tables": index.packed_tables(), "files": files}
        return cls.model_validate(facts | {"version": 5})

    def as_tables(self) -> "Manifest":
        """Converts to version 5, which is smaller and faster to read."""
        if self.version == 5:
            return self
        facts = self.model_dump(include={"step", "world", "replicas", "extra"})
        return Manifest.of(self.index, self.files, **facts)

    def as_short(self) -> "Manifest":
        """Converts to records, where these are few and no block of hashes is large."""
        large = any(record.block_bytes > BLOCK_BYTES for record in self.files.values())
        if large or self.index.num_shards() > MAX_RECORDS:
            return self
        tensors = {
            name: TensorRecord(
                dtype=tensor.dtype, shape=tensor.shape, pieces=self.index.records(tensor)
            )
            for name, tensor in self.index.tensors.items()
        }
        facts = self.model_dump(include={"step", "world", "replicas", "extra"})
        version = 3 if self.replicas == 1 else 4
        return Manifest(version=version, tensors=tensors, files=self.files, **facts)


def index_of(written: RankManifest | Manifest) -> "ShardIndex":
    """Converts the shards of records to tables. Raises ValueError; see `Manifest.index`."""
    from mtcli.core.checkpoint.shard_index import ShardIndex

    index = ShardIndex(written.files)
    number = {name: at for at, name in enumerate(written.files)}
    for name, tensor in written.tensors.items():
        rows = list[tuple[Any, ...]]()
        for shard in tensor.shards:
            if shard.file not in number:
                raise ValueError(f"{name} is in {shard.file}, which it does not list")
            if not len(shard.start) == len(shard.size) == len(tensor.shape):
                dims = f"do not have the {len(tensor.shape)} dimensions of its shape"
                raise ValueError(f"the pieces of {name} {dims}")
            replica = -1 if shard.replica is None else shard.replica
            rows.append((number[shard.file], shard.key, replica, *shard.start, *shard.size))
        index.add(name, (tensor.dtype, tensor.shape), rows)
    return index


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint folder.

    Raises MtcliError that names the file: missing, damaged, or of another version.
    """
    path = folder / MANIFEST
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
            *earlier, last = map(str, get_args(Version))
            message = f"{path} is of version {first['input']} of the format, and this mtcli reads "
            hint = "the mtcli that wrote it can hand it on: `mtcli shard SRC DST --to hf`"
            raise wrong(f"{message}{', '.join(earlier)} and {last}", hint) from None
        where = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    if not is_sealed and (manifest.xxh3_128 or manifest.version > 2):
        raise damaged(path, "it does not end with its own hash")
    check_shards(path, manifest)
    return manifest


def _check_seal(path: Path, text: bytes) -> bool:
    """Says whether a manifest ends with a hash. Raises MtcliError where the hash is of other
    bytes."""
    seal = _SEAL.search(text, max(0, len(text) - 64))
    if seal is None:
        return False
    hasher = xxhash.xxh3_128(memoryview(text)[: seal.start()])
    hasher.update(b"}")
    if hasher.hexdigest().encode() != seal[1]:
        raise damaged(path, "its bytes do not have the hash at its end")
    return True


def seal_of(folder: Path) -> str:
    """Reads the hash at the end of a manifest; of version 2, which has none, its last bytes."""
    try:
        with open_untrusted(folder / MANIFEST) as file:
            file.seek(max(0, file.seek(0, 2) - 64))
            text = file.read(64)
    except OSError as error:
        raise wrong(
            f"{folder / MANIFEST} cannot be read: {error.strerror}", "is it a checkpoint?"
        ) from None
    seal = _SEAL.search(text)
    return seal[1].decode() if seal else text.hex()


def check_shards(path: Path, manifest: Manifest) -> None:
    """Raises MtcliError where the shards of a tensor, of any replica, do not tile it, name an
    unknown file or replica, or use one stored tensor twice."""
    from mtcli.core.checkpoint.shard_index import fault_of

    try:
        fault = fault_of(manifest.index, manifest.replicas)
    except ValueError as error:
        fault = str(error)
    if fault:
        raise damaged(path, fault)


def is_optimizer(name: str) -> bool:
    """Says whether a tensor is optimizer state."""
    return name.startswith(OPTIMIZER)


def parameter_of(name: str) -> str:
    """Returns the parameter that a tensor belongs to: itself, or what follows
    `optimizer.<kind>/`."""
    return name.partition("/")[2] if is_optimizer(name) else name
