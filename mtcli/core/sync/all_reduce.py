"""Data parallelism: gradients are summed in buckets while the last backward still runs.

Gradients of all micro-batches accumulate in flat float32 buckets (float64 for float64 models), cut
by the axes over which a parameter's gradient is partial (Parameter.gradient_axes). A bucket is
reduced as soon as the last micro-batch's backward has filled it. Where ownership is cut (zero = 1)
each data parallel rank keeps, updates and gives back a share of every parameter's rows.

A bucket: the gradients of some parameters in one flat buffer, reduced and kept together.

The buffer is [owners, part]. After the reduction owner i keeps row i: the gradients of its share of
every parameter's rows (dimension 0). With one owner every rank keeps all of it and the reduction
is an all-reduce; with several, ZeRO stage 1 (arXiv:1910.02054, section 5.1), a reduce-scatter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.parallel.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import OwnedShard, Ownership, owned_rows, unsharded


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


NamedParameters = list[tuple[str, nn.Parameter]]


class Reduction(Protocol):
    """How this rank's gradients become sums over the ranks that see other tokens."""

    ownership: Ownership

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients this rank keeps, by name: [rows of its share, ...]."""

    @property
    def held(self) -> dict[str, OwnedShard]:
        """The memory of this rank's parameters, by name."""

    def owned(self) -> dict[str, Tensor]:
        """The parameters' rows that this rank's optimizer updates, as views."""

    def buffers(self) -> list[Tensor]:
        """The memory that gradients take."""

    def begin(self) -> None:
        """Starts a step: the first gradient to come replaces the last step's."""

    def arm(self, stage: int) -> None:
        """Says that the next backward of a stage is its last one of the step."""

    def finish(self) -> None:
        """Returns when every gradient is reduced; those that no backward touched are zero."""

    def scale_(self, factor: float) -> None:
        """Multiplies every kept gradient in place."""

    def share_parameters(self) -> None:
        """After the update: gives every rank the rows that others own."""


class BucketedGradients:
    """The Reduction of parameters that every data rank holds whole (zero = 0 and 1)."""

    def __init__(
        self, stages: Mapping[int, nn.Module], ownership: Ownership, bucket_bytes: float
    ) -> None:
        self.ownership, self.held = ownership, unsharded(stages)
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        for index, stage in stages.items():
            named = [(n, p) for n, p in ownership.trained(stage) if n not in self.bucket_of]
            for members in self._by_axes(named):
                for part in _cut(reversed(members), bucket_bytes):
                    self._add_bucket(index, part)
        self.fresh: set[str] = set(self.bucket_of)
        self.armed: set[int] = set()
        self.missing: dict[Bucket, set[str]] = {}  # what the last backward has yet to fill

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients this rank keeps, by name: [rows of its share, ...]."""
        return {name: bucket.gradient(name) for name, bucket in self.bucket_of.items()}

    def owned(self) -> dict[str, Tensor]:
        """The parameters' rows that this rank's optimizer updates, as views."""
        return {n: self.held[n].tensor[self.ownership.rows(n)] for n in self.bucket_of}

    def buffers(self) -> list[Tensor]:
        """The memory that gradients take."""
        return [bucket.flat for bucket in self.buckets]

    def begin(self) -> None:
        """Starts a step: the first gradient to come replaces the last step's."""
        self.fresh, self.armed = set(self.bucket_of), set()
        self.missing = {bucket: set(bucket.slots) for bucket in self.buckets}

    def begin_at_zero(self) -> None:
        """Starts a step in which the first gradient is added as well: each is the same work."""
        self.begin()
        self.fresh = set()
        for bucket in self.buckets:
            bucket.flat.zero_()

    def arm(self, stage: int) -> None:
        """Says that the next backward of a stage is its last one of the step."""
        self.armed.add(stage)

    def finish(self) -> None:
        """Returns when every gradient is reduced; those that no backward touched are zero."""
        for name in self.fresh:
            self.bucket_of[name].clear(name)
        for bucket in self.buckets:
            if self.missing[bucket]:
                bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        sum_tied_(self.views, self.ownership)

    def scale_(self, factor: float) -> None:
        """Multiplies every kept gradient in place."""
        for bucket in self.buckets:
            bucket.kept.mul_(factor)

    @torch.no_grad()
    def share_parameters(self) -> None:
        """After the update: gives every rank the rows that others own."""
        tensors = {name: held.tensor for name, held in self.held.items()}
        shared = [bucket for bucket in self.buckets if bucket.owners.size > 1]
        for sharing in [bucket.share(tensors) for bucket in shared]:
            sharing.finish()

    def _by_axes(self, named: NamedParameters) -> Iterable[NamedParameters]:
        sets: dict[tuple[str, ...], NamedParameters] = {}
        for name, parameter in named:
            sets.setdefault(self.ownership.summed_over(name), []).append((name, parameter))
        return sets.values()

    def _add_bucket(self, stage: int, members: NamedParameters) -> None:
        any_name, parameter = members[0]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=parameter.device)
        owners, rest = self.ownership.owners(any_name), self.ownership.rest(any_name)
        bucket = Bucket({name: p.shape for name, p in members}, owners, rest, like)
        self.buckets.append(bucket)
        for name, parameter in members:
            self.bucket_of[name] = bucket
            parameter.register_post_accumulate_grad_hook(self._collector(bucket, stage, name))

    def _collector(self, bucket: Bucket, stage: int, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:  # a split backward brings this one later
                return
            bucket.put(name, parameter.grad, first=name in self.fresh)
            self.fresh.discard(name)
            parameter.grad = None
            if stage in self.armed:
                self.missing[bucket].discard(name)
                if not self.missing[bucket]:
                    bucket.start()

        return collect


def sum_tied_(views: Mapping[str, Tensor], ownership: Ownership) -> None:
    """Sums the gradients of a tied embedding's two copies, at the ends of the pipeline."""
    if ownership.tied in views:
        all_reduce(views[ownership.tied], ownership.groups.axes["ends"])


def square_sum(reduction: Reduction) -> float:
    """The sum of squares of the gradients this rank answers for: each counts on one rank."""
    answers_for = reduction.ownership.answers_for
    mine = [v for name, v in reduction.views.items() if v.numel() and answers_for(name)]
    if not mine:
        return 0.0
    return float(torch.stack(torch._foreach_norm(mine)).double().square().sum())


def _cut(members: Iterable[tuple[str, nn.Parameter]], limit: float) -> Iterator[NamedParameters]:
    part: NamedParameters = []
    size = 0
    for name, parameter in members:
        if part and size + 4 * parameter.numel() > limit:
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += 4 * parameter.numel()
    if part:
        yield part
