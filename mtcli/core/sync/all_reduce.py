"""Sums gradients over data-parallel ranks in buckets, while the last backward still runs.

Gradients of all micro-batches accumulate in flat float32 buckets (float64 for float64 models;
bfloat16 where train.gradients says so), one set per set of axes over which gradients are partial
(Parameter.gradient_axes). A bucket's reduction starts as soon as the last micro-batch's backward
has filled it, in the bucket's dtype.

A bucket is [owners, part]: row i holds the gradients of owner i's rows (dim 0) of each parameter.
With one owner (zero = 0) every rank owns all rows, and the reduction is an all-reduce. With several
(ZeRO stage 1, arXiv:1910.02054, section 5.1) it is a reduce-scatter, which leaves row i to owner i;
after the update the owners' rows are all-gathered, on a GPU while the next forward runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.mesh.sharding import needs_no_copy
from mtcli.core.parallel.collectives import (
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import Ownership, owned_rows, unsharded
from mtcli.core.parallel.transport.process_group import PendingWork
from mtcli.core.sync.strategy import Strategy, is_block, sum_tied_gradients_
from mtcli.kernels import limits
from mtcli.kernels.gradient_sink import GradientSink, GradientSinks


class Slot(NamedTuple):
    """A parameter's slot in every owner's shard of a bucket: `size` elements from `offset` on."""

    shape: tuple[int, ...]
    rows: int  # of each owner; the last ones may have fewer
    offset: int
    size: int


class Bucket:
    """Gradients [owners, part] of a stage, summed over the owners, then over `remaining_axis`."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], owners: Axis, remaining_axis: Axis, like: Tensor
    ) -> None:
        self.owners, self.remaining_axis = owners, remaining_axis
        self.slots: dict[str, Slot] = {}
        part = 0
        for name, shape in shapes.items():
            rows = -(-shape[0] // owners.size)
            size = rows * prod(shape[1:])
            self.slots[name] = Slot(tuple(shape), rows, part, size)
            part += size
        self.flat = like.new_zeros(owners.size, part)
        self.owned = self.flat[owners.rank]  # reduced in place
        self.columns = {
            n: self.flat[:, s.offset : s.offset + s.size] for n, s in self.slots.items()
        }
        self.work: PendingWork | None = None  # of the reduction, once it is started

    def put(self, name: str, grad: Tensor, first: bool) -> None:
        """Adds a micro-batch's gradient; the first of a step overwrites the last step's sum."""
        slot, target = self.slots[name], self.columns[name]
        if missing := slot.rows * self.owners.size - slot.shape[0]:
            grad = F.pad(grad.reshape(slot.shape[0], -1), (0, 0, 0, missing))
        (target.copy_ if first else partial(_add_, target))(grad.reshape(target.shape))

    def sink(self, name: str, begin: Callable[[], int]) -> GradientSink:
        """Where GEMMs add a matrix's gradients themselves; `begin` as in GradientSink."""
        slot = self.slots[name]
        blocks_ORD = self.columns[name].view(self.owners.size, slot.rows, -1)
        return GradientSink(blocks_ORD, slot.shape[0], begin)

    def clear(self, name: str) -> None:
        """Zeroes a gradient."""
        self.columns[name].zero_()

    def start(self) -> None:
        """Starts the reduction, which overlaps the computation that follows."""
        if self.owners.size > 1:
            self.work = start_reduce_scatter(self.owned, self.flat, self.owners)
        else:
            self.work = start_all_reduce(self.flat, self.remaining_axis)

    def finish(self) -> None:
        """Waits until the owned gradients are the sums."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.owners.size > 1:
            all_reduce(self.owned, self.remaining_axis)

    @property
    def is_reduced_over_ranks(self) -> bool:
        """Whether more than one rank contributes gradients."""
        return max(self.owners.size, self.remaining_axis.size) > 1

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank owns; maybe none."""
        return owned_rows(self.slots[name].shape[0], self.owners)

    def gradient(self, name: str) -> Tensor:
        """The owned gradient: a view [rows of this owner, ...]."""
        slot, rows = self.slots[name], self.rows(name)
        shape = (rows.stop - rows.start, *slot.shape[1:])
        return self.owned[slot.offset : slot.offset + prod(shape)].view(shape)

    def start_all_gather(self, parameters: Mapping[str, Tensor]) -> Callable[[], None]:
        """Starts the all-gather of the owners' updated rows, of large parameters where they lie;
        returns what waits for it."""
        owners, waits, copied = self.owners, list[Callable[[], object]](), dict[str, Slot]()
        for name, slot in self.slots.items():
            if needs_no_copy(slot.shape[0], prod(slot.shape), owners.size):
                rows = parameters[name].view(owners.size, -1)
                waits.append(start_all_gather(rows, rows[owners.rank], owners).wait)
            else:
                copied[name] = slot
        if copied:
            waits.append(self._gather_copies(copied, parameters))

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def _gather_copies(
        self, slots: Mapping[str, Slot], parameters: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """Starts the all-gather of copies of the owned rows of some parameters; returns what waits
        for it."""
        rows_of = {name: parameters[name][self.rows(name)].flatten() for name in slots}
        sent = torch.cat([F.pad(x, (0, slots[name].size - len(x))) for name, x in rows_of.items()])
        gathered = sent.new_empty(self.owners.size, len(sent))
        work = start_all_gather(gathered, sent, self.owners)

        def finish(_: Tensor = sent) -> None:  # which stays alive until then
            work.wait()
            sizes = [slot.size for slot in slots.values()]
            for (name, slot), columns in zip(slots.items(), gathered.split(sizes, 1), strict=True):
                rows = columns.reshape(self.owners.size * slot.rows, *slot.shape[1:])
                parameters[name].copy_(rows[: slot.shape[0]])

        return finish


NamedParameters = list[tuple[str, nn.Parameter]]
FINAL_NORM = "final_norm"  # a stage calls it behind its blocks


class BucketedDataParallel(Strategy):
    """The strategy of zero = 0 and 1: data ranks replicate parameters."""

    recorded = True

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ownership: Ownership,
        bucket_bytes: float,
        sinks: GradientSinks,
        least: torch.dtype = torch.float32,
        gathers_ahead: bool = False,
    ) -> None:
        """Adds the sinks of all matrices to `sinks`, which the stages' layers read. Sums are in
        `least`, or in the parameters' dtype where that is wider.

        With `gathers_ahead` updated rows are gathered while the next forward runs, which waits for
        the weights that it is about to read.
        """
        self.stages, self.ownership, self.sinks = stages, ownership, sinks
        self.least = least
        self.shards = unsharded(stages, ownership.table)
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        for index, stage in stages.items():
            by_axes: dict[tuple[str, ...], NamedParameters] = {}
            for name, parameter in ownership.trained(stage):
                if name not in self.bucket_of:
                    axes = ownership.summed_over(name)
                    by_axes.setdefault(axes, []).append((name, parameter))
            for members in by_axes.values():
                for part in _bucketed(reversed(members), bucket_bytes, self._dtype_of):
                    self._add_bucket(index, part)
        self.fresh: set[str] = set(self.bucket_of)  # without a gradient in this step so far
        self.last: set[int] = set()  # stages in their last backward of the step
        self.missing: dict[Bucket, set[str]] = {}  # what the last backward has yet to fill
        # Buckets whose reduction has started and whose callback is still due.
        self.summing: list[Bucket] = []
        self.on_reduced: Callable[[Mapping[str, Tensor]], None] | None = None
        self.gathers_ahead = gathers_ahead
        self.gathering: dict[Bucket, Callable[[], None]] = {}  # to what waits for a bucket's rows
        for stage in stages.values() if gathers_ahead else ():
            self._wait_when_read(stage)

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """This rank's reduced gradients, by name: [owned rows, ...], views of the buckets."""
        return {name: bucket.gradient(name) for name, bucket in self.bucket_of.items()}

    def weights(self) -> dict[str, Tensor]:
        """The owned rows of trained parameters, which this rank's optimizer updates: views."""
        return {n: self.shards[n].tensor[self.ownership.rows(n)] for n in self.bucket_of}

    def gradient_buffers(self) -> list[Tensor]:
        """Lists the memory that gradients take."""
        return [bucket.flat for bucket in self.buckets]

    def before_step(self, from_zero: bool = False) -> None:
        """Starts a step; see Strategy."""
        self.fresh, self.last, self.summing = set(self.bucket_of), set(), []
        self.missing = {bucket: set(bucket.slots) for bucket in self.buckets}
        if from_zero:
            self.fresh = set()
            for bucket in self.buckets:
                bucket.flat.zero_()

    def before_last_backward(self, stage: int) -> None:
        """Marks a stage's buckets to be reduced as soon as the next backward has filled them."""
        self.last.add(stage)

    def after_backward(self) -> None:
        """Waits until every gradient is reduced; those that no backward touched are zero."""
        for name in self.fresh:
            self.bucket_of[name].clear(name)
        for bucket in self.buckets:
            if self.missing[bucket]:
                bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        self.settle()
        sum_tied_gradients_(self.gradients, self.ownership)

    def when_reduced(self, on_reduced: Callable[[Mapping[str, Tensor]], None]) -> None:
        """See Strategy. A bucket with a collective is reported once the next bucket is full."""
        self.on_reduced = on_reduced

    def gradient_buckets(self) -> list[list[str]]:
        """Names of parameters whose gradients are reduced together."""
        return [list(bucket.slots) for bucket in self.buckets]

    def scale_gradients_(self, factor: float) -> None:
        """Multiplies every reduced gradient in place, a bucket at a time."""
        for bucket in self.buckets:
            bucket.owned.mul_(factor)

    @torch.no_grad()
    def after_update(self) -> None:
        """All-gathers the rows that owners have updated (zero = 1), a bucket while the next one is
        under way: all copies at once would take the memory of a small model's weights again. Ahead
        of a forward all buckets set out, in its order."""
        tensors = {name: shard.tensor for name, shard in self.shards.items()}
        owned = [bucket for bucket in self.buckets if bucket.owners.size > 1]
        self.settle()
        if self.gathers_ahead:
            self.gathering = {b: b.start_all_gather(tensors) for b in self._in_order(owned)}
            return
        gathers = (bucket.start_all_gather(tensors) for bucket in owned)
        for finish, _ in pairwise(chain(gathers, [None])):
            assert finish is not None, "a bucket's"
            finish()

    def settle(self) -> None:
        """Waits for the rows that `after_update` gathers."""
        self._wait_for(self.bucket_of)

    @torch.no_grad()
    def _wait_for(self, names: Iterable[str]) -> None:
        """Waits for the updated rows of some parameters."""
        if self.gathering:
            for bucket in {self.bucket_of[name]: None for name in names}:
                if finish := self.gathering.pop(bucket, None):
                    finish()

    def _wait_when_read(self, stage: nn.Module) -> None:
        """Has forwards wait for updated rows: a block's and the final norm's ahead of it, the
        head's behind the stage, where losses read it, and all others ahead of the stage."""
        names = [name for name, _ in self.ownership.trained(stage)]
        parts = [name for name, _ in stage.named_modules() if is_block(name) or name == FINAL_NORM]
        later = tuple(f"{part}." for part in (*parts, "head"))
        first = [name for name in names if not name.startswith(later)]
        stage.register_forward_pre_hook(lambda *_: self._wait_for(first))
        for part in parts:
            own_names = [name for name in names if name.startswith(f"{part}.")]
            wait = partial(self._wait_for, own_names)
            stage.get_submodule(part).register_forward_pre_hook(lambda *_, wait=wait: wait())
        stage.register_forward_hook(lambda *_: self._wait_for(names))

    def _in_order(self, buckets: list[Bucket]) -> list[Bucket]:
        """Sorts buckets as forwards read them: by the first of their parameters."""
        names = (name for stage in self.stages.values() for name, _ in stage.named_parameters())
        position = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return sorted(buckets, key=lambda bucket: min(position[name] for name in bucket.slots))

    def saves(self, name: str) -> bool:
        """Whether this rank is the first that holds a parameter's shard."""
        groups, parameter = self.ownership.groups, self.ownership.table[name]
        primary = parameter.is_primary(groups.layout, groups.rank)
        return primary and not self.ownership.is_second_copy(name)

    def _add_bucket(self, stage: int, members: NamedParameters) -> None:
        any_name, parameter = members[0]
        like = torch.empty(0, dtype=self._dtype_of(parameter), device=parameter.device)
        owners, remaining_axis = self.ownership.owners(any_name), self.ownership.rest(any_name)
        bucket = Bucket({name: p.shape for name, p in members}, owners, remaining_axis, like)
        self.buckets.append(bucket)
        for name, parameter in members:
            self.bucket_of[name] = bucket
            parameter.register_post_accumulate_grad_hook(self._collector(bucket, stage, name))
            if parameter.dim() == 2:
                self.sinks.add(parameter, bucket.sink(name, partial(self._begin, name)))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, self.least)

    def _begin(self, name: str) -> int:
        """Notes a gradient of a parameter; returns 0 for the first of a step, then 1."""
        is_first = name in self.fresh
        self.fresh.discard(name)
        return 0 if is_first else 1

    def _collector(self, bucket: Bucket, stage: int, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            # None of a gradient that GEMMs added to its sink, or that a W pass brings later: no W
            # pass but the last is due once the stage is in `last`.
            if parameter.grad is not None:
                bucket.put(name, parameter.grad, first=self._begin(name) == 0)
                parameter.grad = None
            if stage in self.last:
                self.missing[bucket].discard(name)
                if not self.missing[bucket]:
                    bucket.start()
                    self._call_back_after(bucket)

        return collect

    def _call_back_after(self, bucket: Bucket) -> None:
        """Calls `on_reduced` for the buckets that were started before this one."""
        if self.on_reduced is None:
            return
        self.summing.append(bucket)
        done = self.summing[:-1] if bucket.is_reduced_over_ranks else self.summing
        self.summing = self.summing[len(done) :]
        for reduced in done:
            reduced.finish()
            if not (
                self.ownership.tied in reduced.slots and self.ownership.groups.axes["ends"].size > 1
            ):
                self.on_reduced({name: reduced.gradient(name) for name in reduced.slots})


def _bucketed(
    members: Iterable[tuple[str, nn.Parameter]],
    limit: float,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> Iterator[NamedParameters]:
    part: NamedParameters = []
    size = 0
    for name, parameter in members:
        taken = dtype_of(parameter).itemsize * parameter.numel()
        if part and size + taken > limit:
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += taken
    if part:
        yield part


def _add_(total: Tensor, x: Tensor) -> None:
    """Adds x [rows, columns] to a total of its dtype or a wider one.

    torch casts all of a narrower x first on a CPU: for 8 Mi numbers of bfloat16 that took 32 MiB
    and 29 ms on a core of an EPYC, and slices that stay in its cache 3.4 ms.
    """
    if total.device.type != "cpu" or total.dtype == x.dtype:
        total.add_(x)
        return
    for part in limits.row_slices(total.shape[1], limits.block_rows(len(total) * total.itemsize)):
        total[:, part].add_(x[:, part])
