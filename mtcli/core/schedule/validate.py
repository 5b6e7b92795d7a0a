"""Proves that a schedule runs: every op once, and without a deadlock, on gloo and on NCCL.

NCCL is stricter. A send ends when it is received. All sends and receives of a rank on one
communicator are one stream, in the order of the calls. A receive, or a wait for a send, blocks all
later calls of the rank.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from operator import attrgetter

from mtcli.core.schedule.messages import Message, calls
from mtcli.core.schedule.ops import Op, Schedule, needs

Communicator = Callable[[Message], Hashable]


def problems(schedule: Schedule) -> list[str]:
    """The reasons why ranks that run their ops in order would not end; empty for a valid
    schedule."""
    faults = [*_misplaced(schedule), *_miscounted(schedule)]
    return faults or _stuck(schedule) or stalls(schedule)


def stalls(schedule: Schedule, communicator: Communicator = attrgetter("channel")) -> list[str]:
    """The ranks that wait forever on NCCL, where each message uses the communicator
    `communicator(message)`.

    The executor has one communicator per channel. Linear in the number of ops.
    """
    model = _Streams(schedule, communicator)
    for rank in range(schedule.num_ranks):
        model.advance(rank)
    return [
        f"rank {rank} waits forever to {calls[done].kind} {calls[done].message.op}"
        if done < len(calls)
        else f"rank {rank} ends before {next(iter(left)).op} is received"
        for rank, (calls, done) in enumerate(zip(model.calls, model.made, strict=True))
        if (left := model.left(rank)) or done < len(calls)
    ]


class _Streams:
    """The pending calls of all ranks, by communicator."""

    def __init__(self, schedule: Schedule, communicator: Communicator) -> None:
        self.calls, self.communicator = calls(schedule), communicator
        self.made = [0] * schedule.num_ranks  # calls of each rank that hold up nothing
        self.queues: dict[tuple[int, Hashable], deque[Message]] = defaultdict(deque)
        self.called: set[tuple[int, Message]] = set()
        self.done: set[Message] = set()

    def left(self, rank: int) -> list[Message]:
        """A rank's messages that are called and not complete."""
        return [m for (caller, _), queue in self.queues.items() for m in queue if caller == rank]

    def advance(self, rank: int) -> None:
        """Makes a rank's calls up to one that blocks, and those of ranks that are thereby
        unblocked."""
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            calls = self.calls[rank]
            while self.made[rank] < len(calls):
                kind, message = calls[self.made[rank]]
                if kind != "wait" and (rank, message) not in self.called:
                    self.called.add((rank, message))
                    self.queues[rank, self.communicator(message)].append(message)
                    ranks += self._run(message)
                if kind != "send" and message not in self.done:
                    break
                self.made[rank] += 1

    def _run(self, message: Message) -> list[int]:
        """Completes a message, and those queued after it, if it is first in both ranks' streams;
        returns the unblocked ranks."""
        met: list[int] = []
        todo = [message]
        while todo:
            message = todo.pop()
            ends = [(end, self.communicator(message)) for end in message[1:]]
            if not all(self.queues[end] and self.queues[end][0] == message for end in ends):
                continue
            self.done.add(message)
            met += message[1:]
            for end in ends:
                self.queues[end].popleft()
                todo += [self.queues[end][0]] if self.queues[end] else []
        return met


def _misplaced(schedule: Schedule) -> list[str]:
    return [
        f"{op} is on rank {rank} and its stage on rank {schedule.rank_of_stage[op.stage]}"
        for rank, ops in enumerate(schedule.ops)
        for op in ops
        if schedule.rank_of_stage[op.stage] != rank
    ]


def _miscounted(schedule: Schedule) -> list[str]:
    counts = Counter(op for ops in schedule.ops for op in ops)
    kinds = sorted({op.kind for op in counts})
    expected = {
        Op(kind, m, stage)
        for kind in kinds
        for m in range(schedule.num_micro_batches)
        for stage in range(schedule.num_stages)
    }
    faults = [f"{op} runs {counts[op]} times" for op in sorted(expected) if counts[op] != 1]
    faults += [f"{op} is of no micro-batch" for op in sorted(counts.keys() - expected)]
    if kinds not in (["F"], ["B", "F"], ["F", "I", "W"]):
        faults.append(f"ops of kinds {', '.join(kinds)} are not a whole forward and backward")
    return faults


def _stuck(schedule: Schedule) -> list[str]:
    """Runs every rank as far as possible, in turn, until none advances."""
    done: set[Op] = set()
    positions = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while positions[rank] < len(ops) and _is_ready(ops[positions[rank]], schedule, done):
                done.add(ops[positions[rank]])
                positions[rank] += 1
                moved = True
    return [
        f"rank {rank} waits at {ops[index]} for {_missing(ops[index], schedule, done)} forever"
        for rank, (ops, index) in enumerate(zip(schedule.ops, positions, strict=True))
        if index < len(ops)
    ]


def _is_ready(op: Op, schedule: Schedule, done: set[Op]) -> bool:
    return all(need in done for need in needs(op, schedule.num_stages))


def _missing(op: Op, schedule: Schedule, done: set[Op]) -> str:
    return " and ".join(str(n) for n in needs(op, schedule.num_stages) if n not in done)
