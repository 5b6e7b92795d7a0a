"""A tree of groups: values meet at rank 0 in rank order and come back, through few connections."""

import pytest
from ranks import run_ranks

from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.tree import ALONE, make_tree


def up_and_down(runtime, fan_out):
    axis = world_axis(runtime.rank, runtime.world, runtime.recorder)._replace(name="saving")
    tree = make_tree(axis, fan_out)
    merged = [tree.merge([runtime.rank], lambda parts: sum(parts, [])) for _ in range(2)]
    told = tree.tell({"first": runtime.rank, "text": "x" * 5000})
    return merged, told, [(level.axis.name, level.axis.ranks) for level in tree.levels]


@pytest.mark.parametrize("fan_out", [2, 3, 8])
def test_values_are_merged_in_rank_order_and_rank_0_tells_all(fan_out):
    answers = run_ranks(5, up_and_down, fan_out)
    assert answers[0][0] == [[0, 1, 2, 3, 4]] * 2
    assert [merged for merged, *_ in answers[1:]] == [[None, None]] * 4
    assert [told for _, told, _ in answers] == [{"first": 0, "text": "x" * 5000}] * 5
    assert all(len(ranks) <= fan_out for *_, levels in answers for _, ranks in levels)


def test_the_first_rank_of_a_group_is_of_the_next_level_too():
    levels = [levels for *_, levels in run_ranks(5, up_and_down, 2)]
    assert levels[0] == [("saving", (0, 1)), ("saving.2", (0, 2)), ("saving.4", (0, 4))]
    assert levels[1:3] == [[("saving", (0, 1))], [("saving", (2, 3)), ("saving.2", (0, 2))]]
    assert levels[3:] == [[("saving", (2, 3))], [("saving.4", (0, 4))]]


def test_one_rank_merges_and_is_told_its_own():
    assert ALONE.merge([3], lambda parts: 1 / 0) == [3] and ALONE.tell("x") == "x"
