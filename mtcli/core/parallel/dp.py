"""Data parallelism: gradients are summed in buckets while the last backward still runs.

Gradients of all micro-batches accumulate in flat float32 buckets (float64 for float64 models), cut
by the axes over which a parameter's gradient is partial (Parameter.gradient_axes). A bucket is
reduced as soon as the last micro-batch's backward has filled it. Where ownership is cut (zero = 1)
each data parallel rank keeps, updates and gives back a share of every parameter's rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from mtcli.core.parallel.buckets import Bucket
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.ownership import Held, Ownership, whole

Named = list[tuple[str, nn.Parameter]]


class Reduction(Protocol):
    """How this rank's gradients become sums over the ranks that see other tokens."""

    ownership: Ownership

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients this rank keeps, by name: [rows of its share, ...]."""

    @property
    def held(self) -> dict[str, Held]:
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


class Gradients:
    """The Reduction of parameters that every data rank holds whole (zero = 0 and 1)."""

    def __init__(
        self, stages: Mapping[int, nn.Module], ownership: Ownership, bucket_bytes: float
    ) -> None:
        self.ownership, self.held = ownership, whole(stages)
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

    def _by_axes(self, named: Named) -> Iterable[Named]:
        sets: dict[tuple[str, ...], Named] = {}
        for name, parameter in named:
            sets.setdefault(self.ownership.summed_over(name), []).append((name, parameter))
        return sets.values()

    def _add_bucket(self, stage: int, members: Named) -> None:
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
