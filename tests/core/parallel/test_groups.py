from collections import deque
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
                assert found.setdefault((name, *ends), group) == group, "the same on both ranks"
                assert [*group[1:]] == sorted(ends) and rank in ends
    return found


def messages(schedule):
    """What each rank sends (True) and receives, in the order of its calls: (it sends, message)."""
    ends = {"F": len(schedule.rank_of_stage) - 1, "B": 0, "I": 0}
    ranks = schedule.rank_of_stage

    def receiver(op):
        return ranks[op.stage + (1 if op.kind == "F" else -1)]

    sent = {}
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if op.kind != "W" and op.stage != ends[op.kind]:
                sent.setdefault((op.kind, rank, receiver(op)), []).append(op)
    calls = []
    for rank, ops in enumerate(schedule.ops):
        coming = {key: deque(ops) for key, ops in sent.items() if key[2] == rank}
        calls.append([])
        for op in ops:
            before = op._replace(stage=op.stage - (1 if op.kind == "F" else -1))
            if op.kind != "W" and op.stage != (0 if op.kind == "F" else ends["F"]):
                queue = coming[op.kind, ranks[before.stage], rank]
                while before in queue:  # earlier ones too
                    first = queue.popleft()
                    calls[-1].append((False, (first, ranks[first.stage], rank)))
            if op.kind != "W" and op.stage != ends[op.kind]:
                calls[-1].append((True, (op, rank, receiver(op))))
    return calls


def finishes(calls, group_of):
    """Whether every message arrives, where a group runs its own one after another on each rank, no
    send ends before its receive, and a rank computes nothing more until it has received."""
    done = [[False] * len(own) for own in calls]

    def ready(rank):
        blocked, busy, found = False, set(), {}
        for number, (sends, message) in enumerate(calls[rank]):
            if done[rank][number]:
                continue
            group = group_of(*message)
            if not blocked and group not in busy:
                found[message] = number
            busy.add(group)
            blocked |= not sends
        return found

    while True:
        now = [ready(rank) for rank in range(len(calls))]
        met = [m for found in now for m in found if m in now[m[1]] and m in now[m[2]]]
        if not met:
            return all(map(all, done))
        for message in met:
            for rank in message[1:]:
                done[rank][now[rank][message]] = True


AXIS = {"F": "pp_forward", "B": "pp_backward", "I": "pp_backward"}


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "vpp"),
    [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3),
     ("forward_only", 2)],
)  # fmt: skip
def test_no_schedule_stalls_where_a_send_waits_for_its_receive(monkeypatch, pp, name, vpp):
    groups = p2p_groups_of(pp, vpp, monkeypatch)
    calls = messages(schedule_for(name, pp, vpp, 2 * pp))
    assert finishes(calls, lambda op, sender, receiver: groups[AXIS[op.kind], sender, receiver])


@pytest.mark.parametrize(
    ("pp", "group_of"),
    [
        (2, lambda op, *ends: (op.kind, *sorted(ends))),  # NCCL's own, made at the first message
        (2, lambda op, *ends: op.kind),  # the direction's, once it is connected
        (4, lambda op, *ends: op.kind),
    ],
    ids=["pair", "direction of 2", "direction of 4"],
)
def test_chunks_stall_where_messages_of_several_ways_share_a_group(pp, group_of):
    assert not finishes(messages(schedule_for("interleaved", pp, 2, 2 * pp)), group_of)
