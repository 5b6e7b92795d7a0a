"""Every schedule is complete, cannot deadlock, and keeps in flight what its paper says."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcli.core.config.errors import MtcliError
from mtcli.core.schedule.generators import (
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_for,
    zero_bubble,
)
from mtcli.core.schedule.ops import Op, Schedule, needs
from mtcli.core.schedule.validate import problems


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 4), st.integers(1, 26))
def test_every_schedule_of_any_size_is_complete_and_never_deadlocks(name, pp, vpp, micro_batches):
    vpp = vpp if name in ("interleaved", "forward_only") else 1
    schedule = schedule_for(name, pp, vpp, micro_batches)
    assert problems(schedule) == []
    assert schedule.num_micro_batches == micro_batches
    assert schedule.num_stages == pp * vpp
    assert schedule.num_ranks == pp


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward_only"])
def test_one_rank_accumulates_gradients(name):
    schedule = schedule_for(name, 1, 1, 3)
    assert " ".join(map(str, schedule.ops[0])) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"


def test_one_rank_with_chunks_runs_a_micro_batch_through_all_of_them_and_back():
    ops = interleaved(1, 2, 2).ops[0]
    assert " ".join(map(str, ops)) == "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"


def test_one_f_one_b_is_the_published_figure():
    """arXiv:2104.04473, figure 4 (bottom): 4 devices, 8 micro-batches counted from 1."""
    figure = [
        "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 B7 B8",
        "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 B8",
        "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8",
    ]
    got = [
        " ".join(f"{op.kind}{op.micro_batch + 1}" for op in ops) for ops in one_f_one_b(4, 8).ops
    ]
    assert got == figure


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaved_has_the_unit_order_of_the_paper(pp, vpp, micro_batches):
    """algorithms.md 2: forward k is chunk (k mod pv) / p, micro-batch (k div pv) p + k mod p."""
    for rank, ops in enumerate(interleaved(pp, vpp, micro_batches).ops):
        forwards = [op for op in ops if op.kind == "F"]
        backwards = [op for op in ops if op.kind == "B"]
        for k, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
            chunk, group = (k % (pp * vpp)) // pp, k // (pp * vpp)
            micro_batch = group * pp + k % pp
            assert forward == ("F", micro_batch, chunk * pp + rank)
            assert backward == ("B", micro_batch, (vpp - 1 - chunk) * pp + rank)
        first_backward = next(i for i, op in enumerate(ops) if op.kind == "B")
        assert first_backward == min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, len(forwards))


def test_schedules_hold_the_activations_their_papers_say():
    for pp, m in itertools.product((2, 3, 4, 8), (1, 4, 16)):
        assert in_flight(gpipe(pp, m)) == (m,) * pp
        assert in_flight(one_f_one_b(pp, m)) == tuple(min(m, pp - rank) for rank in range(pp))
        assert max(in_flight(zero_bubble(pp, m))) == min(m, pp)
        assert in_flight(forward_only(pp, m)) == (m,) * pp


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaving_costs_the_published_factor_of_memory(pp, vpp):
    """arXiv:2205.05198, appendix: the first rank's 1F1B peak, times 1 + (p - 1) / (p v)."""
    chunks = in_flight(interleaved(pp, vpp, 4 * pp))[0]
    assert chunks == pytest.approx(pp * vpp * (1 + (pp - 1) / (pp * vpp)), abs=1e-9)


def test_needs_are_the_stage_before_the_stage_after_and_the_ops_own_forward():
    assert needs(Op("F", 2, 0), 3) == ()
    assert needs(Op("F", 2, 1), 3) == (Op("F", 2, 0),)
    assert needs(Op("B", 2, 2), 3) == (Op("F", 2, 2),)
    assert set(needs(Op("B", 2, 1), 3)) == {Op("F", 2, 1), Op("B", 2, 2)}
    assert set(needs(Op("I", 2, 1), 3)) == {Op("F", 2, 1), Op("I", 2, 2)}
    assert needs(Op("W", 2, 1), 3) == (Op("I", 2, 1),)


def test_the_checker_names_a_deadlock():
    good = one_f_one_b(2, 2)
    swapped = (good.ops[1][1], good.ops[1][0], *good.ops[1][2:])
    found = problems(Schedule((good.ops[0], swapped), good.rank_of_stage))
    assert "rank 1 waits at B0.1 for F0.1 forever" in found
    assert "rank 0 waits at B0.0 for B0.1 forever" in found


def test_the_checker_names_missing_repeated_misplaced_and_half_ops():
    good = gpipe(2, 1)
    first, second = good.ops
    ranks = good.rank_of_stage
    assert problems(Schedule((first[:1], second), ranks)) == ["B0.0 runs 0 times"]
    assert problems(Schedule((first, (*second, second[0])), ranks)) == ["F0.1 runs 2 times"]
    assert "F0.1 is on rank 0 and its stage on rank 1" in problems(
        Schedule(((*first, second[0]), second[1:]), ranks)
    )
    stray = (*first, Op("B", 7, 0))
    assert problems(Schedule((stray, second), ranks)) == ["B7.0 is of no micro-batch"]
    halves = ((Op("F", 0, 0), Op("I", 0, 0)),)
    assert problems(Schedule(halves, (0,))) == [
        "ops of kinds F, I are not a whole forward and backward"
    ]


def test_wrong_names_and_sizes_are_refused_with_the_numbers():
    with pytest.raises(MtcliError, match="no schedule named '2f2b'"):
        schedule_for("2f2b", 2, 1, 4)
    with pytest.raises(MtcliError, match="schedule='1f1b' takes vpp=1 and vpp=2"):
        schedule_for("1f1b", 2, 2, 4)
    with pytest.raises(MtcliError, match="pp=2, vpp=1 and 0 micro-batches leave nothing"):
        schedule_for("gpipe", 2, 1, 0)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (micro-batch, stage) activations it holds at once.

    F takes one; B, or the W of a split backward, frees it.
    """
    peaks = []
    for ops in schedule.ops:
        held = peak = 0
        for op in ops:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
