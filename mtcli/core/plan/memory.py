"""Counts bytes per rank: parameters by their shapes, and activations that the schedule keeps alive.

Weights, gradients and optimizer state are counted from `Parameter.local_shape`, the shapes that
training allocates. The other bytes are those of one micro-batch on a stage, times the micro-batches
in flight. A stage's bytes are estimates where layouts are ranked, and measured where
`core/rehearse` has run the real stage.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import ge, mul
from typing import NamedTuple

from mtcli.core.plan.activations import MARGIN, estimated
from mtcli.core.plan.elements import FIRST, Owner, is_sharded, owner_of, rank_elements
from mtcli.core.plan.exchange import exchange_of
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.rank_bytes import RankBytes, StageBytes
from mtcli.core.plan.workload import Workload, schedule_of
from mtcli.core.schedule.ops import Op


class InFlight(NamedTuple):
    """The micro-batches in flight at one moment, per chunk of a rank."""

    activations: tuple[int, ...]  # between F and B or I
    waiting: tuple[int, ...]  # between I and W
    gathered: tuple[int, ...]  # 1 where the last op was an F: zero=3 leaves its ends gathered
    sent: tuple[int, ...]  # within a W, 1 where the gradient of an earlier I is still being sent


class Moments(NamedTuple):
    """The moments of a rank's step at which memory may peak; a moment whose counts are all at most
    another's is left out."""

    between: list[InFlight]  # ops
    forward: list[list[InFlight]]  # within an F of each chunk, its own micro-batch included
    backward: list[list[InFlight]]  # within a B or I
    weights: list[list[InFlight]]  # within a W


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward
    working: float  # temporary
    reserved: float  # the device's context and communication buffers; on CPU `host` as well
    host: float  # host memory of the copy that an asynchronous save writes

    @property
    def other(self) -> float:
        """Bytes that are neither state nor saved for backward."""
        return self.working + self.reserved

    @property
    def besides_state(self) -> float:
        """Bytes that a step allocates."""
        return self.activations + self.working

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other

    def as_dict(self) -> dict[str, int]:
        """Bytes by kind, and their total, as integers."""
        kinds = ("weights", "gradients", "optimizer", "activations", "other")
        sizes = {name: round(getattr(self, name)) for name in kinds}
        return sizes | {"total": sum(sizes.values())}


BytesOf = Callable[[int], RankBytes]  # of a pipeline rank


def memory(work: Workload, device: Device) -> Memory:
    """The estimated bytes of the rank with most."""
    return max(each_stage(work, device), key=lambda m: m.total)


def rank_memory(work: Workload, stages: Sequence[Memory], rank: int) -> Memory:
    """Bytes of one rank, given those of each pipeline rank's first. Where rows do not divide, the
    last data ranks have fewer."""
    coordinates = work.layout.coordinates(rank)
    weights, gradients, optimizer = state_bytes(work, coordinates["pp"], owner_of(work, rank))
    stage = stages[coordinates["pp"]]
    working = stage.working
    if is_sharded(work):  # FSDP2 keeps as many rows of each parameter as the first rank has
        width = work.sizes.master or work.sizes.weight
        shares = [
            rank_elements(work, coordinates["pp"], owner).shard
            for owner in (FIRST, owner_of(work, rank))
        ]
        working += (shares[0] - shares[1]) * width
    return replace(
        stage, weights=weights, gradients=gradients, optimizer=optimizer, working=working
    )


def fits(work: Workload, device: Device) -> bool:
    """Whether every rank, by estimates that may be MARGIN too high, stays within the usable
    memory."""
    if _least(work, device) > device.usable_bytes:
        return False
    most = device.usable_bytes * (1 + MARGIN)
    return all(stage.total <= most for stage in each_stage(work, device))


def smallest(works: Iterable[Workload], device: Device) -> Workload:
    """The workload whose fullest rank has the fewest bytes.

    Tries them by increasing bytes of state, until the state alone exceeds the best total.
    """
    first, *larger = sorted(works, key=lambda work: _least(work, device))
    least = memory(first, device).total
    for work in larger:
        if _least(work, device) >= least:
            break
        if (total := memory(work, device).total) < least:
            first, least = work, total
    return first


