"""Local SGD and DiLoCo: replicas train alone and average their changes every `period` steps.

A replica's pseudo-gradient is the outer weights minus its own weights. The outer optimizer, SGD
with momentum or Nesterov's, updates the outer weights by the replicas' mean pseudo-gradient
(DiLoCo, arXiv:2311.08105, algorithm 1). Replicas then train on from the outer weights, each with
its own inner optimizer state. `local` has an outer learning rate of 1 and no momentum: it averages
weights.

Layers are strided over `fragments`, which are exchanged in turn (Streaming DiLoCo,
arXiv:2501.18512, algorithm 2). With `overlap_steps` an exchange overlaps that many updates, and
replicas train on from the mean of their own and the outer weights.

Outer weights and momentum are the same on all replicas. A replica whose weights are not finite at
an exchange takes no part in it and restarts from the outer weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.config.errors import failed
from mtcli.core.exchange.diloco import ERROR, MOMENTUM, OUTER, DiLoCoFacts, FragmentFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.optim.sgd import momentum_steps_
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import flatten, unflatten
from mtcli.core.sync.replica_mean import FullMean, LargestMean, QuantisedMean, ReplicaMean
from mtcli.core.sync.strategy import Strategy

OWN_SHARE = 0.5  # of a replica's own weights after an overlapped exchange: the paper's alpha


class OuterExchange(ReplicaExchange):
    """The exchange of `local` and `diloco`, scheduled by the optimizer's count of updates."""

    facts: DiLoCoFacts

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: DiLoCoFacts) -> None:
        super().__init__(inside, optimizer, facts)
        self.fragments = [Fragment(optimizer, facts, part) for part in facts.fragments]
        self.due: dict[int, int] = {}  # by fragment under way: the update after which it is applied

    @torch.no_grad()
    def after_step(self) -> None:
        """Applies, advances and starts the exchanges that are due, in the same order everywhere."""
        overlap, update = self.facts.sync.overlap_steps, self.optimizer.updates
        for index, due in list(self.due.items()):
            if due == update:
                self._apply(index)
            elif due - update == self.facts.second_phase:
                self.fragments[index].advance()
        for index, fragment in enumerate(self.fragments):
            if fragment.turns.is_due(update):
                fragment.start(self._present())
                self.due[index] = update + overlap
                if not overlap:
                    self._apply(index)

    def _apply(self, index: int) -> None:
        del self.due[index]
        self.fragments[index].settle()
        self.fragments[index].mix(OWN_SHARE if self.facts.sync.overlap_steps else 0.0)

    def _present(self) -> bool:
        """Whether this replica's weights are finite; if not, restarts it from the outer weights."""
        masters = list(self.optimizer.masters.values())
        # What is not finite makes a sum so too; a norm takes 10 times as long on a CPU.
        sums = torch.stack([x.sum() for x in masters]) if masters else torch.zeros(1)
        broken = (~sums.isfinite()).any().float().view(1)
        groups = self.inside.ownership.groups
        present = not all_reduce(broken.to(groups.device), groups.replica, dist.ReduceOp.MAX).any()
        if not present:
            self._restart()
        return present

    @torch.no_grad()
    def _restart(self) -> None:
        """Copies the outer weights to this replica and zeroes the error feedback."""
        for fragment in self.fragments:
            fragment.mix(0.0)
            if fragment.error is not None:
                fragment.error.zero_()

    def state(self) -> dict[str, Tensor]:
        """The outer weights and momentum, and the error feedback.

        Waits for the exchanges under way and makes their outer steps, so that a checkpoint needs
        nothing of them but the update at which each is applied.
        """
        for index in self.due:
            self.fragments[index].settle()
        return super().state()

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """Views of the fragments' flat tensors."""
        return {n: x for fragment in self.fragments for n, x in fragment.views(kind).items()}

    def counters(self) -> dict[str, Any]:
        """The update at which each exchange under way is applied, by fragment."""
        return {"outer_due": {str(index): due for index, due in self.due.items()}}

    @torch.no_grad()
    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`; a run without `outer_due` starts from the replicas' mean weights."""
        if "outer_due" not in counters:
            for master in self.optimizer.masters.values():
                wide = all_reduce(master.double().contiguous(), self.measured_axis)
                master.copy_(wide / self.replicas.size)
            self.begin()
            self._restart()
            self.inside.after_update()
            return
        try:
            due = {int(index): int(at) for index, at in counters["outer_due"].items()}
        except (AttributeError, TypeError, ValueError):
            said = f"the manifest's sync.outer_due is {counters['outer_due']!r:.80}"
            raise failed(said, "it maps fragments to the update after which each is applied") from (
                None
            )
        updates, count = self.optimizer.updates, len(self.fragments)
        self.due = {i: at for i, at in due.items() if i in range(count) and at > updates}

    @torch.no_grad()
    def rejoin(self, counters: Mapping[str, Any]) -> str:
        """Starts from the checkpoint's outer weights, or from the mean weights if it has none."""
        if "outer_due" not in counters:
            return super().rejoin(counters)
        self._restart()
        self.inside.after_update()
        return "the outer weights"

    @torch.no_grad()
    def begin(self) -> None:
        """Sets the outer weights to the present weights."""
        self.due = {}
        for fragment in self.fragments:
            fragment.begin()

    def buffers(self) -> list[Tensor]:
        """Lists the memory that the exchange takes besides the optimizer's."""
        return [tensor for fragment in self.fragments for tensor in fragment.tensors.values()]


class Fragment:
    """Parameters that are exchanged together, with flat tensors of their outer state."""

    def __init__(self, optimizer: Optimizer, facts: DiLoCoFacts, fragment: FragmentFacts) -> None:
        self.ownership, self.facts = optimizer.ownership, facts
        self.sizes, self.turns = fragment
        self.masters = [optimizer.masters[name] for name in self.sizes]
        self.weights = [optimizer.weights[name] for name in self.sizes]
        self.under_way = False
        self.tensors: dict[str, Tensor] = {}
        if not self.sizes:
            return
        like, length = self.masters[0], sum(self.sizes.values())
        self.tensors = {state.kind: like.new_zeros(length) for state in facts.kept}
        axis = self.ownership.groups.replicas
        self.mean: ReplicaMean = FullMean(axis)
        if self.error is not None:
            compressed = LargestMean if facts.sync.top_k else QuantisedMean
            decay = facts.sync.error_decay
            self.mean = compressed(axis, facts.segments(self.sizes), self.error, decay)

    @property
    def error(self) -> Tensor | None:
        """The error feedback of compression; None where nothing is compressed."""
        return self.tensors.get(ERROR)

    def start(self, present: bool) -> None:
        """Starts averaging the pseudo-gradient, the outer weights minus this replica's."""
        if not self.sizes:
            return
        weights = flatten(self.masters)
        # Of an absent replica it is zero, as its own weights are the outer ones again.
        self.mean.start(self.tensors[OUTER] - weights, present)
        self.under_way = True

    def advance(self) -> None:
        """Starts the second phase of an exchange under way."""
        if self.under_way:
            self.mean.advance()

    def settle(self) -> None:
        """Waits for an exchange under way and makes the outer step; without any it does nothing."""
        if not self.under_way:
            return
        self.under_way = False
        pseudo_gradient, count = self.mean.finish()
        if not count:
            return
        parts = pseudo_gradient.split(list(self.sizes.values()))
        copies = dict(zip(self.sizes, parts, strict=True))
        ends = self.ownership.groups.axes["ends"]
        if self.ownership.tied in copies and ends.size > 1:  # sums may round differently there
            all_reduce(copies[self.ownership.tied], ends).div_(ends.size)
        momenta = [self.tensors[MOMENTUM]] if MOMENTUM in self.tensors else []
        nesterov = self.facts.sync.outer_nesterov
        steps = momentum_steps_([pseudo_gradient], momenta, self.facts.momentum, nesterov)
        torch._foreach_add_([self.tensors[OUTER]], steps, alpha=-self.facts.lr)

    def mix(self, own_share: float) -> None:
        """Sets weights to own_share * weights + (1 - own_share) * outer weights."""
        for master, weight, outer in zip(
            self.masters, self.weights, self.views(OUTER).values(), strict=True
        ):
            if own_share:
                master.mul_(own_share).add_(outer, alpha=1.0 - own_share)
            else:  # not by a factor of 0, which keeps what is not finite
                master.copy_(outer)
            if weight.dtype != master.dtype:
                weight.copy_(master)

    def begin(self) -> None:
        """Sets the outer weights to this replica's and zeroes momentum and error."""
        self.under_way = False
        for tensor in self.tensors.values():
            tensor.zero_()
        for master, outer in zip(self.masters, self.views(OUTER).values(), strict=True):
            outer.copy_(master)

    def views(self, kind: str) -> dict[str, Tensor]:
        """The state of a kind, by parameter."""
        if not self.sizes:
            return {}
        views = unflatten(self.tensors[kind], [master.shape for master in self.masters])
        return dict(zip(self.sizes, views, strict=True))
