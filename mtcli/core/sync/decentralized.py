"""Decentralized SGD: each replica exchanges with its neighbours in a graph alone.

With weights x, momentum m and gradient g of a replica, learning rate lr, momentum's factor b, and
the mixing matrix W of exchange/topology.py acting across replicas, a step is

    dsgd        x <- W (x - lr g)
    dmsgd       m <- b m + g                           x <- W (x - lr m)
    awc_dmsgd   m <- b m + g                           x <- W x - lr m
    da_dmsgd    m <- W (b m + g)                       x <- W (x - lr (b m + g))
    decentlam   m <- b m + (x - W (x - lr g)) / lr     x <- x - lr m

as DecentLaM's paper names them (arXiv:2104.11981; da_dmsgd is arXiv:1905.03817's). DecentLaM's
momentum is that of mixed gradients, so that its fixed point is dsgd's whatever b, while dmsgd's is
dsgd's at lr / (1 - b). Where lr = 0 it mixes gradients and no weights: m <- b m + W g. Weight decay
is a part of g.

DecentLaM's m holds the replicas' disagreement over the learning rate, which is tiny at the end of a
schedule. A run whose schedule is extended continues at a rate up to thousands of times higher.
So where the rate rises to more than JUMP times the last one, m is scaled to keep lr m as it was.

x are the master weights. awc_dmsgd exchanges while the step is computed. The others exchange a
bucket of weights as soon as its gradients are reduced, while the backward runs on. Where gradients
are clipped, or may overflow in fp16, every exchange waits for the gradient norm.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_number, shown
from mtcli.core.exchange.decentralized import MixingFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import Axis
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import unflatten
from mtcli.core.sync.mixing import Mix, mix_of
from mtcli.core.sync.strategy import Strategy
from mtcli.kernels.multi_tensor import OptimizerTensors

Gradients = Mapping[str, Tensor]

# More than the second step of a warm-up, whose rate is twice the first one's.
JUMP = 2.0
AHEAD = 2  # buckets under way, where none waits in memory of its own


class Decentralized(ReplicaExchange):
    """The exchange of dsgd, dmsgd, awc_dmsgd, da_dmsgd and decentlam."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: MixingFacts) -> None:
        super().__init__(inside, optimizer, facts)
        self.starts_with_step = facts.starts_with_step
        rule = METHODS[facts.method]
        buckets = [
            [name for name in names if name in optimizer.weights]
            for names in inside.gradient_buckets()
        ]
        self.buckets = [rule(names, optimizer, facts, self.replicas) for names in buckets if names]
        self.bucket_of = {bucket.names[0]: bucket for bucket in self.buckets}
        self.lr = 0.0
        self.divides_by_rate = rule is _DecentLam
        self.last_rate = 0.0  # above 0, by which momenta hold displacements; 0: they hold none
        if facts.share.overlaps:
            for bucket in self.buckets:
                bucket.keep()
            if not self.starts_with_step:
                inside.when_reduced(self._start_early)

    def before_step(self, lr: float) -> None:
        """Drops exchanges that a step without an update started; starts awc_dmsgd's."""
        self.lr = lr
        for bucket in self.buckets:
            bucket.drop()
            if self.starts_with_step:
                bucket.start({}, lr)

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Starts the exchanges that are not under way yet, and updates the weights."""
        assert lr == self.lr, f"the step began with a learning rate of {self.lr}, not {lr}"
        if factor != 1.0:
            self.inside.scale_gradients_(factor)
        gradients = self.inside.gradients
        if self.divides_by_rate and lr > JUMP * self.last_rate > 0.0:
            for bucket in self.buckets:
                torch._foreach_mul_(bucket.m, self.last_rate / lr)
        self.last_rate = lr or self.last_rate
        for bucket in self.buckets[:AHEAD]:
            bucket.start(gradients, lr)
        for i, bucket in enumerate(self.buckets):
            bucket.finish(gradients, lr)
            for following in self.buckets[i + AHEAD : i + AHEAD + 1]:
                following.start(gradients, lr)
        self.optimizer.updates += 1
        self.inside.after_update()

    def counters(self) -> dict[str, Any]:
        """The last learning rate, if the method's momenta are divided by it (decentlam)."""
        return {"last_rate": self.last_rate} if self.divides_by_rate else {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`; without any, momenta are those of another method.

        Raises MtcliError where `last_rate` is no finite number of 0 or more.
        """
        rate = counters.get("last_rate", 0.0)
        if not is_number(rate) or not 0.0 <= rate < inf:
            message = f"the checkpoint's last_rate of decentlam is {shown(rate)}"
            raise wrong(message, "another checkpoint of the run")
        self.last_rate = float(rate)

    def buffers(self) -> list[Tensor]:
        """The buffers of exchanges that overlap the step's computation."""
        return [x for bucket in self.buckets if bucket.kept for x in bucket.kept.buffers()]

    @torch.no_grad()
    def _start_early(self, gradients: Gradients) -> None:
        bucket = next((self.bucket_of[name] for name in gradients if name in self.bucket_of), None)
        if bucket is not None:
            bucket.start(gradients, self.lr)


class _Bucket:
    """Parameters that are exchanged together as one flat tensor; the base of each method's bucket.

    x are the masters, m the momenta (none without momentum), g the gradients with weight decay, and
    b momentum's factor.
    """

    def __init__(
        self, names: Sequence[str], optimizer: Optimizer, facts: MixingFacts, replicas: Axis
    ) -> None:
        self.names, self.optimizer, self.facts, self.replicas = names, optimizer, facts, replicas
        self.b = optimizer.config.momentum
        momenta = optimizer.moments.get("momentum", {})
        self.x = [optimizer.masters[name] for name in names]
        self.m = [momenta[name] for name in names] if momenta else []
        weights = [optimizer.weights[name] for name in names]
        decays = [optimizer.update_of(name).decays for name in names]
        self.tensors = OptimizerTensors(self.x, self.m, [], weights, decays)
        self.kept: Mix | None = None  # where it overlaps the step
        self.under_way: Mix | None = None

    @abstractmethod
    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        """Writes the tensors to mix into `sent`: `facts.copies` of each parameter."""

    @abstractmethod
    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        """Updates masters and momenta from the `mixed` tensors, which it may overwrite."""

    def keep(self) -> None:
        """Allocates the exchange's buffers for the whole run, so that it can overlap a step."""
        self.kept = self._mix()

    def start(self, gradients: Gradients, lr: float) -> None:
        """Starts the exchange, if it is not under way."""
        if self.under_way is not None:
            return
        mix = self.kept or self._mix()
        self.fill(self._views(mix), gradients, lr)
        mix.start(self.optimizer.updates)
        self.under_way = mix

    def finish(self, gradients: Gradients, lr: float) -> None:
        """Waits for the exchange, and updates masters, momenta and weights."""
        mix, self.under_way = self.under_way, None
        assert mix is not None, "every bucket is started before it is finished"
        mix.wait()
        self.update(self._views(mix), gradients, lr)
        self.tensors.round_()

    def drop(self) -> None:
        """Ends an exchange whose step made no update."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None

    def decayed(self, gradients: Gradients) -> list[Tensor]:
        decay = self.optimizer.config.weight_decay
        return [
            torch.add(gradients[name], x, alpha=decay) if decays and decay else gradients[name]
            for name, x, decays in zip(self.names, self.x, self.tensors.decays, strict=True)
        ]

    def next_momenta(self, gradients: Gradients) -> list[Tensor]:
        """b m + g, in new tensors."""
        return list(torch._foreach_add(self.decayed(gradients), self.m, alpha=self.b))

    def add_to_momenta_(self, gradients: list[Tensor]) -> None:
        """m <- b m + g."""
        for momentum, gradient in zip(self.m, gradients, strict=True):
            torch.add(gradient, momentum, alpha=self.b, out=momentum)

    def _mix(self) -> Mix:
        size = self.facts.copies * sum(x.numel() for x in self.x)
        return mix_of(self.facts.mixing_graph, self.replicas, self.x[0].new_empty(size))

    def _views(self, mix: Mix) -> list[Tensor]:
        return unflatten(mix.x, [x.shape for x in self.x] * self.facts.copies)


class _Dsgd(_Bucket):
    """x <- W (x - lr g)."""

    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        _step_to(sent, self.x, self.decayed(gradients), lr)

    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        torch._foreach_copy_(self.x, mixed)


class _Dmsgd(_Bucket):
    """m <- b m + g, x <- W (x - lr m)."""

    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        _step_to(sent, self.x, self.next_momenta(gradients), lr)

    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        self.add_to_momenta_(self.decayed(gradients))
        torch._foreach_copy_(self.x, mixed)


class _AwcDmsgd(_Bucket):
    """m <- b m + g, x <- W x - lr m; without momentum m is g."""

    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        torch._foreach_copy_(sent, self.x)

    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        steps = self.decayed(gradients)
        if self.m:
            self.add_to_momenta_(steps)
            steps = self.m
        torch._foreach_add_(mixed, steps, alpha=-lr)
        torch._foreach_copy_(self.x, mixed)


class _DaDmsgd(_Bucket):
    """m <- W (b m + g), x <- W (x - lr (b m + g)): momenta follow weights in the flat tensor."""

    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        momenta, count = self.next_momenta(gradients), len(self.x)
        torch._foreach_copy_(sent[count:], momenta)
        _step_to(sent[:count], self.x, momenta, lr)

    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        torch._foreach_copy_([*self.x, *self.m], mixed)


class _DecentLam(_Bucket):
    """m <- b m + (x - W (x - lr g)) / lr, x <- x - lr m."""

    def fill(self, sent: list[Tensor], gradients: Gradients, lr: float) -> None:
        if lr:
            _step_to(sent, self.x, self.decayed(gradients), lr)
        else:
            torch._foreach_copy_(sent, self.decayed(gradients))

    def update(self, mixed: list[Tensor], gradients: Gradients, lr: float) -> None:
        if lr:
            torch._foreach_sub_(mixed, self.x)  # -lr times the mixed gradients
        torch._foreach_mul_(self.m, self.b)
        torch._foreach_add_(self.m, mixed, alpha=-1 / lr if lr else 1.0)
        torch._foreach_add_(self.x, self.m, alpha=-lr)


METHODS: dict[str, type[_Bucket]] = {
    "dsgd": _Dsgd, "dmsgd": _Dmsgd, "awc_dmsgd": _AwcDmsgd, "da_dmsgd": _DaDmsgd,
    "decentlam": _DecentLam,
}  # fmt: skip


def _step_to(out: list[Tensor], x: list[Tensor], steps: list[Tensor], lr: float) -> None:
    """out <- x - lr step."""
    for target, master, step in zip(out, x, steps, strict=True):
        torch.add(master, step, alpha=-lr, out=target)
