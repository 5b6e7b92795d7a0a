"""The flight recorder: the collectives that a process calls, and those in which it waits.

Collectives of an axis are numbered from 1, so ranks that agree are at the same number; messages are
numbered per pair of ranks. A waiting thread is in `waits`; waits of a device are found later,
through `queued`. A place in the code is written as `tensor.py:63 in forward`.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from threading import Lock, get_ident
from time import monotonic
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

CORE = Path(__file__).parents[2]
PACKAGE = str(CORE.parent) + os.sep
# Frames between a collective and its caller: those of these files, and of torch.
_COLLECTIVES = (
    str(CORE / "parallel" / "collectives.py"),
    str(CORE / "parallel" / "transport"),
    str(CORE / "runtime" / "health"),
)
SAVING = "saving"  # what the axes' names begin with on which ranks wait for each other's saves


class QueueMark(Protocol):
    """A mark in a device's queue."""

    def reached(self) -> bool:
        """Whether the device has passed it."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds on the device since an earlier mark; both must be reached."""


class Members(Protocol):
    """The ranks that exchange along an axis, such as `parallel.groups.Axis`."""

    @property
    def name(self) -> str:
        """The axis."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, in grid order."""

    @property
    def rank(self) -> int:
        """This rank's index in `ranks`."""

    @property
    def size(self) -> int:
        """The number of ranks."""


class Call:
    """One collective of this rank. Inside `with` the thread waits for the other ranks."""

    __slots__ = ("axis", "began", "channel", "recorder", "number", "op", "peer", "since", "thread")

    def __init__(
        self, recorder: "FlightRecorder", op: str, axis: Members, peer: int | None
    ) -> None:
        self.recorder, self.op, self.axis, self.peer = recorder, op, axis, peer
        self.channel = axis.name
        if peer is not None:
            ends = (axis.rank, peer) if op == "send" else (peer, axis.rank)
            self.channel = "{} {}>{}".format(axis.name, *(axis.ranks[end] for end in ends))
        self.number = recorder.counts[self.channel] = recorder.counts.get(self.channel, 0) + 1
        self.since, self.thread = 0.0, 0
        self.began: QueueMark | None = None

    def __enter__(self) -> None:
        if self.recorder.mark is not None:
            self.began = self.recorder.mark()
        self.since, self.thread = monotonic(), get_ident()
        self.recorder.waits[self.thread] = self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.recorder.waits[self.thread]
        seconds = monotonic() - self.since
        if self.recorder.traffic is not None:
            self.recorder.traffic.waited(self, seconds)
        if isinstance(error, RuntimeError):
            self.recorder.breaks.append(Broken(self, caller(sys._getframe()), str(error)))
        if self.recorder.mark is None:
            self.recorder.waited += seconds
        elif error is None:
            self.recorder.queued.append((self, self.recorder.mark()))

    def peers(self) -> tuple[int, ...]:
        """The ranks of the world that take part, this one included."""
        if self.peer is None:
            return self.axis.ranks
        return self.axis.ranks[self.axis.rank], self.axis.ranks[self.peer]


class Broken(NamedTuple):
    """A collective that ended in an error, mostly because another rank died."""

    call: Call
    location: str
    error: str


class CallObserver(Protocol):
    """Observes every collective and every wait for one."""

    def note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        """Notes a collective on x, before it starts."""

    def waited(self, call: Call, seconds: float) -> None:
        """Notes the seconds that a thread waited for a call."""


class GraphCalls:
    """The collectives of a CUDA graph, with meta tensors of what they are called on."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Tensor | None, object]] = []

    def note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        """Keeps a call."""
        self.calls.append((call, None if x is None else x.to("meta"), detail))

    def waited(self, call: Call, seconds: float) -> None:
        """Keeps no seconds: nothing is waited for while a graph is recorded."""


class CallCounter(Protocol):
    """Counts the bytes of every collective, mtcli's or another library's."""

    def note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        """Notes a collective on x, before it starts."""

    def add(self, count: int) -> None:
        """Adds bytes that another library's collective sends."""


Check = Callable[[Call, "Tensor | None", object], None]


