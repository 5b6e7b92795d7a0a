"""Reads checkpoints as named global tensors, whichever files and boxes store them.

Our format, Hugging Face's and Megatron's look the same: boxes tile every tensor, and each box is a
stored tensor in another shape and order of dimensions.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.folder import Format
from mtcli.core.checkpoint.manifest import FileRecord, is_optimizer
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE, OpenFiles, read_box
from mtcli.core.checkpoint.retention import ReadLock
from mtcli.core.checkpoint.safetensors_file import StoredBox, TensorEntry, damaged, header_of
from mtcli.core.checkpoint.shard_index import StoredShards
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, RunConfig
from mtcli.core.mesh.sharding import Box, intersection

HEAD = "head."  # what the names of a head's parameters begin with


class StoredTensor(NamedTuple):
    """A global tensor: its dtype and shape, and the boxes that tile it, for each replica where
    replicas differ.

    Where no file stores the tensor as it is, `computed` returns the elements of a box, and there
    are no boxes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[StoredBox]
    computed: Callable[[Box], Tensor] | None = None

    @property
    def differs(self) -> bool:
        """True where data-parallel replicas have different elements."""
        return isinstance(self.boxes, StoredShards) and self.boxes.differs

    def meeting(self, box: Box, replica: int | None) -> Iterable[StoredBox]:
        """Returns the stored boxes of a replica that may overlap a box."""
        boxes = self.boxes
        return boxes.meeting(box, replica) if isinstance(boxes, StoredShards) else boxes

    def of_replica(self, index: int) -> "StoredTensor":
        if not isinstance(self.boxes, StoredShards):
            return self
        return self._replace(boxes=self.boxes.of_replica(index))


