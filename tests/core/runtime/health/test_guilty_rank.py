"""Ranks 0..3 of tp = 2; number 12 on tp is where somebody waits."""

import pytest

from mtcli.core.runtime.health.watchdog import BlockedCall, RankStatus, error_of, ranks_in_words


def on_tp(number=12, ranks=(2, 3), op="all_reduce"):
    return BlockedCall(op, "tp", ranks, number, 10.2)


def receiving(sender, receiver, number=3):
    return BlockedCall("recv", f"pp_forward {sender}>{receiver}", (receiver, sender), number, 10.0)


def waiting(rank, wait, counts=None):
    counts = {wait.channel: wait.number} if counts is None else counts
    return RankStatus(rank, 7, f"tp.py:6{rank} in forward", counts, wait)


def computing(rank, counts):
    return RankStatus(rank, 7, "loader.py:50 in step", counts)


def told(stall, *others, world=4):
    error = error_of(stall, {one.rank: one for one in others}, world, 10.0)
    assert error.code == 1
    (problem,) = error.problems
    return problem


def test_a_rank_that_is_busy_elsewhere_is_named_with_its_location_and_last_number():
    problem = told(waiting(2, on_tp()), computing(3, {"tp": 11}), world=4)
    assert problem.message == (
        "all_reduce number 12 on tp (ranks 2, 3) has waited for 10 s on rank 2, "
        "at tp.py:62 in forward (step 7): rank 3 is absent: it is at loader.py:50 in step, and its "
        "last collective on tp was number 11"
    )
    assert problem.hint == "raise train.timeout (10 s) if the rank was only slow"


def test_a_rank_without_an_answer_is_named_as_stopped_or_dead():
    message = told(waiting(2, on_tp()), computing(0, {})).message
    assert message.endswith(
        "rank 3 is absent: it does not answer (stopped, dead, or its machine lost)"
    )
    assert "rank 0" not in message and "rank 1" not in message, "nobody waits for them"


def test_the_ranks_between_are_followed_to_the_one_that_waits_for_nobody():
    world = (0, 1, 2, 3)
    problem = told(
        waiting(2, on_tp()),
        waiting(3, receiving(1, 3), {"tp": 11, "pp_forward 1>3": 3}),
        waiting(
            1, BlockedCall("all_reduce", "world", world, 5, 9.0), {"pp_forward 1>3": 2, "world": 5}
        ),
        computing(0, {"world": 4}),
    )
    assert problem.message == (
        "all_reduce number 5 on world (ranks 0, 1, 2, 3) has waited for 9 s on rank 1, "
        "at tp.py:61 in forward (step 7): rank 0 is absent: it is at loader.py:50 in step, and its "
        "last collective on world was number 4"
    )


def test_a_rank_that_has_come_is_not_waited_for():
    stall = waiting(2, on_tp(ranks=(1, 2, 3)))
    message = told(stall, computing(1, {"tp": 12}), computing(3, {"tp": 11})).message
    assert "rank 3 is absent" in message and "rank 1" not in message


def test_a_message_names_its_two_ends():
    problem = told(waiting(1, receiving(0, 1)), computing(0, {"pp_forward 0>1": 2}), world=2)
    assert problem.message == (
        "recv number 3 on pp_forward (rank 0 to rank 1) has waited for 10 s on rank 1, "
        "at tp.py:61 in forward (step 7): rank 0 is absent: it is at loader.py:50 in step, and its "
        "last collective on pp_forward was number 2"
    )


def test_ranks_that_wait_for_each_other_are_all_told():
    stall = waiting(0, on_tp(ranks=(0, 1)))
    problem = told(stall, waiting(1, on_tp(13, (0, 1)), {"tp": 13}), world=2)
    assert problem.message == (
        "all_reduce number 12 on tp (ranks 0, 1) has waited for 10 s on rank 0, "
        "at tp.py:60 in forward (step 7): no rank is absent, they wait for each other: "
        "rank 0 is in all_reduce number 12 on tp (ranks 0, 1), at tp.py:60 in forward; "
        "rank 1 is in all_reduce number 13 on tp (ranks 0, 1), at tp.py:61 in forward"
    )
    assert problem.hint == "train.debug_collectives = true names the first call that differs"


def test_a_rank_that_has_come_and_gone_on_is_told_with_its_location():
    stall = waiting(0, on_tp(ranks=(0, 1)))
    message = told(stall, computing(1, {"tp": 12}), world=2).message
    assert message.endswith("; rank 1 is in no collective, at loader.py:50 in step")


def test_where_nobody_who_is_waited_for_is_absent_the_silent_are():
    stall = waiting(0, on_tp(ranks=(0, 1)))
    message = told(stall, computing(1, {"tp": 12}), world=3).message
    assert message.endswith(
        "rank 2 is absent: it does not answer (stopped, dead, or its machine lost)"
    )


def test_of_many_absent_ranks_the_first_are_told_and_the_others_counted():
    stall = waiting(0, on_tp(ranks=tuple(range(12))))
    message = told(stall, world=12).message
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more)" in message
    assert message.count("is absent") == 4 and message.endswith("; and 7 more ranks")
    assert ranks_in_words((1, 2)) == "ranks 1, 2"


GLOO = "[/__w/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:45788. This is typical"


def test_a_collective_that_broke_is_told_with_the_ranks_that_are_gone():
    stall = waiting(2, on_tp())._replace(broke=GLOO)
    problem = told(stall, computing(0, {}), waiting(3, on_tp())._replace(broke=GLOO))
    assert problem.message == (
        "all_reduce number 12 on tp (ranks 2, 3) broke on rank 2, at tp.py:62 in forward (step 7): "
        "Connection closed by peer [127.0.0.1]:45788; "
        "rank 1 is absent: it does not answer (stopped, dead, or its machine lost)"
    )
    assert problem.hint == ""
    alone = told(
        stall._replace(broke="ncclError\nof many lines"), *(computing(n, {}) for n in (0, 1, 3))
    )
    assert alone.message.endswith("(step 7): ncclError"), "all answer: none of them is the cause"


@pytest.mark.parametrize(
    "answer",
    [computing(3, {"tp": 11}), waiting(2, on_tp()), waiting(2, on_tp())._replace(broke=GLOO)],
)
def test_an_answer_survives_the_store(answer):
    assert RankStatus.load(answer.dump()) == answer
    assert RankStatus.load(answer.dump().encode()) == answer
