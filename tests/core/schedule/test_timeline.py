"""The simulator equals the papers' closed forms and an event-driven oracle."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcli.core.schedule.generators import (
    SCHEDULES,
    gpipe,
    interleaved,
    one_f_one_b,
    schedule_for,
    zero_bubble,
)
from mtcli.core.schedule.ops import Op, Schedule
from mtcli.core.schedule.timeline import Span, Timeline, draw, simulate

F, B = 1.0, 2.0


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_flushing_schedules_have_the_published_bubble(make):
    for pp, micro_batches in itertools.product((1, 2, 4, 8), (1, 4, 16)):
        timeline = simulate(make(pp, micro_batches), {"F": F, "B": B})
        assert timeline.end == pytest.approx((F + B) * (micro_batches + pp - 1), rel=1e-9)
        assert timeline.bubble_fraction == pytest.approx((pp - 1) / micro_batches, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 30))
def test_interleaving_divides_the_bubble_by_the_chunks(pp, vpp, micro_batches):
    """arXiv:2104.04473, section 2.2.2: (p - 1) / (v m), here for any number of micro-batches."""
    timeline = simulate(interleaved(pp, vpp, micro_batches), {"F": F, "B": B})
    short = (vpp - 1) * max(0, pp - micro_batches)  # fewer micro-batches than ranks
    ideal = vpp * micro_batches * (F + B)
    assert timeline.end == pytest.approx(ideal + (pp - 1 + short) * (F + B), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 30))
def test_interleaving_keeps_its_bubble_for_any_number_of_micro_batches(pp, vpp, micro_batches):
    timeline = simulate(interleaved(pp, vpp, micro_batches), {"F": F, "B": B})
    short = (vpp - 1) * max(0, pp - micro_batches)  # fewer micro-batches than ranks
    ideal = vpp * micro_batches * (F + B)
    assert timeline.end == pytest.approx(ideal + (pp - 1 + short) * (F + B), rel=1e-9)


@pytest.mark.parametrize("lengths", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.7)])
def test_zero_bubble_fills_the_bubble_with_weight_gradients(lengths):
    """arXiv:2401.10241, table 1: the bubble is (p - 1)(t_F + t_I - t_W)."""
    forward, inputs, weights = lengths
    seconds = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    for pp, rounds in itertools.product((1, 2, 3, 6), (1, 2, 5)):
        timeline = simulate(zero_bubble(pp, rounds * pp), seconds)
        ideal = rounds * pp * (forward + inputs + weights)
        bubble = (pp - 1) * (forward + inputs - weights)
        assert timeline.end == pytest.approx(ideal + bubble, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.floats(0.0, 2.0),
    st.randoms(use_true_random=False),
)
def test_the_simulator_equals_an_event_driven_oracle(name, pp, vpp, micro_batches, hop, random):
    vpp = vpp if name in ("interleaved", "forward_only") else 1
    schedule = schedule_for(name, pp, vpp, micro_batches)
    lengths = {op: random.uniform(0.1, 3.0) for ops in schedule.ops for op in ops}
    timeline = simulate(schedule, lengths.__getitem__, hop)
    expected = _events(schedule, lengths, hop)
    assert {span.op: span.end for span in timeline.spans} == pytest.approx(expected, rel=1e-9)


def _events(schedule: Schedule, lengths: dict[Op, float], hop: float) -> dict[Op, float]:
    """Ends of ops from a queue of messages in time order; the needs are restated here."""
    last, rank_of = schedule.num_stages - 1, schedule.rank_of_stage
    inbox = [set() for _ in schedule.ops]
    position, free, ended, events = [0] * len(schedule.ops), [0.0] * len(schedule.ops), {}, []

    def advance(rank, now):
        while position[rank] < len(schedule.ops[rank]) and free[rank] <= now:
            kind, m, s = schedule.ops[rank][position[rank]]
            wanted = {
                "F": {("F", m, s - 1)} if s else set(),
                "W": {("I", m, s)},
            }.get(kind, {("F", m, s)} | ({(kind, m, s + 1)} if s < last else set()))
            if not wanted <= inbox[rank]:
                return
            end = now + lengths[Op(kind, m, s)]
            ended[Op(kind, m, s)] = free[rank] = end
            position[rank] += 1
            heapq.heappush(events, (end, rank, (kind, m, s)))
            neighbour = s + 1 if kind == "F" else s - 1
            if kind != "W" and 0 <= neighbour <= last and rank_of[neighbour] != rank:
                heapq.heappush(events, (end + hop, rank_of[neighbour], (kind, m, s)))

    for rank in range(len(schedule.ops)):
        advance(rank, 0.0)
    while events:
        now, rank, message = heapq.heappop(events)
        inbox[rank].add(message)
        advance(rank, now)
    return ended


def test_a_hop_delays_the_other_rank_and_keeps_nobody_busy():
    timeline = simulate(one_f_one_b(2, 1), {"F": F, "B": B}, p2p_seconds=0.25)
    assert [(str(s.op), s.start) for s in timeline.spans if s.rank == 1] == [
        ("F0.1", 1.25),
        ("B0.1", 2.25),
    ]
    assert timeline.end == F + 0.25 + F + B + 0.25 + B
    assert timeline.busy_seconds == (3.0, 3.0)


def test_a_drawing_shows_each_op_where_it_runs_and_fits_its_width():
    text = draw(simulate(one_f_one_b(2, 2), {"F": 1.0, "B": 1.0}), width=6 * 4 + 7)
    rows = text.splitlines()
    assert rows[0] == "rank 0 " + "00001111....aaaa....bbbb"[:24]
    assert rows[1] == "rank 1 " + "....0000aaaa1111bbbb...."[:24]
    deep = draw(simulate(one_f_one_b(64, 8), {"F": 1.0, "B": 2.0}))
    assert max(map(len, deep.splitlines())) <= 100
    assert len(deep.splitlines()) == 32 + 2


def test_weight_halves_are_drawn_apart():
    spans = (Span(0, Op("I", 3, 0), 0.0, 1.0), Span(0, Op("W", 3, 0), 1.0, 2.0))
    assert draw(Timeline(spans, 1), width=11).splitlines()[0] == "rank 0 ddww"