class FlightRecorder:
    """Records the collectives that a process calls, and those in which it waits.

    `check` is called ahead of each collective (train.debug_collectives). `mark` is for asynchronous
    devices (CUDA): it marks the device's queue ahead of and after each. Recording a collective
    takes 0.9 us and a message 2.2 us (AMD EPYC, Python 3.11).
    """

    def __init__(
        self, check: Check | None = None, mark: Callable[[], QueueMark] | None = None
    ) -> None:
        self.check, self.mark = check, mark
        self.counts: dict[str, int] = {}  # collectives so far, by axis or pair
        self.waits: dict[int, Call] = {}  # by thread
        self.queued: deque[tuple[Call, QueueMark]] = deque()
        self.looking = Lock()  # at `queued`
        self.waited = 0.0  # seconds for other ranks, or of the device
        self.breaks: list[Broken] = []
        self.step = 0  # of training: the one that runs
        self.progress = 0  # parts of saves that this rank has written
        self.traffic: CallObserver | None = None  # profile counts bytes and waits of a step here
        # Training counts data parallelism's bytes here.
        self.sync_traffic: CallCounter | None = None

    def call(
        self,
        op: str,
        axis: Members,
        x: "Tensor | None" = None,
        detail: object = None,
        peer: int | None = None,
    ) -> Call:
        """Records the next collective of an axis, or message to or from its rank `peer`.

        x and `detail` must match those of the other ranks. Raises MtcliError where `check` finds
        that they do not.
        """
        call = Call(self, op, axis, peer)
        if self.check is not None:
            with call:
                self.check(call, x, detail)
        self._note(call, x, detail)
        return call

    def _note(self, call: Call, x: "Tensor | None", detail: object) -> None:
        if self.traffic is not None:
            self.traffic.note(call, x, detail)
        if self.sync_traffic is not None:
            self.sync_traffic.note(call, x, detail)

    @contextmanager
    def in_graph(self) -> Iterator[Callable[[], None]]:
        """Records the calls of a CUDA graph, whose marks nobody could read; yields a function that
        counts their bytes, for each replay."""
        graph, outside = GraphCalls(), (self.check, self.mark, self.traffic, self.sync_traffic)
        self.check = self.mark = self.sync_traffic = None
        self.traffic = graph

        def note_again() -> None:
            for noted in graph.calls:
                self._note(*noted)

        try:
            yield note_again
        finally:
            self.check, self.mark, self.traffic, self.sync_traffic = outside

    def note_progress(self) -> None:
        """Tells the watchdog that a save makes progress, however long it takes."""
        self.progress += 1

    @property
    def broken(self) -> Broken | None:
        """The first collective that ended in an error."""
        return self.breaks[0] if self.breaks else None

    def beside(self) -> "FlightRecorder":
        """A recorder for another thread, whose calls have no fixed order relative to training's.

        They are neither compared with other ranks' nor counted in a step, and no device waits for
        them.
        """
        other = copy(self)
        other.check = other.mark = other.traffic = other.sync_traffic = None
        return other

    def take_waited(self) -> float:
        """Seconds that this rank or its device waited in collectives since the last call."""
        self._look()
        waited, self.waited = self.waited, 0.0
        return waited

    def _look(self) -> None:
        """Drops the calls that the device has passed."""
        with self.looking:
            while self.queued and self.queued[0][1].reached():
                call, ended = self.queued.popleft()
                assert call.began is not None, "a device's calls are marked at both ends"
                self.waited += ended.seconds_since(call.began)

    def oldest(self) -> Call | None:
        """The call that this rank, a thread or its device, has waited for longest."""
        self._look()
        waiting = [*self.waits.values(), *(call for call, _ in list(self.queued)[:1])]
        return min(waiting, key=lambda call: call.since, default=None)


def caller(frame: FrameType | None) -> str:
    """The caller of a collective: the innermost frame outside of torch and of mtcli's collectives.

    In autograd's threads, whose stacks have no other frame, the collective itself.
    """
    innermost, torch = frame, os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_COLLECTIVES, torch)):
            return _location(frame)
        frame = frame.f_back
    return _location(innermost)


def location(thread: int) -> str:
    """Where a thread of this process is: its innermost frame in this package, if any."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return _location(frame or innermost)


def call_site(thread: int) -> str:
    """The frame from which a thread called the collective that it waits in."""
    return caller(sys._current_frames().get(thread))


def _location(frame: FrameType | None) -> str:
    if frame is None:
        return "the end of its thread"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
