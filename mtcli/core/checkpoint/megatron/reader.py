"""Opens Megatron-LM's torch_dist checkpoints of GPT models in place.

They are folders of torch.distributed.checkpoint. One saved tensor stacks a parameter of all layers,
[layers, ...], and ranks have sharded it into chunks; each chunk becomes boxes of ours. Pickles are
read as data, without their classes: see torch_save.py.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtcli.core.checkpoint.folder import METADATA
from mtcli.core.checkpoint.huggingface.json_files import read_json
from mtcli.core.checkpoint.megatron.gpt import (
    PADDED,
    alternatives,
    factored_boxes,
    factors,
    model_of,
)
from mtcli.core.checkpoint.megatron.torch_save import (
    ByteRange,
    NamedClass,
    PickledObject,
    find_tensor,
    pairs_of,
    read_object,
    read_pickle,
)
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE
from mtcli.core.checkpoint.safetensors_file import (
    CODE_BYTES,
    MAX_DIMS,
    StoredBox,
    TensorEntry,
    damaged,
)
from mtcli.core.checkpoint.shard_index import boxes_fault
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import listed, open_untrusted, read_untrusted
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter

COMMON = "common.pt"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
AHEAD = "mtp."  # multi-token prediction, which training and evaluation do not use here
# What arguments and a run's state are made of: classes whose names are read, and nothing else.
NAMED_IN_COMMON = ("torch.", "megatron.", "transformer_engine.", "pathlib.", "argparse.", "numpy.")
MORE_NAMES = {"collections.OrderedDict", "datetime.timedelta", "signal.Signals", "_codecs.encode"}
MORE_NAMES |= {"types.SimpleNamespace", "__builtin__.set", "__builtin__.bytes", "builtins.set"}
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


class Chunk(NamedTuple):
    """A box of a saved tensor, and the archive that holds it."""

    box: Box
    archive: ByteRange


class ChunkedTensor(NamedTuple):
    """A saved tensor: the safetensors code of its dtype ("" for an unsupported one), its shape, and
    the chunks that should tile it."""

    code: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


def open_megatron(folder: Path, model: ModelConfig | None) -> Checkpoint:
    """Opens a torch_dist checkpoint's weights; `model` is the architecture where the checkpoint
    states none.

    Raises MtcliError for another format, for an architecture that is not stated or not supported,
    for damaged files, and for tensors that are missing, unknown or of another shape.
    """
    _require_torch_dist(folder)
    common = _common(folder)
    arguments = common.get("args")
    said = arguments.state if isinstance(arguments, PickledObject) else {}
    model = model or model_of(said if isinstance(said, dict) else {}, folder / COMMON)
    saved = read_metadata(folder)
    with ExitStack() as files:
        reader = ChunkReader(folder, saved, files)
        tensors = {name: reader.stored(p, model) for name, p in parameters(model).items()}
    unread = saved.keys() - reader.used
    optimizer = {name for name in unread if OPTIMIZER.match(name)}
    ahead = {name for name in unread if name.startswith(AHEAD)}
    if unknown := sorted(unread - optimizer - ahead):
        what = "tensors that a GPT model of this architecture has not"
        message = f"{folder} has {what}: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently; does --config say what it is?")
    step = common.get("iteration")
    return Checkpoint(
        folder=folder,
        model=model,
        step=step if type(step) is int and step >= 0 else 0,
        tensors=tensors,
        tokenizer_folder=None,
        headers=reader.headers,
        format="megatron",
        unread=("the optimizer's state",) * bool(optimizer)
        + ("layers that predict further ahead",) * bool(ahead),
    )


def _require_torch_dist(folder: Path) -> None:
    hint = "save it with --ckpt-format torch_dist, or convert it with Megatron-LM's tools"
    if not (folder / METADATA).is_file():
        message = f"{folder} is a Megatron checkpoint of torch.save, a pickle that is never loaded"
        raise wrong(message, hint)
    backend = read_json(folder / METADATA).get("sharded_backend")
    if backend != "torch_dist":
        raise wrong(f"{folder} is a Megatron checkpoint in the format {backend!r}", hint)


def _common(folder: Path) -> dict[str, Any]:
    path = folder / COMMON
    if not path.is_file():
        raise wrong(f"{folder} has no {COMMON}", "is the folder complete?")

    def is_argument(name: str) -> bool:
        return name.startswith(NAMED_IN_COMMON) or name in MORE_NAMES

    table = read_object(ByteRange(path, 0, path.stat().st_size), is_argument)
    if not isinstance(table, dict):
        raise damaged(path, "it is not a table")
    return table


@dataclass
class ChunkReader:
    """A lookup of parameters among saved tensors, and of the bytes of their elements."""

    folder: Path
    saved: dict[str, ChunkedTensor]
    files: ExitStack
    used: set[str] = field(default_factory=set)
    headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    opened: dict[str, IO[bytes]] = field(default_factory=dict)
    entries: dict[ByteRange, TensorEntry] = field(default_factory=dict)

    def stored(self, parameter: Parameter, model: ModelConfig) -> StoredTensor:
        """Maps a parameter to boxes in the chunks of a saved tensor."""
        name, layer = self._name(parameter)
        saved = self._used(name)
        lead = () if layer is None else (layer,)
        inner = factors(parameter, saved.shape[len(lead) :])
        self._check_shape(parameter, name, saved, (model.num_layers,) * len(lead), inner)
        boxes = [
            self._stored_box(name, saved.code, chunk, *part)
            for chunk in saved.chunks
            for part in factored_boxes(chunk.box, lead, inner)
        ]
        return StoredTensor(DTYPE_OF_CODE[saved.code], parameter.shape, tuple(boxes))

    def unstacked(self, name: str) -> StoredTensor:
        """Maps a saved tensor as it is to its chunks."""
        saved = self._used(name)
        boxes = (self._stored_box(name, saved.code, one, 0, one.box) for one in saved.chunks)
        return StoredTensor(DTYPE_OF_CODE[saved.code], saved.shape, tuple(boxes))

    def _used(self, name: str) -> ChunkedTensor:
        """Returns a saved tensor that is read. Raises MtcliError where chunks do not tile it, or
        its dtype cannot be loaded."""
        saved = self.saved[name]
        if name not in self.used:  # once for all layers
            if fault := boxes_fault(saved.shape, [chunk.box for chunk in saved.chunks]):
                raise damaged(self.folder / NAME, f"the chunks of {name} {fault}")
            self.used.add(name)
        if saved.code not in DTYPE_OF_CODE:
            message = f"{name} is of a dtype in {self.folder} that cannot be loaded"
            raise wrong(message, "float64, float32, bfloat16 or float16")
        return saved

    def _name(self, parameter: Parameter) -> tuple[str, int | None]:
        """Finds the saved tensor that holds a parameter, and its layer where layers are stacked."""
        options = list(alternatives(parameter.name))
        for name, layer in options:
            if name in self.saved:
                return name, layer
        message = f"{self.folder} has no tensor {options[0][0]}, which is {parameter.name}"
        raise wrong(message, "is the folder complete, and does --config say what it is?")

    def _check_shape(
        self,
        parameter: Parameter,
        name: str,
        saved: ChunkedTensor,
        lead: tuple[int, ...],
        inner: tuple[tuple[int, ...], ...],
    ) -> None:
        expected = lead + tuple(prod(dims) for dims in inner)
        rows, padded = parameter.shape[0], parameter.name in PADDED
        if saved.shape != expected or (padded and saved.shape[0] < rows):
            shown = (rows, *expected[1:]) if padded else expected
            message = f"{name} is {list(saved.shape)} in {self.folder}"
            raise wrong(f"{message} and {list(shown)} in the model", "is it of this model?")

    def _stored_box(self, name: str, code: str, chunk: Chunk, first: int, box: Box) -> StoredBox:
        """Builds the box whose elements are consecutive in a chunk, from `first` on."""
        file, item, count = chunk.archive.path.name, CODE_BYTES[code], prod(box.size)
        key = f"{name}@{chunk.archive.offset}+{first}"
        offset = self._entry(name, code, chunk).offset + first * item
        self.headers.setdefault(file, {})[key] = TensorEntry(code, box.size, offset, count * item)
        return StoredBox.plain(file, key, code, box)

    def _entry(self, name: str, code: str, chunk: Chunk) -> TensorEntry:
        path = chunk.archive.path
        if chunk.archive not in self.entries:
            try:
                if path.name not in self.opened:
                    self.opened[path.name] = self.files.enter_context(open_untrusted(path))
                self.entries[chunk.archive] = find_tensor(self.opened[path.name], chunk.archive)
            except OSError as error:
                raise damaged(path, f"it cannot be read ({error.strerror})") from None
        entry = self.entries[chunk.archive]
        if (entry.code, entry.shape) != (code, chunk.box.size):
            what = f"{entry.code} {list(entry.shape)} and not {code} {list(chunk.box.size)}"
            raise damaged(path, f"a chunk of {name} is {what}")
        return entry


def read_metadata(folder: Path) -> dict[str, ChunkedTensor]:
    """Reads a folder's .metadata as data: its tensors by name.

    Raises MtcliError with what is missing, damaged or more than data.
    """
    path = folder / NAME
    try:
        data = read_untrusted(path, MAX_BYTES)
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is the folder complete?") from None
    record = read_pickle(data, path, _allowed)
    try:
        return _tensors(path, record)
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
        raise damaged(path, "it is not the metadata of torch.distributed.checkpoint") from None


def _allowed(name: str) -> bool:
    if name in NEEDED or name in KINDS or name == "pathlib.PosixPath":
        return True
    return name.startswith((MODULE, "megatron.core.dist_checkpointing."))


def _tensors(path: Path, record: Any) -> dict[str, ChunkedTensor]:
    archives = {}
    for key, value in pairs_of(record.get("storage_data")):
        offsets = _size(key.get("offset")) if key.get("offset") is not None else None
        if not isinstance(key.get("fqn"), str):  # the hash of nested tuples may never end
            raise TypeError
        archives[(key.get("fqn"), offsets)] = value
    tensors = {}
    for name, value in pairs_of(record.get("state_dict_metadata")):
        if not isinstance(name, str):
            raise TypeError
        if value.name.endswith(".TensorStorageMetadata"):
            tensors[name] = _chunked(path, name, value, archives)
    return tensors


def _chunked(
    path: Path, name: str, value: PickledObject, archives: dict[Any, PickledObject]
) -> ChunkedTensor:
    properties = value.get("properties")
    dtype = (
        properties.state[0] if isinstance(properties.state, tuple) else properties.state["dtype"]
    )
    code = CODES.get(dtype.name, "") if isinstance(dtype, NamedClass) else ""
    shape = _size(value.get("size"))
    chunks = []
    for given in value.get("chunks"):
        box = Box(_size(given.get("offsets")), _size(given.get("sizes")))
        archive = archives.get((name, box.start))
        if archive is None:
            raise damaged(path, f"{name} has a chunk at {box.start} that is nowhere")
        if archive.get("transform_descriptors"):
            raise wrong(f"{path}: {name} is compressed, which is not read", "save it as it is")
        chunks.append(Chunk(box, _byte_range(path, archive)))
    return ChunkedTensor(code, shape, chunks)


def _size(value: Any) -> tuple[int, ...]:
    """Reads the numbers of a torch.Size."""
    ((numbers,),) = (value.arguments,) if isinstance(value, PickledObject) else ((value,),)
    sizes = tuple(numbers)
    if len(sizes) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**48 for n in sizes):
        raise ValueError
    return sizes


def _byte_range(path: Path, archive: PickledObject) -> ByteRange:
    name, at = archive.get("relative_path"), (archive.get("offset"), archive.get("length"))
    if not isinstance(name, str) or "/" in name or name in ("", ".", "..") or "\0" in name:
        raise damaged(path, "it names a file outside of its folder")
    if not all(type(n) is int and n >= 0 for n in at):
        raise ValueError
    return ByteRange(path.parent / name, *at)
