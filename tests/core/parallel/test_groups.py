from itertools import count

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import groups as making
from mtcli.core.parallel.collectives import receive, start_send
from mtcli.core.parallel.groups import make_groups
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.schedule.messages import sent

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


def replicas_groups(runtime, replicas):
    layout = ParallelLayout(2, replicas=replicas)
    groups = make_groups(layout, runtime.rank, runtime.device)
    return [groups.axes[name].group is groups.world.group for name in ("data", "replicas")]


@pytest.mark.parametrize(("replicas", "shared"), [(1, [True, False]), (2, [False, False])])
def test_what_replicas_exchange_holds_up_no_sum_over_all_ranks(replicas, shared):
    """Both may be under way, and a communicator of NCCL runs one after the other."""
    assert run_ranks(2, replicas_groups, replicas) == [shared] * 2


def test_alone_every_axis_is_this_rank_without_a_process_group():
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    assert {axis.size for axis in groups.axes.values()} == {1}
    assert {axis.group for axis in groups.axes.values()} == {None}


@pytest.mark.parametrize(("axes", "name"), [(("tp",), "tp"), (("cp", "dp"), "data")])
def test_a_set_of_axes_names_its_group_in_any_order(axes, name):
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    assert groups.over(axes).name == groups.over(axes[::-1]).name == name


def exchanged(runtime):
    """What comes when both ranks of a pipeline send first, where groups are made as for NCCL."""
    named, dist.get_backend = dist.get_backend, lambda group: "nccl"
    groups = make_groups(ParallelLayout(2, pp=2, vpp=2), runtime.rank, runtime.device)
    dist.get_backend = named
    axis, peer = groups.axes["pp_forward"], 1 - runtime.rank
    sent = start_send(torch.full((3,), float(runtime.rank)), axis, peer, "x")
    got = receive(torch.empty(3), axis, peer, "x").tolist()
    sent.wait()
    own = {axis.p2p_group(0, 1), axis.p2p_group(1, 0), axis.group}
    return got, len(own), groups.axes["ends"].p2p_group(0, 1) is groups.axes["ends"].group


def test_on_nccl_each_direction_of_a_pair_of_pipeline_ranks_has_a_group():
    assert run_ranks(2, exchanged) == [([1.0] * 3, 3, True), ([0.0] * 3, 3, True)]


def p2p_groups_of(pp, vpp, monkeypatch):
    """{(axis, sender, receiver): its group} on NCCL, as every rank makes them."""
    found = {}
    for rank in range(pp):
        made = count()
        monkeypatch.setattr(dist, "new_group", lambda ranks, made=made, **_: (next(made), *ranks))
        for name in making.P2P:
            layout = ParallelLayout(pp, pp=pp, vpp=vpp)
            for ends, group in making._p2p_groups(name, layout, rank, 1.0).items():
                group = name, *group
                assert found.setdefault((name, *ends), group) == group, "the same on both ranks"
                assert [*group[2:]] == sorted(ends) and rank in ends
    return found


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (3, 2), (4, 4)])
def test_on_nccl_every_channel_that_a_schedule_sends_on_has_a_group_of_its_own(
    pp, vpp, monkeypatch
):
    """The arrangement in which `schedule.validate` proves that no schedule stalls."""
    groups = p2p_groups_of(pp, vpp, monkeypatch)
    schedule = schedule_for("interleaved" if vpp > 1 else "1f1b", pp, vpp, 2 * pp)
    assert set(sent(schedule)) == set(groups)
    assert len(set(groups.values())) == len(groups)


def warmed_up(runtime, vpp):
    """The messages that a rank exchanges while groups are made as for NCCL."""
    exchanged, named = [], dist.get_backend
    dist.get_backend = lambda group: "nccl"

    def noting(kind, call):
        def noted(x, peer, group):
            exchanged.append((kind, peer))
            return call(x, peer, group=group)

        return noted

    dist.send, dist.recv = noting("send", dist.send), noting("recv", dist.recv)
    make_groups(ParallelLayout(3, pp=3, vpp=vpp), runtime.rank, runtime.device)
    dist.get_backend = named
    return exchanged


def test_on_nccl_every_sender_is_connected_to_its_receiver_before_a_schedule_runs():
    first, second, third = run_ranks(3, warmed_up, 2)
    assert first == [("send", 1), ("recv", 2), ("send", 2), ("recv", 1)]
    assert second == [("recv", 0), ("send", 2), ("send", 0), ("recv", 2)]
    assert third == [("recv", 1), ("send", 0), ("recv", 0), ("send", 1)]
