"""Decentralized SGD: replicas exchange with neighbours, and no one with all.

With weights x, momentum m and gradient g of a replica, learning rate lr, momentum's factor b, and
the mixing matrix W of mesh/topology.py acting across replicas, a step is

    dsgd        x <- W (x - lr g)
    dmsgd       m <- b m + g                           x <- W (x - lr m)
    awc_dmsgd   m <- b m + g                           x <- W x - lr m
    da_dmsgd    m <- W (b m + g)                       x <- W (x - lr (b m + g))
    decentlam   m <- b m + (x - W (x - lr g)) / lr     x <- x - lr m

as DecentLaM's paper names them (arXiv:2104.11981; da_dmsgd is arXiv:1905.03817's). DecentLaM's
momentum is that of mixed gradients, so that its fixed point is dsgd's whatever b, while dmsgd's is
dsgd's at lr / (1 - b). Where lr = 0 it mixes gradients and no weights: m <- b m + W g. Weight decay
is a part of g.

x are the master weights. awc_dmsgd exchanges while the step is computed. The others exchange a
bucket of weights as soon as its gradients are reduced, while the backward goes on; where the
gradients are to be clipped, or may overflow in fp16, all follow their norm.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.topology import MixingGraph
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.optim.sgd import decayed_gradients
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.mixing import Mix, mix_of
from mtcli.core.sync.strategy import Strategy
from mtcli.kernels.multi_tensor import OptimizerTensors

AHEAD = 2  # buckets under way, where none waits in memory of its own


class Decentralized(ReplicaExchange):
    """The exchange of dsgd, dmsgd, awc_dmsgd, da_dmsgd and decentlam."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, config: RunConfig) -> None:
        super().__init__(inside, optimizer)
        self.graph = MixingGraph.of(config.sync, self.replicas.size)
        self.is_awc = config.sync.method == "awc_dmsgd"
        buckets = [
            [name for name in names if name in optimizer.named]
            for names in inside.gradient_buckets()
        ]
        self.buckets = [
            _Bucket(names, optimizer, config.sync.method, self) for names in buckets if names
        ]
        self.bucket_of = {bucket.names[0]: bucket for bucket in self.buckets}
        self.lr = 0.0
        if config.overlaps_neighbours:
            for bucket in self.buckets:
                bucket.keep()
            if not self.is_awc:
                inside.when_reduced(self._start_early)

    def before_step(self, lr: float) -> None:
        """Starts the exchange of awc_dmsgd; drops what a step without an update has begun."""
        self.lr = lr
        for bucket in self.buckets:
            bucket.drop()
            if self.is_awc:
                bucket.start({}, lr)

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Exchanges what is not under way yet, and updates the weights."""
        assert lr == self.lr, f"the step began with a learning rate of {self.lr}, not {lr}"
        if factor != 1.0:
            self.inside.scale_gradients_(factor)
        gradients = self.inside.gradients
        for bucket in self.buckets[:AHEAD]:
            bucket.start(gradients, lr)
        for i, bucket in enumerate(self.buckets):
            bucket.finish(gradients, lr)
            for following in self.buckets[i + AHEAD : i + AHEAD + 1]:
                following.start(gradients, lr)
        self.optimizer.updates += 1
        self.inside.after_update()

    def buffers(self) -> list[Tensor]:
        """Lists the memory of exchanges that overlap the step's computing."""
        return [x for bucket in self.buckets if bucket.kept for x in bucket.kept.buffers()]

    @torch.no_grad()
    def _start_early(self, gradients: Mapping[str, Tensor]) -> None:
        bucket = next((self.bucket_of[name] for name in gradients if name in self.bucket_of), None)
        if bucket is not None:
            bucket.start(gradients, self.lr)


