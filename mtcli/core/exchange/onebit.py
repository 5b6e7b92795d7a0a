"""The facts of 1-bit LAMB and 1-bit Adam (sync/onebit.py): gradients in the warm-up, then signs."""

from collections.abc import Iterator

from mtcli.core.exchange.arithmetic import Arithmetic, passes, times
from mtcli.core.exchange.facts import ExchangeFacts, ReplicaShare, StateKind

# Elementwise operations of a frozen update beyond those of the optimizer's own, which is fused.
MORE_PASSES = 4
SCALARS = 8, 8  # bytes of a replica's scale, which is gathered, and of the sum that servers reduce
ERROR, SERVER_ERROR = "error", "server_error"  # of what a replica and its server send
FRESH = "exp_avg_sq_fresh"  # LAMB's variance after the warm-up


class OneBitFacts(ExchangeFacts):
    """A reduce-scatter and an all-gather per step, of gradients and then of signs of momenta."""

    weights_differ = False

    def __init__(self, share: ReplicaShare) -> None:
        super().__init__(share)
        self.warmup = share.sync.warmup(share.steps)
        errors = StateKind(ERROR, differs=True), StateKind(SERVER_ERROR, owners=share.replicas)
        fresh = (StateKind(FRESH),) if share.optimizer.name == "lamb" else ()
        self.kept = (*(errors if share.replicas > 1 else ()), *fresh)
        warm, steps = min(self.warmup, share.steps), share.steps
        self.warm, self.frozen = warm / steps, (steps - warm) / steps
        self.narrow = share.weight < 4  # gradients are sent in 16 bits, and summed in 32

    def sent_bytes(self) -> float:
        """Bytes sent: an element is as wide as weights in the warm-up, and one bit after it."""
        n, both_ways, elements = self.share.replicas, self.share.both_ways, self.share.elements
        compressed = both_ways * (elements / 8 + SCALARS[1]) + (n - 1) * SCALARS[0]
        return self.warm * both_ways * elements * self.share.weight + self.frozen * compressed

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Yields the arithmetic of an update: the momentum is scaled, added to the error and
        squared; signs are packed for all servers and unpacked from all replicas and all servers."""
        elements, tensors, n = self.share.elements, len(self.share.sizes), self.share.replicas
        # vector and its mean; narrow ones as chunks to servers, the mean of n of them and back
        vector = 4 + 1 / n if self.narrow else 2.0
        yield from times(self.warm, [passes(vector, elements), passes(1, elements, tensors)])
        compressed = [
            passes(5, elements, tensors),  # momentum, scaled; error and its square
            Arithmetic("sign", elements * (1 + 1 / n), n + 1),
            Arithmetic("unsign", 2 * elements, 2 * n),
            passes(1, elements, n),  # to the server's error
            passes(1 / n, elements, tensors),  # squared
            passes(1, elements),  # of all servers, one after another
            passes(1 + MORE_PASSES, elements, tensors),  # divided by its scale, and taken
        ]
        yield from times(self.frozen, compressed)
