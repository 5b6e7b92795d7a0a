import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups

LAYOUT = ParallelLayout(8, tp=2, pp=2)


def groups_of(runtime):
    """{axis: (its ranks, this rank's place, the ranks that a sum over it meets)}."""
    groups = make_groups(LAYOUT, runtime.rank, runtime.device)
    seen = {}
    for name, axis in groups.axes.items():
        met = torch.zeros(runtime.world)
        met[runtime.rank] = 1.0
        if axis.group is not None:
            dist.all_reduce(met, group=axis.group)
        seen[name] = (axis.ranks, axis.rank, tuple(met.nonzero()[:, 0].tolist()))
    return seen, groups.pp_rank, groups.dp_rank


def test_every_group_holds_the_ranks_that_differ_along_its_axes():
    answers = run_ranks(8, groups_of)
    for rank, (seen, pp_rank, dp_rank) in enumerate(answers):
        tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4  # tp innermost, pp outermost
        assert (pp_rank, dp_rank) == (pp, dp)
        expected = {
            "tp": [rank - tp, rank - tp + 1],
            "data": [4 * pp + tp, 4 * pp + 2 + tp],
            "tokens": [4 * pp + i for i in range(4)],
            "pp_forward": [rank % 4, rank % 4 + 4],
            "pp_backward": [rank % 4, rank % 4 + 4],
            "ends": [rank % 4, rank % 4 + 4],
            "world": list(range(8)),
        }
        for name, ranks in expected.items():
            assert seen[name] == (tuple(ranks), ranks.index(rank), tuple(ranks)), (rank, name)


def test_alone_every_axis_is_this_rank_without_a_process_group():
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    assert {axis.size for axis in groups.axes.values()} == {1}
    assert {axis.group for axis in groups.axes.values()} == {None}


@pytest.mark.parametrize(("axes", "name"), [(("tp",), "tp"), (("cp", "dp"), "data")])
def test_a_set_of_axes_names_its_group_in_any_order(axes, name):
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    assert groups.over(axes).name == groups.over(axes[::-1]).name == name
