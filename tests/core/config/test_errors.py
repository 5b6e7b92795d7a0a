"""The one error: its text as the user reads it, and its exit code."""

import pickle

import pytest

from mtcli.core.config.errors import Exit, MtcliError, Problem, failed, wrong


def test_a_problem_reads_error_blank_line_hint():
    assert str(Problem("tp=3 does not divide num_kv_heads=8", "1, 2, 4 or 8", "parallel.tp")) == (
        "error: parallel.tp: tp=3 does not divide num_kv_heads=8\n\nhint: 1, 2, 4 or 8"
    )
    assert str(Problem("it broke")) == "error: it broke"


def test_several_problems_are_one_error_with_a_blank_line_between():
    assert str(MtcliError(Problem("a", "b"), Problem("c"))) == "error: a\n\nhint: b\n\nerror: c"


def test_a_hint_for_all_of_them_closes_the_error():
    error = MtcliError(Problem("a", "b"), Problem("c"), hint="d")
    assert str(error) == "error: a\n\nhint: b\n\nerror: c\n\nhint: d"
    assert error.problems == (Problem("a", "b"), Problem("c"))


def test_a_hint_that_problems_in_a_row_share_is_said_once():
    error = MtcliError(Problem("a", "b"), Problem("c", "b"), Problem("d", "e"), Problem("f", "b"))
    said = "error: a\n\nerror: c\n\nhint: b\n\nerror: d\n\nhint: e\n\nerror: f\n\nhint: b"
    assert str(error) == said
    assert [problem.hint for problem in error.problems] == ["b", "b", "e", "b"]


def test_another_process_reads_the_same_error():
    error = MtcliError(Problem("a", "b"), Problem("c", "b"), code=Exit.FAILED, hint="d")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, again.code) == (str(error), error.problems, Exit.FAILED)
    assert str(again) == "error: a\n\nerror: c\n\nhint: b\n\nhint: d"


def test_wrong_input_exits_2_and_failed_work_1():
    assert wrong("a").code == Exit.WRONG_INPUT == 2
    assert failed("a").code == Exit.FAILED == 1
    assert (Exit.DONE, Exit.INTERRUPTED) == (0, 130)


def test_an_error_without_a_problem_is_our_own_mistake():
    with pytest.raises(AssertionError, match="at least one problem"):
        MtcliError()
