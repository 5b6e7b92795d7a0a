"""Writes a checkpoint as torchtitan does, by torch.distributed.checkpoint: Llama 3 and Qwen3.

The state dict has tensors on the meta device, so that memory holds one of theirs at a time: torch's
planner is asked for the elements of each when it writes them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import dtype_name
from mtcli.core.checkpoint.torchtitan.names import TitanTensor, titan_tensors
from mtcli.core.checkpoint.torchtitan.reader import MOMENTS, open_titan
from mtcli.core.config.errors import failed
from mtcli.core.convert.verify import require_same
from mtcli.core.mesh.sharding import Box
from mtcli.core.runtime.atomic_writes import atomic_folder, partial_name
from mtcli.core.runtime.outputs import require_apart

# Of each of their tensors: where it is in ours, and the part of it.
Origins = dict[str, tuple[str, TitanTensor]]


def to_dcp(
    source: Checkpoint, final: Path, dtype: torch.dtype | None, verify: bool
) -> dict[str, Any]:
    """Writes the weights of `source`, with Adam's moments where it has them; returns the result in
    numbers. With `verify` every tensor is read back and compared.

    Replicas that differ are averaged. Raises MtcliError for a model that torchtitan has not, and
    (exit 1) where the disk fails.
    """
    source = source.averaged()
    require_apart(source.folders, [final, partial_name(final)], "DST")
    require_model(source, source.model)
    table = titan_tensors(source.model)
    origins: Origins = {part.name: (name, part) for name in table for part in table[name]}
    kinds = [kind for kind in MOMENTS if f"optimizer.{kind}/embedding.weight" in source.tensors]
    for kind in kinds:
        for name, parts in table.items():
            moments = ((f"optimizer.state.{one.name}.{kind}", one) for one in parts)
            origins |= {key: (f"optimizer.{kind}/{name}", one) for key, one in moments}
    planner = _Planner(source, origins, dtype)
    sizes = sum(tensor.nbytes for tensor in planner.state.values())
    with atomic_folder(final, sizes) as partial:
        try:
            writer = FileSystemWriter(partial, thread_count=1)
            save(planner.state, storage_writer=writer, planner=planner, no_dist=True)
        except OSError as error:
            raise failed(
                f"{final} was not written: {error.strerror}", "is the disk full?"
            ) from None
    same = {}
    if verify:
        same = require_same(source, open_titan(final, source.model), dtype, 1, lambda _: None)[0]
    return {
        "format": "dcp",
        "source": str(source.folder),
        "output": str(final),
        "tensors": len(origins),
        "bytes": sizes,
        "dtype": dtype_name(dtype or source.dtype("embedding.weight")),
        "moments": kinds,
    } | same


def titan_tensor(source: Checkpoint, name: str, part: TitanTensor) -> Tensor:
    """Reads a tensor of theirs from a parameter of ours, or from a moment of it."""
    shape = source.shape(name)
    if not part.slots:
        return source.read(name)
    if len(shape) == 3:  # gate and up
        box = Box((part.first, 0, 0), (part.slots, *shape[1:]))
        return source.read(name, box).reshape(part.shape)
    size = (shape[0], part.slots, *shape[2:])
    rows = source.read(name, Box((0, part.first, 0, 0), size))
    if part.turned:
        halves = rows.unflatten(2, (2, shape[2] // 2))
        rows = halves.transpose(2, 3)
    return rows.reshape(part.shape).contiguous()


class _Planner(DefaultSavePlanner):
    """A plan of tensors on the meta device, whose elements are read when they are written."""

    def __init__(self, source: Checkpoint, origins: Origins, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.source, self.origins, self.dtype = source, origins, dtype
        self.state = {
            name: torch.empty(part.shape, dtype=self._dtype(ours), device="meta")
            for name, (ours, part) in origins.items()
        }

    def _dtype(self, name: str) -> torch.dtype:
        keep = self.dtype is None or name.startswith("optimizer.")
        return self.source.dtype(name) if keep else self.dtype or torch.float32

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        ours, part = self.origins[write_item.index.fqn]
        return titan_tensor(self.source, ours, part).to(self._dtype(ours))
