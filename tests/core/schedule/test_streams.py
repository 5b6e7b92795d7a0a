"""The model of NCCL's streams: green for what is executed, red where channels share one."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mtcli.core.parallel import pipeline
from mtcli.core.schedule.generators import SCHEDULES, forward_only, interleaved, schedule_for
from mtcli.core.schedule.messages import calls, channels, sent
from mtcli.core.schedule.validate import stalls

# Communicators that stall: what torch makes without groups of our own.
SHARED = {
    "a pair's, one per direction": lambda m: (m.channel.direction, *sorted(m[1:])),
    "a pair's": lambda m: tuple(sorted(m[1:])),
    "a direction's": lambda m: m.channel.direction,
}
WHOLE = {"the executor's": lambda m: m.channel, **SHARED}


def schedules(most=8):
    """A strategy of (name, pp, vpp, micro-batches) that a config may ask for."""
    sizes = st.tuples(st.integers(1, most), st.integers(1, 4), st.integers(1, 3 * most))
    return st.tuples(st.sampled_from(SCHEDULES), sizes).map(
        lambda drawn: (drawn[0], drawn[1][0], drawn[1][1] if takes_chunks(drawn[0]) else 1,
                       drawn[1][2])
    )  # fmt: skip


def takes_chunks(name):
    return name in ("interleaved", "forward_only")


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_no_schedule_stalls_where_a_send_waits_for_its_receive(drawn):
    assert stalls(schedule_for(*drawn)) == []


@pytest.mark.parametrize("communicator", ["a pair's, one per direction", "a pair's"])
@pytest.mark.parametrize(("vpp", "micro_batches"), [(2, 2), (2, 4), (4, 8)])
def test_chunks_on_two_ranks_stall_where_the_way_back_shares_a_communicator(
    vpp, micro_batches, communicator
):
    for schedule in (interleaved(2, vpp, micro_batches), forward_only(2, micro_batches, vpp)):
        assert stalls(schedule, SHARED[communicator])[:2] == [
            "rank 0 waits forever to receive F0.1",
            "rank 1 waits forever to receive F1.0",
        ]


@settings(max_examples=100, deadline=None)
@given(schedules(most=4), st.sampled_from(list(WHOLE)))
def test_the_model_stalls_exactly_where_trying_every_message_again_and_again_does(drawn, name):
    schedule = schedule_for(*drawn)
    assert (stalls(schedule, WHOLE[name]) == []) is finishes(calls(schedule), WHOLE[name])


def finishes(calls, communicator):
    """Whether every message arrives, where a communicator runs its own one after another on each
    rank, no send ends before its receive, and a rank calls nothing more until it has received."""
    done = [[False] * len(own) for own in calls]
    received = set()

    def ready(rank):
        blocked, busy, found = False, set(), {}
        for number, (kind, message) in enumerate(calls[rank]):
            if kind == "wait":
                blocked |= message not in received
                done[rank][number] |= not blocked
                continue
            if done[rank][number]:
                continue
            group = communicator(message)
            if not blocked and group not in busy:
                found[message] = number
            busy.add(group)
            blocked |= kind == "receive"
        return found

    while True:
        now = [ready(rank) for rank in range(len(calls))]
        met = [m for found in now for m in found if m in now[m[1]] and m in now[m[2]]]
        if not met:
            return all(map(all, done))
        for message in met:
            received.add(message)
            for rank in message[1:]:
                done[rank][now[rank][message]] = True


class Doubles(nn.Module):
    """A stage that doubles."""

    build = SimpleNamespace(weight_passes=SimpleNamespace(collecting=lambda: _Nothing()))

    def forward(self, x, inputs):
        return 2.0 * (inputs if x is None else x)

    def loss(self, x, inputs, scale):
        return x.detach().sum(), x.sum() * scale


class _Nothing:
    """No weight gradients to collect."""

    def __enter__(self):
        return []

    def __exit__(self, *error):
        pass


def made_by_the_executor(schedule, rank, monkeypatch):
    """(kind, message's op) of each call that a rank's executor makes, with peers that answer."""
    made = []

    class Sending:
        def __init__(self, what):
            self.what = what

        def wait(self):
            made.append(("wait", self.what))

        def is_completed(self):
            return False

    def start_send(x, axis, peer, what):
        made.append(("send", what))
        return Sending(what)

    def receive(x, axis, peer, what):
        made.append(("receive", what))
        return x.fill_(1.0)

    monkeypatch.setattr(pipeline, "start_send", start_send)
    monkeypatch.setattr(pipeline, "receive", receive)
    axes = {"pp_forward": None, "pp_backward": None}
    groups = SimpleNamespace(axes=axes, pp_rank=rank, device="cpu", tp=SimpleNamespace(size=1))
    stages = {s: Doubles() for s, at in enumerate(schedule.rank_of_stage) if at == rank}
    format = pipeline.ActivationFormat(torch.float32, 2, token_shards=1, same_on_tp=False)
    pipe = pipeline.Pipeline(stages, schedule, groups, format)

    def load(micro_batch):
        return torch.ones(3, 2, requires_grad=True)

    if {op.kind for op in schedule.ops[rank]} == {"F"}:
        pipe.forward(load, 3, lambda y, inputs: None)
    else:
        pipe.train_step(load, 3, 1.0, lambda stage: None)
    while made and made[-1][0] == "wait":  # at the end all are waited for
        made.pop()
    return made


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "micro_batches"),
    [("gpipe", 3, 1, 4), ("1f1b", 4, 1, 6), ("zero_bubble", 3, 1, 5), ("interleaved", 2, 2, 4),
     ("interleaved", 3, 2, 7), ("forward_only", 2, 3, 5), ("forward_only", 4, 1, 7)],
)  # fmt: skip
def test_the_model_runs_the_calls_that_the_executor_makes(
    name, pp, vpp, micro_batches, monkeypatch
):
    schedule = schedule_for(name, pp, vpp, micro_batches)
    for rank, modelled in enumerate(calls(schedule)):
        expected = [(kind, str(message.op)) for kind, message in modelled]
        while expected and expected[-1][0] == "wait":
            expected.pop()
        assert made_by_the_executor(schedule, rank, monkeypatch) == expected


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9))
def test_the_channels_of_a_layout_are_those_that_its_schedules_send_on(pp, vpp, micro_batches):
    used = set(sent(interleaved(pp, vpp, micro_batches)))
    assert len(channels(pp, vpp)) == len(set(channels(pp, vpp)))
    assert used == set(channels(pp, vpp))