def _least(work: Workload, device: Device) -> float:
    """A quick lower bound of a rank's bytes, from the ends and the middle of the pipeline."""
    last = work.layout.pp - 1
    state = max(sum(state_bytes(work, pp_rank)) for pp_rank in {0, last // 2, last})
    return state + device.reserved_bytes


def each_stage(work: Workload, device: Device, bytes_of: BytesOf | None = None) -> Iterator[Memory]:
    """Yields the bytes of the first rank of each pipeline rank, which has most. `bytes_of` a
    pipeline rank gives the bytes besides state; None estimates them."""
    bytes_of = bytes_of or partial(estimated, work, device)
    on_cpu = device.name == "cpu"
    for pp_rank in range(work.layout.pp):
        stages, update, standing = bytes_of(pp_rank)
        saved, peak = _alive(stages, moments(work, pp_rank))
        working = max(peak, update) - saved
        state, host = state_bytes(work, pp_rank), copied_bytes(work, pp_rank) * work.async_save
        reserved = device.reserved_bytes + host * on_cpu
        yield Memory(*state, saved + standing, working, reserved, host)


def _alive(runs: Sequence[StageBytes], most: Moments) -> tuple[float, float]:
    """(bytes alive between ops, peak within an op) of the micro-batches of a rank's stages."""
    stage_bytes = ((run.saved, run.waiting, run.gathered, run.sent) for run in runs)
    sizes = [*chain(*zip(*stage_bytes, strict=True))]

    def level(moments: Sequence[InFlight]) -> float:
        return max((sum(map(mul, chain(*state), sizes)) for state in moments), default=0.0)

    saved = level(most.between)
    within = [
        level(moments) - live + peak
        for run, *kinds in zip(runs, most.forward, most.backward, most.weights, strict=True)
        for moments, (live, peak) in zip(kinds, run.peaks, strict=True)
    ]
    return saved, max(saved, *within)


def state_bytes(work: Workload, pp_rank: int, owner: Owner = FIRST) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state (masters, moments and the weights' average)
    on a pipeline rank.

    zero=1 shards the optimizer state by each parameter's rows over the data ranks (dp * cp, edp for
    experts), and pads gradients to equal shards. zero=3 shards all three; its weights are the
    masters, and its gradients as wide. Routers' biases are replicated and as wide; frozen weights
    are as wide as trained ones. State of replicas' exchanges counts as the optimizer's.
    """
    elements, sizes = rank_elements(work, pp_rank, owner), work.sizes
    exchange = round(exchange_of(work, pp_rank).state_bytes())
    wide = sizes.master or sizes.weight
    untrained = elements.untrained * wide
    beside_masters = elements.moments(sharded=work.zero > 0) * sizes.moment + exchange
    if work.ema:
        beside_masters += (elements.shard if work.zero else elements.total) * wide
    if is_sharded(work):
        weights = (elements.shard + elements.frozen_shard) * wide + untrained
        return weights, elements.shard * wide, beside_masters
    state = elements.shard if work.zero else elements.total
    gradients = elements.padded if work.zero == 1 else elements.total
    return (
        (elements.total + elements.frozen) * sizes.weight + untrained,
        gradients * sizes.gradient,
        state * sizes.master + beside_masters,
    )


def frozen_bytes(work: Workload, pp_rank: int = 0) -> int:
    """Bytes of the frozen weights under adapters, on a pipeline rank; 0 without adapters."""
    return rank_elements(work, pp_rank).frozen * work.sizes.weight * (work.lora.rank > 0)


def copied_bytes(work: Workload, pp_rank: int) -> int:
    """Bytes of the host copy that a pipeline rank's first data rank saves: weights in their compute
    dtype, master weights and moments."""
    weights, _, optimizer = state_bytes(work, pp_rank)
    weights -= frozen_bytes(work, pp_rank)  # which adapters' checkpoints leave out
    again = work.sizes.weight if is_sharded(work) and work.sizes.master else 0  # from masters
    return weights + optimizer + rank_elements(work, pp_rank).shard * again


def in_flight_chunks(work: Workload) -> tuple[int, ...]:
    """Micro-batches in flight, times vpp, on each pipeline rank."""
    per_rank = (moments(work, pp_rank).between for pp_rank in range(work.layout.pp))
    return tuple(
        max(sum(state.activations) + sum(state.waiting) for state in most) for most in per_rank
    )


def moments(work: Workload, pp_rank: int) -> Moments:
    """The moments of a pipeline rank with most bytes, between ops and within one."""
    pp, vpp = work.layout.pp, work.layout.vpp
    if work.schedule_name == "gpipe" and pp > 1:
        everyone = [InFlight((work.num_micro_batches,), (0,), (0,), (0,))]
        return Moments(everyone, [everyone], [everyone], [[]])
    return _moments(work.schedule_name, pp, vpp, _filling(work), pp_rank)


def _filling(work: Workload) -> int:
    """The fewest micro-batches with which the pipeline's memory is that of a whole step.

    Without chunks these are the first pp. With chunks they are two groups of pp, and the remainder,
    which joins the last group.
    """
    pp, m = work.layout.pp, work.num_micro_batches
    if pp == 1 or work.layout.vpp == 1:
        return min(m, pp)
    return m if m < 2 * pp else 2 * pp + m % pp


@cache
def _moments(name: str, pp: int, vpp: int, num_micro_batches: int, pp_rank: int) -> Moments:
    return _of_rank(schedule_of(name, pp, vpp, num_micro_batches).ops[pp_rank], pp, vpp)


def _of_rank(ops: Sequence[Op], pp: int, vpp: int) -> Moments:
    activations, waiting, gathered, sent = counts = tuple([0] * vpp for _ in InFlight._fields)
    forward, backward, weights = within = [[set[InFlight]() for _ in range(vpp)] for _ in "FBW"]
    between: set[InFlight] = set()

    def now() -> InFlight:
        return InFlight(*map(tuple, counts))

    for op in ops:
        chunk = op.stage // pp
        if op.kind == "W":
            weights[chunk].add(now())
            waiting[chunk] -= 1
            continue
        gathered[chunk] = 0  # its own ends are counted in the op's peak
        sent[:] = [0] * vpp
        if op.kind == "F":
            activations[chunk] += 1
            forward[chunk].add(now())
            gathered[chunk] = 1
        else:
            backward[chunk].add(now())
            activations[chunk] -= 1
            waiting[chunk] += op.kind == "I"
        between.add(now())
        sent[chunk] = int(op.kind == "I")
    return Moments(_most(between), *(list(map(_most, states)) for states in within))


def _most(states: Iterable[InFlight]) -> list[InFlight]:
    front: dict[tuple[int, ...], InFlight] = {}
    flat = ((tuple(chain(*state)), state) for state in states)
    # None has a smaller sum than one that it exceeds.
    for counts, state in sorted(flat, key=lambda pair: sum(pair[0]), reverse=True):
        if not any(all(map(ge, other, counts)) for other in front):
            front[counts] = state
    return list(front.values())
