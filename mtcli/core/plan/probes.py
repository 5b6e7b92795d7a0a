"""Single measurements of this machine's processor: products, copies, attention, collectives.

Every rank makes the same ones at the same time, so that caches, memory and clocks are shared as in
a run.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.model.build import DTYPES
from mtcli.core.parallel.attention_mask import AttentionMask
from mtcli.core.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from mtcli.core.parallel.context import attention_over
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.health.flight_recorder import FlightRecorder
from mtcli.core.plan.calibration import AttentionRow
from mtcli.kernels.gemm import matmul

SIDE = 1024  # of a large product
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SCORES, HEAD_DIM = 2**20, 32  # of an attention; of wider heads fewer scores do
LEAST_SECONDS, LEAST_TIMES = 0.01, 3
SMALL, LARGE = 2**12, 2**22  # bytes of a collective


class Stopwatch(NamedTuple):
    """How this rank's work is timed."""

    together: Callable[[], Any]  # returns when every rank has come so far
    clock: Callable[[], float]  # seconds


def stopwatch(ranks: int) -> Stopwatch:
    """A rank is timed by the processor time of its main thread, which other programs that use the
    machine meanwhile leave as it is. It has its part of every parallel region; threads that wait
    for each other sleep (OMP_WAIT_POLICY), or they would count their waiting."""
    return Stopwatch(dist.barrier if ranks > 1 else lambda: None, thread_time)


def seconds_of(run: Callable[[], Any], timer: Stopwatch) -> float:
    """Seconds that something takes, its first run aside."""
    return _passes_of(lambda mark: (run(), mark()), 1, timer)[0]


def _passes_of(
    run: Callable[[Callable[[], None]], Any], passes: int, timer: Stopwatch
) -> tuple[float, ...]:
    """Seconds of each pass of something that calls `mark` after each, its first run aside."""
    times: list[list[float]] = []
    run(lambda: None)
    timer.together()
    while len(times) < LEAST_TIMES or times[-1][-1] - times[0][0] < LEAST_SECONDS:
        moments = [timer.clock()]
        run(lambda moments=moments: moments.append(timer.clock()))
        times.append(moments)
    return tuple(median(one[i + 1] - one[i] for one in times) for i in range(passes))


def product_rate(precision: str, timer: Stopwatch) -> float:
    """FLOP/s of a large product."""
    a, b = (torch.randn(SIDE, SIDE).to(DTYPES[precision]) for _ in range(2))
    return 2.0 * SIDE**3 / seconds_of(lambda: matmul(a, b), timer)


def copy_rate(timer: Stopwatch) -> float:
    """Bytes/s read and written by a copy that no cache holds."""
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    return 2.0 * 4 * len(source) / seconds_of(lambda: target.copy_(source), timer)


def attention_row(
    length: int, head_dim: int, causal: bool, precision: str, timer: Stopwatch
) -> AttentionRow:
    """Seconds per score of rows of a length."""
    wanted = SCORES * HEAD_DIM // head_dim // length**2
    heads = max(2, wanted // 2 * 2)
    projected = torch.randn(2, length, heads // 2, 3, head_dim).to(DTYPES[precision])
    q, k, v = (x.transpose(1, 2) for x in projected.unbind(3))  # strided, as a model's are
    grad, scores = torch.randn_like(q), heads * length**2
    leaves, seen = [x.requires_grad_() for x in (q, k, v)], AttentionMask(causal)
    attend = attention_over("ring")

    def seconds(rank: int, ranks: int) -> tuple[float, float]:
        axis = Axis("cp", tuple(range(ranks)), rank, None, FlightRecorder(), Still())

        def there_and_back(mark: Callable[[], None]) -> None:
            y = attend(*leaves, axis, seen)
            mark()
            torch.autograd.grad(y, leaves, grad)
            mark()

        forward, backward = _passes_of(there_and_back, 2, timer)
        return forward, backward

    whole = seconds(0, 1)
    # The first rank of a ring computes on half of its queries, the last one on half of the keys:
    # two shapes of a hop, of which everyone waits for the slower one.
    two, three = ([seconds(rank, ranks) for rank in (0, ranks - 1)] for ranks in (2, 3))
    ring = [max(one[way] for one in two) for way in (0, 1)]
    hop = [min(ring[way], max(0.0, max(x[way] for x in three) - ring[way])) for way in (0, 1)]
    square = [one - part for one, part in zip(ring, hop, strict=True)]
    per_score = (*whole, *square, *(2 * part for part in hop))
    return AttentionRow(float(length), *(one / scores for one in per_score))


class Still:
    """A transport on which what a rank sends comes back to it, at no cost."""

    def shift(self, out: Tensor, x: Tensor) -> "Still":
        """Gives `out` the memory of x."""
        out.set_(x)
        return self

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


def links(axis: Axis, timer: Stopwatch) -> dict[str, tuple[float, float]]:
    """Seconds, and seconds per byte that crosses, of each kind of exchange. Collective.

    Of a tensor of B bytes (a gather's whole, an all-reduce's own) (n - 1) / n * B cross; hops
    send B bytes to the next rank and back, which two ranks of each pair do in turn.
    """
    n = axis.size
    runs: dict[str, Callable[[Tensor], Any]] = {
        "gather": lambda x: all_gather(x[: len(x) // n], axis),
        "scatter": lambda x: reduce_scatter(x, axis),
        "reduce": lambda x: all_reduce(x, axis),
        "exchange": lambda x: all_to_all(x.view(n, -1), axis),
        "hop": lambda x: _there_and_back(x, axis),
    }
    found = {}
    for name, run in runs.items():
        small, large = (_exchange_seconds(run, size, n, timer) for size in (SMALL, LARGE))
        crossing = [size if name == "hop" else size * (n - 1) / n for size in (SMALL, LARGE)]
        per_byte = max(0.0, (large - small) / (crossing[1] - crossing[0]))
        ways = 2 if name == "hop" else 1
        found[name] = (max(0.0, small - per_byte * crossing[0]) / ways, per_byte / ways)
    return found


def _exchange_seconds(run: Callable[[Tensor], Any], size: int, n: int, timer: Stopwatch) -> float:
    """Seconds of a collective, as often on every rank: the lower quartile, as ranks that other
    programs keep from a processor let the others wait."""
    x = torch.ones(size // 4 // n * n)
    times = 8 if size == LARGE else 50
    seconds = []
    timer.together()
    for _ in range(times):
        begin = perf_counter()
        run(x)
        seconds.append(perf_counter() - begin)
    return sorted(seconds)[times // 4]


def _there_and_back(x: Tensor, axis: Axis) -> None:
    peer = axis.ranks[axis.rank ^ 1] if axis.rank ^ 1 < axis.size else axis.ranks[axis.rank]
    if peer == axis.ranks[axis.rank]:
        return  # the last of an odd number
    for sender in (0, 1):
        if axis.rank % 2 == sender:
            dist.send(x, peer, group=axis.group)
        else:
            dist.recv(x, peer, group=axis.group)
