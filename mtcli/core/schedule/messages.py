"""Messages between pipeline ranks: receiver, channel and order of each op's result.

The executor sends and receives these, p2p groups are created for their channels, and `validate`
proves that no rank waits forever. A channel carries the results of one direction from one rank to
another: forward from F, backward from B and I.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mtcli.core.schedule.ops import Op, Schedule, needs

Direction = Literal["pp_forward", "pp_backward"]

SENT_AHEAD = 1  # activations of a forward pass, sent while the next micro-batch is computed


class Channel(NamedTuple):
    """The messages of one direction from one pipeline rank to another."""

    direction: Direction
    sender: int
    receiver: int


class Message(NamedTuple):
    """The result of an op, sent to the rank that reads it."""

    op: Op
    sender: int
    receiver: int

    @property
    def channel(self) -> Channel:
        return Channel(direction(self.op), self.sender, self.receiver)


class P2PCall(NamedTuple):
    """A call of a rank on a message; `wait` waits until a send was received."""

    kind: Literal["send", "receive", "wait"]
    message: Message


def channels(pp: int, vpp: int) -> list[Channel]:
    """Every channel of a pipeline: between neighbours, and with several stages per rank between the
    last and the first rank."""
    ends = [(first, (first + 1) % pp) for first in range(pp if vpp > 1 and pp > 1 else pp - 1)]
    forward = [Channel("pp_forward", *pair) for pair in ends]
    return [*forward, *(Channel("pp_backward", *pair[::-1]) for pair in ends)]


def direction(op: Op) -> Direction:
    """The direction in which an op's result is sent."""
    return "pp_forward" if op.kind == "F" else "pp_backward"


def reader(op: Op) -> Op:
    """The op that reads an op's result: of the next stage, or for a gradient of the previous."""
    return op._replace(stage=op.stage + (1 if op.kind == "F" else -1))


def message_of(op: Op, schedule: Schedule) -> Message | None:
    """The message of an op's result; None where no op reads it, or one of the same rank."""
    stage = reader(op).stage
    if op.kind == "W" or not 0 <= stage < schedule.num_stages:
        return None
    ends = schedule.rank_of_stage[op.stage], schedule.rank_of_stage[stage]
    return None if ends[0] == ends[1] else Message(op, *ends)


def sent(schedule: Schedule) -> dict[Channel, list[Message]]:
    """The messages of each channel, in the order in which they are sent and received."""
    messages: dict[Channel, list[Message]] = defaultdict(list)
    for ops in schedule.ops:
        for op in ops:
            if message := message_of(op, schedule):
                messages[message.channel].append(message)
    return messages


def calls(schedule: Schedule) -> list[list[P2PCall]]:
    """Each rank's p2p calls, in the order in which the executor makes them.

    The result that an op needs is received first, after all earlier messages of its channel; then
    sends that the sender has consumed by then are waited for. Forwards alone wait for all of their
    sends but the last SENT_AHEAD.
    """
    coming = sent(schedule)
    numbers = [{op: number for number, op in enumerate(ops)} for ops in schedule.ops]
    return [list(_calls(rank, schedule, coming, numbers)) for rank in range(schedule.num_ranks)]


def _calls(
    rank: int,
    schedule: Schedule,
    coming: dict[Channel, list[Message]],
    numbers: list[dict[Op, int]],
) -> Iterator[P2PCall]:
    queues = {channel: deque(ms) for channel, ms in coming.items() if channel.receiver == rank}
    trains = any(op.kind != "F" for op in schedule.ops[rank])
    arrived: set[Op] = set()
    sending: list[Message] = []
    for op in schedule.ops[rank]:
        for need in needs(op, schedule.num_stages):
            message = message_of(need, schedule)
            if message is None or message.receiver != rank:
                continue
            while need not in arrived:
                first = queues[message.channel].popleft()
                arrived.add(first.op)
                yield P2PCall("receive", first)
            peer, number = message.sender, numbers[message.sender][need]
            consumed = [m for m in sending if m.receiver == peer]
            consumed = [m for m in consumed if numbers[peer][reader(m.op)] < number]
            sending = [m for m in sending if m not in consumed]
            yield from (P2PCall("wait", m) for m in consumed)
        if message := message_of(op, schedule):
            while not trains and len(sending) > SENT_AHEAD:
                yield P2PCall("wait", sending.pop(0))
            yield P2PCall("send", message)
            sending.append(message)
