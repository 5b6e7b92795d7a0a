"""A bucket: the gradients of some parameters in one flat buffer, reduced and kept together.

The buffer is [owners, part]. After the reduction owner i keeps row i: the gradients of its share of
every parameter's rows (dimension 0). With one owner every rank keeps all of it and the reduction
is an all-reduce; with several, ZeRO stage 1 (arXiv:1910.02054, section 5.1), a reduce-scatter.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.parallel.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import owned_rows


class Slot(NamedTuple):
    """A parameter's place in every owner's part: `size` elements from `offset` on."""

    shape: tuple[int, ...]
    rows: int  # of each owner; the last ones may have fewer
    offset: int
    size: int


class Bucket:
    """Gradients [owners, part] of a stage's parameters; `rest` are the axes besides the owners'."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], owners: Axis, rest: Axis, like: Tensor
    ) -> None:
        self.owners, self.rest = owners, rest
        self.slots: dict[str, Slot] = {}
        part = 0
        for name, shape in shapes.items():
            rows = -(-shape[0] // owners.size)
            size = rows * prod(shape[1:])
            self.slots[name] = Slot(tuple(shape), rows, part, size)
            part += size
        self.flat = like.new_zeros(owners.size, part)
        self.kept = self.flat[owners.rank]  # reduced in place
        self.work: Pending | None = None

    def put(self, name: str, grad: Tensor, first: bool) -> None:
        """Adds a micro-batch's gradient; the first of a step replaces what was there."""
        slot, target = self.slots[name], self._columns(self.flat, name)
        rows = grad.reshape(slot.shape[0], -1)
        missing = slot.rows * self.owners.size - len(rows)
        rows = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        (target.copy_ if first else target.add_)(rows.view(target.shape))

    def clear(self, name: str) -> None:
        """Sets a gradient to zero."""
        self._columns(self.flat, name).zero_()

    def start(self) -> None:
        """Starts the reduction, which runs beside what this rank computes next."""
        if self.owners.size > 1:
            self.work = start_reduce_scatter(self.kept, self.flat, self.owners)
        elif self.rest.size > 1:
            self.work = start_all_reduce(self.flat, self.rest)

    def finish(self) -> None:
        """Returns when the kept gradients are the sums."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.owners.size > 1:
            all_reduce(self.kept, self.rest)

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank owns; maybe none."""
        return owned_rows(self.slots[name].shape[0], self.owners)

    def gradient(self, name: str) -> Tensor:
        """The kept gradient: a view [rows of this owner, ...]."""
        slot, rows = self.slots[name], self.rows(name)
        shape = (rows.stop - rows.start, *slot.shape[1:])
        return self.kept[slot.offset : slot.offset + prod(shape)].view(shape)

    def share(self, parameters: Mapping[str, Tensor]) -> "Sharing":
        """Starts giving the rows that each owner has updated to all."""
        mine = torch.zeros_like(self.kept, dtype=parameters[next(iter(self.slots))].dtype)
        for name, slot in self.slots.items():
            own = parameters[name][self.rows(name)].flatten()
            mine[slot.offset : slot.offset + own.numel()] = own
        everyone = mine.new_empty(self.owners.size, len(mine))
        work = start_all_gather(everyone, mine, self.owners)
        return Sharing(self, parameters, mine, everyone, work)

    def _columns(self, flat: Tensor, name: str) -> Tensor:
        slot = self.slots[name]
        return flat[:, slot.offset : slot.offset + slot.size]


class Sharing(NamedTuple):
    """Updated rows on their way to every rank; what is sent stays in memory until it has left."""

    bucket: Bucket
    parameters: Mapping[str, Tensor]
    mine: Tensor
    everyone: Tensor
    work: Pending

    def finish(self) -> None:
        """Returns when the parameters are whole again."""
        self.work.wait()
        for name, slot in self.bucket.slots.items():
            columns = self.everyone[:, slot.offset : slot.offset + slot.size]
            rows = columns.reshape(self.bucket.owners.size * slot.rows, *slot.shape[1:])
            self.parameters[name].copy_(rows[: slot.shape[0]])
