"""Data parallelism: gradients are summed in buckets while the last backward still runs.

Gradients of all micro-batches accumulate in flat float32 buckets (float64 for float64 models), cut
by the axes over which a parameter's gradient is partial (Parameter.gradient_axes). A bucket is
reduced as soon as the last micro-batch's backward has filled it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.spec.sharding import Parameter

TIED = "embedding.weight"  # on the first stage, and again on the last where the head is tied
HEAD = "head.weight"  # in the table where it is not


@dataclass
class _Bucket:
    axis: Axis
    stage: int
    flat: Tensor
    views: dict[str, Tensor]
    missing: set[str] = field(default_factory=set)  # not yet filled by the last backward
    work: dist.Work | None = None


class Gradients:
    """The gradients of this rank's parameters, summed over the ranks that see other tokens."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        table: dict[str, Parameter],
        groups: Groups,
        *,
        sequence_parallel: bool,
        bucket_bytes: float,
    ) -> None:
        self.groups, self.table = groups, table
        self.buckets: list[_Bucket] = []
        seen: set[int] = set()
        for index, stage in stages.items():
            named = [(n, p) for n, p in stage.named_parameters() if id(p) not in seen]
            seen.update(id(p) for _, p in named)
            for axes, members in _by_axes(named, table, groups, sequence_parallel).items():
                for part in _cut(reversed(members), bucket_bytes):
                    self.buckets.append(self._bucket(index, groups.over(axes), part))
        self.views = {name: v for bucket in self.buckets for name, v in bucket.views.items()}
        self.fresh: set[str] = set(self.views)
        self.armed: set[int] = set()

    def begin(self) -> None:
        """Starts a step: the first gradient to come replaces the last step's."""
        self.fresh, self.armed = set(self.views), set()
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)

    def arm(self, stage: int) -> None:
        """Says that the next backward of a stage is its last one of the step."""
        self.armed.add(stage)

    def finish(self) -> None:
        """Returns when every gradient is reduced; those that no backward touched are zero."""
        for name in self.fresh:
            self.views[name].zero_()
        for bucket in self.buckets:
            if bucket.work is None and bucket.axis.size > 1:
                self._reduce(bucket)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        if TIED in self.views and HEAD not in self.table:
            all_reduce(self.views[TIED], self.groups.axes["ends"])

    def square_sum(self) -> float:
        """The sum of squares of the elements this rank answers for: each counts on one rank."""
        layout, rank = self.groups.layout, self.groups.rank
        mine = [
            view
            for name, view in self.views.items()
            if self.table[name].is_primary(layout, rank) and not self._is_second_copy(name)
        ]
        if not mine:
            return 0.0
        return float(torch.stack(torch._foreach_norm(mine)).double().square().sum())

    def scale_(self, factor: float) -> None:
        """Multiplies every gradient in place."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def _is_second_copy(self, name: str) -> bool:
        return name == TIED and self.groups.axes["ends"].rank > 0

    def _bucket(self, stage: int, axis: Axis, members: list[tuple[str, nn.Parameter]]) -> _Bucket:
        dtype = torch.promote_types(members[0][1].dtype, torch.float32)
        sizes = [parameter.numel() for _, parameter in members]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.groups.device)
        parts = flat.split(sizes)
        views = {n: part.view_as(p) for (n, p), part in zip(members, parts, strict=True)}
        bucket = _Bucket(axis, stage, flat, views)
        for name, parameter in members:
            self._watch(bucket, name, parameter)
        return bucket

    def _watch(self, bucket: _Bucket, name: str, parameter: nn.Parameter) -> None:
        def collect(parameter: Tensor) -> None:
            view, grad = bucket.views[name], parameter.grad
            assert grad is not None, f"the hook of {name} ran without a gradient"
            if name in self.fresh:
                self.fresh.remove(name)
                view.copy_(grad)
            else:
                view.add_(grad)
            parameter.grad = None
            if bucket.stage in self.armed:
                bucket.missing.discard(name)
                if not bucket.missing and bucket.axis.size > 1:
                    self._reduce(bucket)

        parameter.register_post_accumulate_grad_hook(collect)

    def _reduce(self, bucket: _Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.axis.group, async_op=True)


def _by_axes(
    named: Iterable[tuple[str, nn.Parameter]],
    table: dict[str, Parameter],
    groups: Groups,
    sequence_parallel: bool,
) -> dict[tuple[str, ...], list[tuple[str, nn.Parameter]]]:
    sets: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        axes = table[name].gradient_axes(groups.layout, sequence_parallel)
        sets.setdefault(axes, []).append((name, parameter))
    return sets


def _cut(
    members: Iterable[tuple[str, nn.Parameter]], limit: float
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    part: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in members:
        if part and size + 4 * parameter.numel() > limit:
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += 4 * parameter.numel()
    if part:
        yield part
