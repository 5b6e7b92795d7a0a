"""Data parallelism: gradients are summed in buckets while the last backward still runs.

Gradients of all micro-batches accumulate in flat float32 buckets (float64 for float64 models), cut
by the axes over which a parameter's gradient is partial (Parameter.gradient_axes). A bucket is
reduced as soon as the last micro-batch's backward has filled it. With `shard_optimizer` (zero = 1)
each data parallel rank keeps, updates and gives back a share of every parameter's rows.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from mtcli.core.parallel.buckets import Bucket
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Groups
from mtcli.core.spec.sharding import Parameter

TIED = "embedding.weight"  # on the first stage, and again on the last where the head is tied
HEAD = "head.weight"  # in the table where it is not

Named = list[tuple[str, nn.Parameter]]


class Gradients:
    """The gradients of this rank's parameters, summed over the ranks that see other tokens."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        table: dict[str, Parameter],
        groups: Groups,
        *,
        sequence_parallel: bool,
        shard_optimizer: bool = False,
        bucket_bytes: float,
    ) -> None:
        self.groups, self.table = groups, table
        self.sequence_parallel, self.shard_optimizer = sequence_parallel, shard_optimizer
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        for index, stage in stages.items():
            named = [(n, p) for n, p in stage.named_parameters() if n not in self.parameters]
            self.parameters.update(named)
            for axes, members in self._by_axes(named).items():
                for part in _cut(reversed(members), bucket_bytes):
                    self._add_bucket(index, axes, part)
        self.fresh: set[str] = set(self.parameters)
        self.armed: set[int] = set()
        self.missing: dict[Bucket, set[str]] = {}  # what the last backward has yet to fill

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients this rank keeps, by name: [rows of its share, ...]."""
        return {name: bucket.gradient(name) for name, bucket in self.bucket_of.items()}

    def owned(self) -> dict[str, Tensor]:
        """The parameters' rows that this rank's optimizer updates, as views."""
        return {name: p.data[self.rows(name)] for name, p in self.parameters.items()}

    def rows(self, name: str) -> slice:
        """The rows of a local parameter that this rank's optimizer owns."""
        return self.bucket_of[name].rows(name)

    def owner_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the optimizer state of a parameter is cut."""
        if not self.shard_optimizer:
            return ()
        return tuple(axis for axis in self._axes(name) if axis != "tp")

    def buffers(self) -> list[Tensor]:
        """The memory that gradients take."""
        return [bucket.flat for bucket in self.buckets]

    def begin(self) -> None:
        """Starts a step: the first gradient to come replaces the last step's."""
        self.fresh, self.armed = set(self.parameters), set()
        self.missing = {bucket: set(bucket.slots) for bucket in self.buckets}

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
        if TIED in self.parameters and HEAD not in self.table:
            all_reduce(self.views[TIED], self.groups.axes["ends"])

    def square_sum(self) -> float:
        """The sum of squares of the elements this rank answers for: each counts on one rank."""
        mine = [
            view for name, view in self.views.items() if view.numel() and self.answers_for(name)
        ]
        if not mine:
            return 0.0
        return float(torch.stack(torch._foreach_norm(mine)).double().square().sum())

    def answers_for(self, name: str) -> bool:
        """Whether this rank counts and saves its share of a parameter's optimizer state."""
        place = self.groups.layout.place(self.groups.rank)
        described, cut = self.table[name], self.owner_axes(name)
        copies = [a for a in described.replicated_over(self.groups.layout) if a not in cut]
        return all(place[axis] == 0 for axis in copies) and not self.is_second_copy(name)

    def is_second_copy(self, name: str) -> bool:
        """Whether this is the last stage's copy of a tied embedding."""
        return name == TIED and HEAD not in self.table and self.groups.axes["ends"].rank > 0

    def scale_(self, factor: float) -> None:
        """Multiplies every kept gradient in place."""
        for bucket in self.buckets:
            bucket.kept.mul_(factor)

    @torch.no_grad()
    def share_parameters(self) -> None:
        """After the update: gives every rank the rows that others own."""
        if not self.shard_optimizer:
            return
        tensors = {name: parameter.data for name, parameter in self.parameters.items()}
        shared = [bucket for bucket in self.buckets if bucket.owners.size > 1]
        for sharing in [bucket.share(tensors) for bucket in shared]:
            sharing.finish()

    def _axes(self, name: str) -> tuple[str, ...]:
        return self.table[name].gradient_axes(self.groups.layout, self.sequence_parallel)

    def _by_axes(self, named: Named) -> dict[tuple[str, ...], Named]:
        sets: dict[tuple[str, ...], Named] = {}
        for name, parameter in named:
            sets.setdefault(self._axes(name), []).append((name, parameter))
        return sets

    def _add_bucket(self, stage: int, axes: tuple[str, ...], members: Named) -> None:
        cut = self.owner_axes(members[0][0])
        owners, rest = self.groups.over(cut), self.groups.over(tuple(set(axes) - set(cut)))
        dtype = torch.promote_types(members[0][1].dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=self.groups.device)
        bucket = Bucket({name: p.shape for name, p in members}, owners, rest, like)
        self.buckets.append(bucket)
        for name, parameter in members:
            self.bucket_of[name] = bucket
            parameter.register_post_accumulate_grad_hook(self._collector(bucket, stage, name))

    def _collector(self, bucket: Bucket, stage: int, name: str):  # type: ignore[no-untyped-def]
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


def _cut(members: Iterable[tuple[str, nn.Parameter]], limit: float) -> Iterator[Named]:
    part: Named = []
    size = 0
    for name, parameter in members:
        if part and size + 4 * parameter.numel() > limit:
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += 4 * parameter.numel()
    if part:
        yield part
