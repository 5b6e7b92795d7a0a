"""Schedules as pure functions: gpipe, 1F1B, interleaved 1F1B, ZB-H1 and forward only.

A rank has the stages r, r + pp, r + 2 pp, ... With pp = 1 each of them is plain gradient
accumulation: F0 B0 F1 B1 ...
"""

from collections.abc import Iterable, Iterator

from mtcli.core.config.errors import wrong
from mtcli.core.schedule.ops import Op, OpKind, Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "forward_only")


def schedule_for(name: str, pp: int, vpp: int, num_micro_batches: int) -> Schedule:
    """The schedule of a config's `parallel.schedule`, `pp` and `vpp`.

    Raises MtcliError for a name that is not in SCHEDULES, and for vpp > 1 where the schedule takes
    one stage per rank.
    """
    if min(pp, vpp, num_micro_batches) < 1:
        sizes = f"pp={pp}, vpp={vpp} and {num_micro_batches} micro-batches"
        raise wrong(f"{sizes} leave nothing to schedule", "each is at least 1")
    if name == "interleaved":
        return interleaved(pp, vpp, num_micro_batches)
    if name == "forward_only":
        return forward_only(pp, num_micro_batches, vpp)
    plain = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
    if name not in plain:
        hint = f"one of {', '.join(SCHEDULES)}"
        raise wrong(f"there is no schedule named {name!r}", hint, "parallel.schedule")
    if vpp > 1:
        hint = "set parallel.schedule to 'interleaved', or parallel.vpp to 1"
        raise wrong(f"schedule={name!r} takes vpp=1 and vpp={vpp}", hint, "parallel.vpp")
    return plain[name](pp, num_micro_batches)


def gpipe(pp: int, num_micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (arXiv:1811.06965).

    The bubble is (pp - 1) / num_micro_batches of the ideal time, as for 1F1B, but every rank holds
    the activations of all micro-batches.
    """
    if pp == 1:
        return _accumulate(1, num_micro_batches)
    batches = range(num_micro_batches)
    ranks = ([*_ops("F", batches, rank), *_ops("B", batches, rank)] for rank in range(pp))
    return _schedule(ranks, pp)


def one_f_one_b(pp: int, num_micro_batches: int) -> Schedule:
    """1F1B, also known as PipeDream-Flush (arXiv:2104.04473, figure 4).

    Rank r holds at most pp - r micro-batches of activations. With equal stages the step lasts
    (num_micro_batches + pp - 1) * (t_F + t_B).
    """
    batches = range(num_micro_batches)
    ranks = (
        _one_by_one(_ops("F", batches, rank), _ops("B", batches, rank), warmup=pp - rank - 1)
        for rank in range(pp)
    )
    return _schedule(ranks, pp)


def interleaved(pp: int, vpp: int, num_micro_batches: int) -> Schedule:
    """Interleaved 1F1B in Megatron's order (arXiv:2104.04473, section 2.2).

    Forwards run in groups of pp micro-batches, each group through the rank's chunks in turn;
    backwards the same with the chunks reversed. With equal stages and pp dividing the micro-batches
    the bubble is (pp - 1) / (vpp * num_micro_batches) of the ideal time. A remainder joins the last
    group, as a group of fewer than pp would leave ranks idle between chunks: the bubble stays (pp -
    1) chunks long. Fewer than pp micro-batches add (vpp - 1) * (pp - num_micro_batches) chunks to
    it.
    """
    if pp == 1:
        return _accumulate(vpp, num_micro_batches)
    order = _chunk_order(pp, vpp, num_micro_batches)
    largest = num_micro_batches if num_micro_batches < 2 * pp else pp + num_micro_batches % pp
    ranks = []
    for rank in range(pp):
        forwards = [Op("F", m, chunk * pp + rank) for m, chunk in order]
        backwards = [Op("B", m, (vpp - 1 - chunk) * pp + rank) for m, chunk in order]
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * largest
        ranks.append(_one_by_one(forwards, backwards, warmup))
    return _schedule(ranks, pp * vpp)


def zero_bubble(pp: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with the backward split, and W in the bubble (arXiv:2401.10241).

    Rank r runs W(m) after I(m + r), so every rank has at most pp micro-batches in flight, as the
    first rank of 1F1B does. With equal stages and t_W at most t_F and t_I the step lasts
    num_micro_batches * (t_F + t_I + t_W) + (pp - 1) * (t_F + t_I - t_W).
    """
    if pp == 1:
        return _accumulate(1, num_micro_batches)
    batches = range(num_micro_batches)
    ranks = []
    for rank in range(pp):
        order = _one_by_one(_ops("F", batches, rank), _ops("I", batches, rank), pp - rank - 1)
        ranks.append([*_with_weight_gradients(order, lag=rank)])
    return _schedule(ranks, pp)


def forward_only(pp: int, num_micro_batches: int, vpp: int = 1) -> Schedule:
    """Forwards alone, for evaluation, in the order of `interleaved`."""
    order = _chunk_order(pp, vpp, num_micro_batches)
    ranks = ([Op("F", m, chunk * pp + rank) for m, chunk in order] for rank in range(pp))
    return _schedule(ranks, pp * vpp)


def _schedule(ranks: Iterable[Iterable[Op]], num_stages: int) -> Schedule:
    ops = tuple(tuple(rank) for rank in ranks)
    return Schedule(ops, tuple(stage % len(ops) for stage in range(num_stages)))


def _accumulate(num_stages: int, num_micro_batches: int) -> Schedule:
    ops = []
    for m in range(num_micro_batches):
        ops += [Op("F", m, stage) for stage in range(num_stages)]
        ops += [Op("B", m, stage) for stage in reversed(range(num_stages))]
    return _schedule([ops], num_stages)


def _ops(kind: OpKind, micro_batches: range, stage: int) -> list[Op]:
    return [Op(kind, m, stage) for m in micro_batches]


def _one_by_one(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _with_weight_gradients(order: list[Op], lag: int) -> Iterator[Op]:
    """The order with W(m) inserted after I(m + lag), and the last ones at the end."""
    waiting: list[Op] = []
    for op in order:
        yield op
        if op.kind == "I":
            waiting.append(Op("W", op.micro_batch, op.stage))
        if op.kind == "I" and len(waiting) > lag:
            yield waiting.pop(0)
    yield from waiting


def _chunk_order(pp: int, vpp: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of forwards, in groups of at least pp micro-batches."""
    groups = max(1, num_micro_batches // pp)
    starts = [group * pp for group in range(groups)]
    ends = [*starts[1:], num_micro_batches]
    return [
        (m, chunk)
        for start, end in zip(starts, ends, strict=True)
        for chunk in range(vpp)
        for m in range(start, end)
    ]