class _Bucket:
    """Parameters that are exchanged together, as a flat tensor."""

    def __init__(
        self, names: Sequence[str], optimizer: Optimizer, method: str, exchange: Decentralized
    ) -> None:
        self.names, self.optimizer, self.exchange = names, optimizer, exchange
        self.momentum = optimizer.config.momentum
        # Without momentum dmsgd, da_dmsgd and decentlam are dsgd.
        self.method = method if self.momentum or method == "awc_dmsgd" else "dsgd"
        of = [list(optimizer.named).index(name) for name in names]
        parts = optimizer.parts
        momenta = [parts.exp_avgs[i] for i in of] if self.momentum else []
        columns = ([column[i] for i in of] for column in (parts.masters, parts.weights))
        masters, weights = columns
        self.parts = OptimizerTensors(masters, momenta, [], weights, [parts.decays[i] for i in of])
        self.kept: Mix | None = None  # where it overlaps the step
        self.under_way: Mix | None = None

    def keep(self) -> None:
        """Keeps the memory of an exchange from step to step."""
        self.kept = self._mix()

    def start(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Starts the exchange of what the method mixes, if it is not under way; changes nothing."""
        if self.under_way is not None:
            return
        mix = self.kept or self._mix()
        sent, momenta = self._views(mix)
        if self.method == "awc_dmsgd":
            torch._foreach_copy_(sent, list(self.parts.masters))
        else:
            steps = self._gradients(gradients)
            if self.method in ("dmsgd", "da_dmsgd"):
                steps = _next_momenta(self.parts.exp_avgs, steps, self.momentum)
            if momenta:
                torch._foreach_copy_(momenta, steps)
            if self.method == "decentlam" and not lr:
                torch._foreach_copy_(sent, steps)
            else:
                for view, x, step in zip(sent, self.parts.masters, steps, strict=True):
                    torch.add(x, step, alpha=-lr, out=view)
        mix.start(self.optimizer.updates)
        self.under_way = mix

    def finish(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Waits for what it mixes, and updates masters, momenta and weights."""
        mix, self.under_way = self.under_way, None
        assert mix is not None, "every bucket is started before it is finished"
        mix.wait()
        mixed, mixed_momenta = self._views(mix)
        x, m, b = list(self.parts.masters), list(self.parts.exp_avgs), self.momentum
        if self.method == "decentlam":
            if lr:
                torch._foreach_sub_(mixed, x)  # -lr times the mixed gradients
            torch._foreach_mul_(m, b)
            torch._foreach_add_(m, mixed, alpha=-1 / lr if lr else 1.0)
            torch._foreach_add_(x, m, alpha=-lr)
            return self.parts.round_()
        if self.method in ("dmsgd", "awc_dmsgd"):
            steps = self._gradients(gradients)
            for momentum, gradient in zip(m, steps, strict=False):  # there are none where b = 0
                torch.add(gradient, momentum, alpha=b, out=momentum)
            steps = m or steps
            if self.method == "awc_dmsgd":
                torch._foreach_add_(mixed, steps, alpha=-lr)
        elif self.method == "da_dmsgd":
            torch._foreach_copy_(m, mixed_momenta)
        torch._foreach_copy_(x, mixed)
        return self.parts.round_()

    def drop(self) -> None:
        """Ends an exchange whose step made no update."""
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None

    def _mix(self) -> Mix:
        like, copies = self.parts.masters[0], 1 + (self.method == "da_dmsgd")
        size = copies * sum(master.numel() for master in self.parts.masters)
        return mix_of(self.exchange.graph, self.exchange.replicas, like.new_empty(size))

    def _views(self, mix: Mix) -> tuple[list[Tensor], list[Tensor]]:
        """The weights in a flat tensor, and the momenta where they are exchanged too."""
        masters = list(self.parts.masters)
        sizes = [master.numel() for master in masters]
        both = masters if len(mix.x) == sum(sizes) else masters + masters
        parts = mix.x.split([master.numel() for master in both])
        views = [part.view_as(master) for part, master in zip(parts, both, strict=True)]
        return views[: len(masters)], views[len(masters) :]

    def _gradients(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients with weight decay."""
        scalars = self.optimizer.scalars(lr=0.0)
        return decayed_gradients(self.parts, [gradients[name] for name in self.names], scalars)


def _next_momenta(
    momenta: Sequence[Tensor], gradients: list[Tensor], factor: float
) -> list[Tensor]:
    """b m + g, in new tensors; g alone without momentum."""
    if not factor:
        return gradients
    return list(torch._foreach_add(gradients, list(momenta), alpha=factor))
