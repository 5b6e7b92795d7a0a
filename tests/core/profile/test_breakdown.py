"""Where a step's time went, against seconds added up by hand from the drawing in conftest.py."""

import pytest
from handmade import record_of, step_of

from mtcli.core.profile import breakdown
from mtcli.core.schedule.generators import one_f_one_b

SCHEDULE = one_f_one_b(2, 2)


def test_every_second_of_a_step_has_one_name(records):
    first, last = breakdown.spent_by_rank(records, SCHEDULE)
    # Rank 0 waits for B0.1 from 2.5 to 4.75 and for B1.1 from 7 to 7.75; each hop takes 0.25.
    assert first == pytest.approx(
        {
            "forward": 2.0,
            "backward": 4.0,
            "communication": 0.25 + 0.25 + 0.5 + 0.25,  # hops, reduction, agreement
            "bubble": 2.25 + 0.75,
            "optimizer": 0.25 + 1.0,
            "data": 0.5,
            "other": 0.0,
        }
    )
    # Rank 1 waits for F0.0 from 0.5 to 1.5, and at the end from 7.75 until rank 0 is done at 10.
    assert last == pytest.approx(
        {
            "forward": 2.0,
            "backward": 4.0,
            "communication": 0.25 + 0.5 + 0.25,
            "bubble": 1.0 + 2.25,
            "optimizer": 1.25,
            "data": 0.5,
            "other": 0.0,
        }
    )


def test_what_an_op_spends_on_collectives_is_communication():
    waiting = {"F": 0.25, "B": 0.5}
    first, _ = breakdown.spent_by_rank([record_of(0, waiting), record_of(1, waiting)], SCHEDULE)
    assert first["forward"] == pytest.approx(1.5)
    assert first["backward"] == pytest.approx(2.0)
    assert first["communication"] == pytest.approx(1.25 + 0.5 + 2.0)


def test_time_that_nothing_explains_is_called_other(records):
    late = step_of(0)._replace(spans=step_of(0).spans[:1] + step_of(0).spans[2:])
    record = records[0]._replace(steps=[late])
    pipeline = [late, step_of(1)]
    spent = breakdown.attribute(record, pipeline, 0, one_f_one_b(2, 2))
    assert spent["forward"] == pytest.approx(1.0)
    assert sum(spent.values()) == pytest.approx(12.0)


def test_shares_are_of_the_step_and_sum_to_one(records):
    first = breakdown.shares(breakdown.spent_by_rank(records, SCHEDULE)[0])
    assert first["optimizer"] == pytest.approx(1.25 / 12.0)
    assert sum(first.values()) == pytest.approx(1.0)


def test_spans_count_from_the_first_op_of_any_rank(records):
    timeline = breakdown.measured_timeline(records, 0)
    assert timeline.end == pytest.approx(9.5)
    assert timeline.busy_seconds == pytest.approx((6.0, 6.0))
    assert timeline.bubble_fraction == pytest.approx((2 * 9.5 - 12.0) / 12.0)


def test_the_step_shown_is_the_one_of_median_length():
    steps = [[step_of(rank, scale) for scale in (3.0, 1.0, 2.0)] for rank in (0, 1)]
    records = [record_of(rank, steps=steps[rank]) for rank in (0, 1)]
    assert breakdown.middle_step(records) == 2


def test_a_rank_that_works_longer_than_its_replicas_is_named():
    slow = record_of(0, steps=[step_of(0, 1.5)])._replace(rank=2, speaks=False)
    quick = record_of(0)._replace(rank=1, speaks=False)
    rows = breakdown.stragglers([record_of(0), quick, slow])
    assert [row["rank"] for row in rows][0] == 2
    assert rows[0]["times_median"] == pytest.approx(1.5)
    assert rows[0]["busy_seconds"] == pytest.approx(9.0)


def test_a_longer_stage_makes_no_straggler():
    rows = breakdown.stragglers([record_of(0), record_of(1, steps=[step_of(1, 2.0)])])
    assert [row["times_median"] for row in rows] == [1.0, 1.0]


def test_waiting_for_collectives_does_not_make_a_straggler():
    waits = record_of(0, exchanging={"F": 0.5, "B": 0.5})
    assert breakdown.busy_seconds(waits) == pytest.approx(3.0)
