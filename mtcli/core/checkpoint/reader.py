"""A checkpoint to read: named global tensors, whichever files and rectangles they are kept in.

Ours and Hugging Face's are the same thing: every tensor is an assembly of regions, each of them a
stored tensor seen in another shape and order of dimensions.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.blocks import verify_file
from mtcli.core.checkpoint.boxes import intersection, read_box
from mtcli.core.checkpoint.dtypes import dtype_of_code
from mtcli.core.checkpoint.manifest import BLOCK_BYTES, FileRecord
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.checkpoint.retention import Hold
from mtcli.core.checkpoint.safetensors_file import OpenFiles, TensorEntry, damaged, read_header
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter


class StoredBox(NamedTuple):
    """A stored tensor as a rectangle of a global one.

    The tensor `key` of `file`, of a dtype code and a shape, is seen as shape `view`; dimension d of
    the rectangle, which starts at `start`, is dimension axes[d] of the view.
    """

    file: str
    key: str
    code: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The rectangle of the global tensor."""
        return Box(self.start, tuple(self.view[axis] for axis in self.axes))


class StoredTensor(NamedTuple):
    """A global tensor: its dtype and shape, and the regions that tile it.

    Where no file holds it, `computed` gives the elements of a box of it, and there are no regions.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[StoredBox, ...]
    computed: Callable[[Box], Tensor] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Named global tensors of a model, and of its optimizer as `optimizer.<kind>/<name>`."""

    folder: Path
    model: ModelConfig
    config: RunConfig | None
    step: int
    extra: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, FileRecord]
    tokenizer_folder: Path | None
    world: int = 1
    held: Hold = field(default_factory=Hold, repr=False, compare=False)
    """keeps the checkpoint from being pruned, as long as this is not collected"""
    headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict, repr=False)
    """of the files, read when they are first needed"""
    open_files: OpenFiles = field(default_factory=OpenFiles, repr=False, compare=False)
    format: Literal["mtcli", "hf", "megatron"] = "mtcli"
    """whose folder it is"""
    unread: tuple[str, ...] = ()
    """what the folder holds besides, and nobody reads"""

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._stored(name).dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The elements of a tensor in a box [box.size], or all of them; only they are read.

        Raises MtcliError where the tensor is unknown or a file is damaged.
        """
        stored = self._stored(name)
        box = box or Box((0,) * len(stored.shape), stored.shape)
        if not _is_inside(box, stored.shape):
            raise wrong(f"{name} has the shape {stored.shape} and the box {box} is not in it")
        if stored.computed is not None:
            return stored.computed(box)
        out = torch.empty(box.size, dtype=stored.dtype)
        for region in stored.regions:
            if shared := intersection(region.box, box):
                target = tuple(
                    slice(a - b, a - b + n)
                    for a, b, n in zip(shared.start, box.start, shared.size, strict=True)
                )
                self._read_region(region, shared, out[target])
        return out

    def verify_hashes(self, part: int = 0, parts: int = 1) -> None:
        """Reads a share of the files, so that `parts` ranks together read each once, and checks
        their hashes. Hugging Face folders have none.

        Raises MtcliError that names the first damaged file.
        """
        for name in sorted(self.files)[part::parts]:
            verify_file(self.folder / name, self.files[name])

    def verify_weights(self, part: int = 0, parts: int = 1) -> None:
        """As `verify_hashes`, but for the blocks that hold nothing but optimizer state."""
        blocks: dict[str, set[int]] = {}
        for name, stored in self.tensors.items():
            for region in stored.regions:
                found = blocks.setdefault(region.file, set())
                entry = self._entry(region)
                if entry.bytes and not is_optimizer(name):
                    last = (entry.offset + entry.bytes - 1) // BLOCK_BYTES
                    found.update(range(entry.offset // BLOCK_BYTES, last + 1))
        for name in sorted(self.files)[part::parts]:
            verify_file(self.folder / name, self.files[name], blocks.get(name))

    def check_headers(self) -> None:
        """Raises MtcliError where a file's header does not agree with what is expected of it."""
        for stored in self.tensors.values():
            for region in stored.regions:
                self._entry(region)

    def require_model(self, model: ModelConfig) -> None:
        """Raises MtcliError with every parameter of `model` that is not here in its shape, and
        every one that is here and not in `model`.

        Untrained parameters that its own model does not have may be missing (`begins_at_zero`).
        """
        problems = []
        for name, parameter in parameters(model).items():
            if self.begins_at_zero(parameter):
                continue
            if name not in self.tensors:
                problems.append(Problem(f"{self.folder} has no tensor {name}"))
            elif self.tensors[name].shape != parameter.shape:
                shape = self.tensors[name].shape
                message = f"{name} is {shape} in {self.folder} and {parameter.shape} in the model"
                problems.append(Problem(message))
        for name in sorted(parameters(self.model).keys() - parameters(model).keys()):
            problems.append(Problem(f"{self.folder} has the tensor {name}, and the model has not"))
        if problems:
            raise MtcliError(*problems[:-1][:8], problems[-1]._replace(hint=self._way_to(model)))

    def _way_to(self, model: ModelConfig) -> str:
        """What to do about a model whose tensors are not here."""
        if not model.num_experts or self.model.num_experts:
            return "the checkpoint is of another model; compare its config.toml with yours"
        sizes = f"num_experts={model.num_experts},top_k={model.top_k}"
        if (parts := self.model.ffn_hidden_size // max(1, model.moe_ffn_hidden_size)) > 1:
            sizes += f",granularity={parts}"
        made = f"`mtcli shard {self.folder} DST --to mtcli --upcycle {sizes}`"
        return f"the checkpoint is dense: {made} makes a mixture of experts of it"

    def begins_at_zero(self, parameter: Parameter) -> bool:
        """Whether a parameter is missing because this model was made without it: the bias of a
        router, whose zeros change nothing."""
        return not parameter.trained and parameter.name not in parameters(self.model)

    def keeps_dtype(self, name: str) -> bool:
        """Whether a tensor stays as wide as it is where weights are converted: optimizer state, and
        what is moved by steps without being trained."""
        table = parameters(self.model)
        return is_optimizer(name) or (name in table and not table[name].trained)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, n=1)
            raise wrong(f"{self.folder} has no tensor {name!r}", f"near: {near[0]}" if near else "")
        return self.tensors[name]

    def _read_region(self, region: StoredBox, shared: Box, out: Tensor) -> None:
        entry = self._entry(region)
        start, size = [0] * len(region.view), [0] * len(region.view)
        for d, axis in enumerate(region.axes):
            start[axis], size[axis] = shared.start[d] - region.start[d], shared.size[d]
        order = [region.axes.index(axis) for axis in range(len(region.axes))]
        into = out.permute(order)
        box = Box(tuple(start), tuple(size))
        stored = dtype_of_code(entry.code)
        file = self.open_files.get(self.folder / region.file)
        if stored == out.dtype:
            read_box(file, entry.offset, region.view, box, into)
        else:
            plain = torch.empty(box.size, dtype=stored)
            read_box(file, entry.offset, region.view, box, plain)
            into.copy_(plain)

    def _entry(self, region: StoredBox) -> TensorEntry:
        path = self.folder / region.file
        if region.file not in self.headers:
            self.headers[region.file] = read_header(path)
        entry = self.headers[region.file].get(region.key)
        if entry is None:
            raise damaged(path, f"it has no tensor {region.key}")
        if (entry.code, entry.shape) != (region.code, region.shape):
            what = f"{region.key} is {entry.code} {list(entry.shape)}"
            raise damaged(path, f"{what} and should be {region.code} {list(region.shape)}")
        return entry


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.start) == len(box.size) == len(shape):
        return False
    return all(
        min(a, n) >= 0 and a + n <= size
        for a, n, size in zip(box.start, box.size, shape, strict=True)
    )