@dataclass(frozen=True)
class Checkpoint:
    """The named global tensors of a model, and of its optimizer as `optimizer.<kind>/<name>`."""

    folder: Path
    model: ModelConfig
    tensors: dict[str, StoredTensor]
    tokenizer_folder: Path | None
    config: RunConfig | None = None
    """config of the run that saved the checkpoint; None if that was not an mtcli run"""
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    world: int = 1
    lock: ReadLock = field(default_factory=ReadLock, repr=False, compare=False)
    """keeps the checkpoint from being pruned until it is closed or collected"""
    headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict, repr=False)
    """tensors by file, read when first needed"""
    open_files: OpenFiles = field(default_factory=OpenFiles, repr=False, compare=False)
    format: Format = "mtcli"
    """the tool whose folder it is"""
    unread: tuple[str, ...] = ()
    """contents of the folder that are not read"""
    replicas: int = 1
    """data-parallel replicas, where some tensors differ between them"""
    averages: int = 0
    """the number of replicas whose mean is read; 0: replicas are read one by one"""
    adapters: "Adapters | None" = None
    """the adapters where the folder holds no base weights; `tensors` are then the merged model's"""

    def close(self) -> None:
        """Closes the files, after which nothing more can be read, and allows the checkpoint to be
        pruned."""
        self.open_files.close()
        self.lock.release()

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the global shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored(name).dtype

    def num_bytes(self, name: str) -> int:
        """Returns the size of a tensor, of all replicas where they differ."""
        stored = self._stored(name)
        copies = self.replicas if stored.differs else 1
        return prod(stored.shape) * stored.dtype.itemsize * copies

    def replicas_of(self, name: str) -> tuple[int | None, ...]:
        """Returns the replicas with different elements of a tensor; (None,) where all are equal."""
        differs = self._stored(name).differs and not self.averages
        return tuple(range(self.replicas)) if differs else (None,)

    def replica(self, index: int) -> "Checkpoint":
        """Views the checkpoint as one replica; an averaged view stays itself."""
        if self.averages:
            return self
        tensors = {name: stored.of_replica(index) for name, stored in self.tensors.items()}
        return replace(self, tensors=tensors, replicas=1)

    def averaged(self) -> "Checkpoint":
        """Views the checkpoint as the average of its replicas."""
        if self.replicas == 1:
            return self
        return replace(self, replicas=1, averages=self.replicas)

    @property
    def folders(self) -> list[Path]:
        """The folders that are read: the checkpoint's, and its adapters' base."""
        return [self.folder, *(self.adapters.base.folders if self.adapters else [])]

    @property
    def weights_differ(self) -> bool:
        """True where replicas differ in weights or adapters, not in optimizer state alone."""
        if self.adapters is not None:
            return self.adapters.own.weights_differ
        return any(entry.differs for name, entry in self.tensors.items() if not is_optimizer(name))

    @property
    def averaging(self) -> str:
        """The words for a user about what an averaged view reads."""
        count = self.averages or self.replicas
        return f"{self.folder} has {count} replicas that differ, and what is read is their average"

    def read(self, name: str, box: Box | None = None, replica: int | None = None) -> Tensor:
        """Reads the elements of a tensor in a box [box.size], or all of them, and no others.

        Where replicas differ, `replica` selects one; an averaged view returns their mean, computed
        in float64. Raises MtcliError where the tensor or replica is unknown or a file is damaged.
        """
        stored = self._stored(name)
        box = box or Box.of(stored.shape)
        if stored.differs and self.averages:
            total = torch.zeros(box.size, dtype=torch.float64)
            for index in range(self.averages):
                total += replace(self, replicas=self.averages, averages=0).read(name, box, index)
            return (total / self.averages).to(stored.dtype)
        is_inside = len(box.start) == len(box.size) == len(stored.shape) and all(
            min(a, n) >= 0 and a + n <= size for a, n, size in zip(*box, stored.shape, strict=True)
        )
        if not is_inside:
            raise wrong(f"{name} has the shape {stored.shape} and the box {box} is not in it")
        if stored.differs and replica not in range(self.replicas):
            which = "none is named" if replica is None else f"there is no replica {replica}"
            message = f"{name} differs between the {self.replicas} replicas of {self.folder}"
            raise wrong(f"{message}, and {which}", f"replicas 0 to {self.replicas - 1}")
        if stored.computed is not None:
            return stored.computed(box)
        out = torch.empty(box.size, dtype=stored.dtype)
        for source in stored.meeting(box, replica):
            if shared := intersection(source.box, box):
                at = shared.moved(tuple(-start for start in box.start))
                self._read_stored(source, shared, out[at.slices])
        return out

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, n=1)
            raise wrong(f"{self.folder} has no tensor {name!r}", f"near: {near[0]}" if near else "")
        return self.tensors[name]

    def _read_stored(self, source: StoredBox, shared: Box, out: Tensor) -> None:
        """Fills `out` with the box `shared` of a global tensor, from the stored box that contains
        it."""
        entry, order = self.entry(source), source.order
        inner = shared.moved(tuple(-start for start in source.start))
        view = Box(tuple(inner.start[d] for d in order), tuple(inner.size[d] for d in order))
        into, dtype = out.permute(order), DTYPE_OF_CODE[entry.code]
        file = self.open_files.get(self.folder / source.file)
        offset = entry.offset + source.first * dtype.itemsize
        if dtype == out.dtype:
            read_box(file, offset, source.view, view, into)
        else:
            uncast = torch.empty(view.size, dtype=dtype)
            read_box(file, offset, source.view, view, uncast)
            into.copy_(uncast)

    def entry(self, source: StoredBox) -> TensorEntry:
        """Finds a stored box in its file's header. Raises MtcliError where the header has another
        dtype or shape, or no such tensor."""
        path = self.folder / source.file
        if source.file not in self.headers:
            try:
                self.headers[source.file] = header_of(self.open_files.get(path))
            except OSError as error:
                raise damaged(path, f"it cannot be read ({error.strerror})") from None
        entry = self.headers[source.file].get(source.key)
        if entry is None:
            raise damaged(path, f"it has no tensor {source.key}")
        if (entry.code, entry.shape) != (source.code, source.shape):
            what = f"{source.key} is {entry.code} {list(entry.shape)}"
            raise damaged(path, f"{what} and should be {source.code} {list(source.shape)}")
        return entry


class Adapters(NamedTuple):
    """Low-rank adapters and their base weights."""

    own: Checkpoint
    """A and B of each target by canonical name, and their optimizer state"""
    base: Checkpoint
    lora: LoraConfig
