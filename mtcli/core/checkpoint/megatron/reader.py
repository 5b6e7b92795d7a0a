"""Megatron-LM's torch_dist checkpoints of GPT models, read where they lie.

Every layer's tensors are stacked in one of them, [layers, ...], which ranks have cut into chunks;
each chunk becomes a region of ours. Nothing is unpickled: see pickles.py.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any

from mtcli.core.checkpoint.dtype_names import CODE_BYTES
from mtcli.core.checkpoint.dtypes import dtype_of_code
from mtcli.core.checkpoint.folder import METADATA
from mtcli.core.checkpoint.huggingface.config_json import read_json
from mtcli.core.checkpoint.manifest import tiling_fault
from mtcli.core.checkpoint.megatron import torch_dist
from mtcli.core.checkpoint.megatron.config import model_of
from mtcli.core.checkpoint.megatron.names import (
    FactoredBox,
    alternatives,
    factored_boxes,
    factors,
    is_padded,
)
from mtcli.core.checkpoint.megatron.pickles import PickledObject
from mtcli.core.checkpoint.megatron.torch_dist import SavedChunk, SavedTensor, read_contents
from mtcli.core.checkpoint.megatron.torch_zip import ByteRange, find_tensor, read_object
from mtcli.core.checkpoint.reader import Checkpoint, StoredBox, StoredTensor
from mtcli.core.checkpoint.safetensors_file import TensorEntry, damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import listed, open_untrusted
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Parameter

COMMON = "common.pt"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
# What arguments and a run's state are made of: classes whose names are read, and nothing else.
NAMED_IN_COMMON = ("torch.", "megatron.", "transformer_engine.", "pathlib.", "argparse.", "numpy.")
MORE_NAMES = {"collections.OrderedDict", "datetime.timedelta", "signal.Signals", "_codecs.encode"}
MORE_NAMES |= {"types.SimpleNamespace", "__builtin__.set", "__builtin__.bytes", "builtins.set"}


def open_megatron(folder: Path, model: ModelConfig | None) -> Checkpoint:
    """The weights of a torch_dist checkpoint; `model` is its architecture where it does not say.

    Raises MtcliError for another format, for an architecture that is not said or not ours, for
    damaged files, and for tensors that are missing, unknown or of another shape.
    """
    _require_torch_dist(folder)
    common = _common(folder)
    arguments = common.get("args")
    said = arguments.state if isinstance(arguments, PickledObject) else {}
    model = model or model_of(said if isinstance(said, dict) else {}, folder / COMMON)
    contents = read_contents(folder)
    with ExitStack() as files:
        reader = _Reader(folder, contents.tensors, files)
        tensors = {name: reader.stored(p, model) for name, p in parameters(model).items()}
    rest = contents.tensors.keys() - reader.used
    optimizer = [name for name in rest if OPTIMIZER.match(name)]
    _refuse_unknown(folder, sorted(rest - set(optimizer)))
    step = common.get("iteration")
    return Checkpoint(
        folder=folder,
        model=model,
        config=None,
        step=step if type(step) is int and step >= 0 else 0,
        extra={},
        tensors=tensors,
        files={},
        tokenizer_folder=None,
        headers=reader.headers,
        format="megatron",
        unread=("the optimizer's state",) if optimizer else (),
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
    found = read_object(ByteRange(path, 0, path.stat().st_size), _is_argument)
    if not isinstance(found, dict):
        raise damaged(path, "it is not a table")
    return found


def _is_argument(name: str) -> bool:
    return name.startswith(NAMED_IN_COMMON) or name in MORE_NAMES


def _refuse_unknown(folder: Path, names: list[str]) -> None:
    if names:
        what = "tensors that a GPT model of this architecture has not"
        message = f"{folder} has {what}: {listed(names)}"
        raise wrong(message, "nothing is left out silently; does --config say what it is?")


@dataclass
class _Reader:
    """Finds parameters among saved tensors, and says where their elements are."""

    folder: Path
    saved: dict[str, SavedTensor]
    files: ExitStack
    used: set[str] = field(default_factory=set)
    headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    opened: dict[str, IO[bytes]] = field(default_factory=dict)
    found: dict[tuple[str, int], TensorEntry] = field(default_factory=dict)

    def stored(self, parameter: Parameter, model: ModelConfig) -> StoredTensor:
        """Where the elements of a parameter are."""
        name, layer = self._name(parameter)
        saved = self.saved[name]
        self._check_chunks(name, saved)
        self.used.add(name)
        dtype = dtype_of_code(saved.code) if saved.code else None
        if dtype is None:
            message = f"{name} is of a dtype in {self.folder} that cannot be loaded"
            raise wrong(message, "float64, float32, bfloat16 or float16")
        lead = () if layer is None else (layer,)
        inner = factors(parameter, saved.shape[len(lead) :])
        self._check_shape(parameter, name, saved, (model.num_layers,) * len(lead), inner)
        regions = [
            self._region(name, saved.code, chunk, block)
            for chunk in saved.chunks
            for block in factored_boxes(chunk.box, lead, inner)
        ]
        return StoredTensor(dtype, parameter.shape, tuple(regions))

    def _name(self, parameter: Parameter) -> tuple[str, int | None]:
        """The saved tensor that holds a parameter, and its layer where layers are stacked."""
        options = list(alternatives(parameter.name))
        for name, layer in options:
            if name in self.saved:
                return name, layer
        message = f"{self.folder} has no tensor {options[0][0]}, which is {parameter.name}"
        raise wrong(message, "is the folder complete, and does --config say what it is?")

    def _check_chunks(self, name: str, saved: SavedTensor) -> None:
        """Raises MtcliError where elements are in no chunk or in two; once for all layers."""
        if name in self.used:
            return
        if fault := tiling_fault(saved.shape, [chunk.box for chunk in saved.chunks]):
            raise damaged(self.folder / torch_dist.NAME, f"the chunks of {name} {fault}")

    def _check_shape(
        self,
        parameter: Parameter,
        name: str,
        saved: SavedTensor,
        lead: tuple[int, ...],
        inner: tuple[tuple[int, ...], ...],
    ) -> None:
        expected = lead + tuple(prod(dims) for dims in inner)
        rows = parameter.shape[0]
        enough = not is_padded(parameter.name) or saved.shape[0] >= rows
        if saved.shape != expected or not enough:
            shown = (rows, *expected[1:]) if is_padded(parameter.name) else expected
            message = f"{name} is {list(saved.shape)} in {self.folder}"
            raise wrong(f"{message} and {list(shown)} in the model", "is it of this model?")

    def _region(self, name: str, code: str, chunk: SavedChunk, block: FactoredBox) -> StoredBox:
        whole = self._entry(name, code, chunk)
        item = CODE_BYTES[code]
        key = f"{name}@{chunk.offset}+{block.first}"
        count = prod(block.size)
        entry = TensorEntry(code, block.size, whole.offset + block.first * item, count * item)
        self.headers.setdefault(chunk.file, {})[key] = entry
        axes = tuple(range(len(block.size)))
        return StoredBox(chunk.file, key, code, block.size, block.size, axes, block.start)

    def _entry(self, name: str, code: str, chunk: SavedChunk) -> TensorEntry:
        place = (chunk.file, chunk.offset)
        if place not in self.found:
            path = self.folder / chunk.file
            try:
                if chunk.file not in self.opened:
                    self.opened[chunk.file] = self.files.enter_context(open_untrusted(path))
                self.found[place] = find_tensor(self.opened[chunk.file], chunk.span(self.folder))
            except OSError as error:
                raise damaged(path, f"it cannot be read ({error.strerror})") from None
        entry = self.found[place]
        if (entry.code, entry.shape) != (code, chunk.box.size):
            what = f"{entry.code} {list(entry.shape)} and not {code} {list(chunk.box.size)}"
            raise damaged(self.folder / chunk.file, f"a chunk of {name} is {what}")
        return entry
