"""Pipeline parallelism: runs this rank's ops of any Schedule.

Where an op needs the result of another rank's op, the two exchange it by a send and a receive. With
pp = 1 the same code is gradient accumulation. T tokens, D hidden: p2p sends x_TD as the stage has
it. Without sequence parallelism, where tp ranks replicate [T, D], each sends 1/tp of it and the
receivers all-gather (PTD-P's scatter/gather, arXiv:2104.04473, section 4.1).
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import Pending, all_gather, receive, start_send
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.zero_bubble import WeightStep
from mtcli.core.schedule.messages import (
    SENT_AHEAD,
    Channel,
    Message,
    direction,
    message_of,
    reader,
    sent,
)
from mtcli.core.schedule.ops import Op, Schedule, needs

Given = TypeVar("Given")
Read = TypeVar("Read", contravariant=True)


class StageModule(Protocol[Read]):
    """A stage of the model; `Read` is the type of its inputs besides activations."""

    build: LayerFactory

    def __call__(self, x_TD: Tensor | None, inputs: Read) -> Tensor:
        """The stage's activations."""

    def loss(self, x_TD: Tensor, inputs: Read, scale: float) -> tuple[Tensor, Tensor]:
        """The last stage's (sum of losses, that sum times `scale`, to differentiate)."""


class OpSpan(NamedTuple):
    """The start and end of an op's computation on this rank, by the pipeline's clock."""

    op: Op
    start: float
    end: float


class ActivationFormat(NamedTuple):
    """The format of activations in p2p: dtype, columns, the number of shards of a micro-batch's
    tokens, and whether tp ranks replicate them."""

    dtype: torch.dtype
    columns: int
    token_shards: int
    same_on_tp: bool


class Pipeline(Generic[Given]):
    """Executes the ops of this rank in the schedule's order."""

    def __init__(
        self,
        stages: Mapping[int, StageModule[Given]],
        schedule: Schedule,
        groups: Groups,
        format: ActivationFormat,
    ) -> None:
        self.stages, self.schedule = stages, schedule
        self.ops = schedule.ops[groups.pp_rank]
        self.p2p = _P2P(schedule, groups, format)
        self.clock: Callable[[], float] = perf_counter  # profile puts a device's clock here
        self.around: Callable[[Op], AbstractContextManager[object]] = nullcontext  # wraps each op
        self.spans: list[OpSpan] = []
        self.current: Op | None = None  # the op that runs, or ran last

    def train_step(
        self,
        load: Callable[[int], Given],
        tokens: int,
        scale: float,
        before_last_backward: Callable[[int], None],
    ) -> Tensor | float:
        """Runs forward and backward of every micro-batch; returns the sum of this rank's losses,
        on the device, so that the host does not wait for it.

        `load(m)` returns micro-batch m, of `tokens` tokens. Gradients are those of scale * (sum of
        losses). `before_last_backward(stage)` is called ahead of the last op that adds to the
        stage's gradients.
        """
        run = _Step(self, load, tokens, scale)
        actions = {"F": run.forward, "B": run.backward, "I": run.backward, "W": run.weights}
        last = {op.stage: op for op in self.ops if op.kind in "BW"}
        for op in self.ops:
            if op == last[op.stage]:
                before_last_backward(op.stage)
            self.current = op
            with self.around(op):
                actions[op.kind](op)
        self.p2p.wait()
        self.spans = run.spans
        return run.total_loss()

    @torch.no_grad()
    def forward(
        self,
        load: Callable[[int], Given],
        tokens: int,
        take: Callable[[Tensor, Given], object],
    ) -> None:
        """Runs forwards alone. On the last stage's rank calls `take` with each micro-batch's
        activations and inputs, in order; activations of other stages are freed once sent."""
        run = _Step(self, load, tokens, 0.0)
        for op in self.ops:
            run.infer(op, take)
        self.p2p.wait()
        self.spans = run.spans


class _Step(Generic[Given]):
    """The state of one run of the schedule: activations and gradients in flight."""

    def __init__(
        self, pipeline: Pipeline[Given], load: Callable[[int], Given], tokens: int, scale: float
    ) -> None:
        self.stages, self.p2p, self.scale = pipeline.stages, pipeline.p2p, scale
        self.last_stage = pipeline.schedule.num_stages - 1
        self.load, self.tokens, self.clock = load, tokens, pipeline.clock
        self.loaded: dict[int, Given] = {}
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.weight_work: dict[tuple[int, int], list[WeightStep]] = {}
        self.losses: list[Tensor] = []
        self.spans: list[OpSpan] = []

    def forward(self, op: Op) -> None:
        """F: computes activations or the loss, and saves input and output for backward."""
        x = self._activations(op)
        if x is not None:
            x.requires_grad_()
        start, inputs = self.clock(), self._inputs(op)
        y = self.stages[op.stage](x, inputs)
        if op.stage == self.last_stage:
            total, y = self.stages[op.stage].loss(y, inputs, self.scale)
            self.losses.append(total)
        else:
            self.p2p.send(op, y.detach())
        self.saved[op.micro_batch, op.stage] = (x, y)
        self.spans.append(OpSpan(op, start, self.clock()))

    def backward(self, op: Op) -> None:
        """B: computes the gradient of the input from that of the output, and the parameters'
        gradients.

        I is the same, but leaves the gradients of linear weights to W.
        """
        gradient = None
        if op.stage < self.last_stage:
            gradient = self.p2p.receive(needs(op, self.last_stage + 1)[1], self.tokens)
        x, y = self.saved.pop((op.micro_batch, op.stage))
        start = self.clock()
        # a stage of nothing but a frozen embedding has no gradient
        if op.kind == "B":
            if y.requires_grad:
                torch.autograd.backward(y, gradient)
        else:
            passes = self.stages[op.stage].build.weight_passes
            assert passes is not None, f"{op} of stages whose backward is not split"
            with passes.collecting() as work:
                if y.requires_grad:
                    torch.autograd.backward(y, gradient)
            self.weight_work[op.micro_batch, op.stage] = work
        if x is not None:
            assert x.grad is not None, f"{op} left no gradient for the stage before"
            self.p2p.send(op, x.grad)
        self.spans.append(OpSpan(op, start, self.clock()))

    def weights(self, op: Op) -> None:
        """W: computes the weight gradients that I left."""
        start = self.clock()
        work = self.weight_work.pop((op.micro_batch, op.stage))
        while work:
            work.pop(0)()  # freed once it has run
        self.spans.append(OpSpan(op, start, self.clock()))

    def infer(self, op: Op, take: Callable[[Tensor, Given], object]) -> None:
        """F without a backward; `take` gets the last stage's activations and inputs."""
        x = self._activations(op)
        start, inputs = self.clock(), self._inputs(op)
        y = self.stages[op.stage](x, inputs)
        self.spans.append(OpSpan(op, start, self.clock()))
        if op.stage == self.last_stage:
            take(y, inputs)
        else:
            self.p2p.limit_sending()
            self.p2p.send(op, y)

    def total_loss(self) -> Tensor | float:
        """The sum of all micro-batches' losses; 0 on ranks without the last stage."""
        return torch.stack(self.losses).double().sum() if self.losses else 0.0

    def _activations(self, op: Op) -> Tensor | None:
        if op.stage == 0:
            return None
        return self.p2p.receive(needs(op, self.last_stage + 1)[0], self.tokens)

    def _inputs(self, op: Op) -> Given:
        """A micro-batch's inputs; the last of this rank's stages that reads them frees them."""
        micro_batch = op.micro_batch
        if micro_batch not in self.loaded:
            self.loaded[micro_batch] = self.load(micro_batch)
        if op.stage == max(self.stages):
            return self.loaded.pop(micro_batch)
        return self.loaded[micro_batch]


class _Sent(NamedTuple):
    """A send in flight, with the number of the peer's op that consumes it."""

    pending: Pending
    part: Tensor
    peer: int
    reader: int


class _P2P:
    """Passes results between stages: by reference on this rank, by send and receive to others.

    A receiver takes messages in the order in which the sender's ops produce them, and stores those
    that its own ops need later. So any schedule without a deadlock runs over first-in first-out
    channels.
    """

    def __init__(self, schedule: Schedule, groups: Groups, format: ActivationFormat) -> None:
        self.schedule, self.format, self.tp = schedule, format, groups.tp
        self.axes = groups.axes
        self.me, self.device = groups.pp_rank, groups.device
        self.arrived: dict[Op, Tensor] = {}
        self.sending: list[_Sent] = []
        self.order = [{op: number for number, op in enumerate(ops)} for ops in schedule.ops]
        self.sent = sent(schedule)
        self.expected: dict[Channel, deque[Message]] = {}

    def send(self, op: Op, x: Tensor) -> None:
        """Sends an op's result to the rank of the op that needs it."""
        message = message_of(op, self.schedule)
        if message is None:
            self.arrived[op] = x
            return
        part, peer = self._my_part(x), message.receiver
        pending = start_send(part, self.axes[message.channel.direction], peer, str(op))
        self.sending.append(_Sent(pending, part, peer, self.order[peer][reader(op)]))

    def receive(self, op: Op, tokens: int) -> Tensor:
        """Returns the result of an op, once it has arrived."""
        sender = self.schedule.rank_of_stage[op.stage]
        channel = Channel(direction(op), sender, self.me)
        if sender != self.me and not self.expected.get(channel):
            self.expected[channel] = deque(self.sent[channel])
        while op not in self.arrived:
            next_op = self.expected[channel].popleft().op
            self.arrived[next_op] = self._receive(next_op, sender, tokens)
        self._free_sent(sender, self.order[sender][op])
        return self.arrived.pop(op)

    def _free_sent(self, peer: int, number: int) -> None:
        """Frees send buffers: those read by ops of `peer` with a lower number than `number`, and
        those that the backend reports complete (gloo reports none until a wait)."""
        left = []
        for message in self.sending:
            if message.peer == peer and message.reader < number:
                message.pending.wait()
            elif not message.pending.is_completed():
                left.append(message)
        self.sending = left

    def limit_sending(self) -> None:
        """Waits until at most SENT_AHEAD sends are in flight. Forwards alone need it, as no
        gradient comes back to show what peers have consumed."""
        while len(self.sending) > SENT_AHEAD:
            self.sending.pop(0).pending.wait()

    def wait(self) -> None:
        """Waits until all sends are complete."""
        for message in self.sending:
            message.pending.wait()
        self.sending = []
        assert not self.arrived, f"results nobody took: {[str(op) for op in self.arrived]}"

    def _receive(self, op: Op, sender: int, tokens: int) -> Tensor:
        axis, format = self.axes[direction(op)], self.format
        if not format.same_on_tp:
            shape = (tokens // format.token_shards, format.columns)
            part = torch.empty(shape, dtype=format.dtype, device=self.device)
            return receive(part, axis, sender, str(op))
        size = -(-tokens * format.columns // self.tp.size)
        part = torch.empty(size, dtype=format.dtype, device=self.device)
        receive(part, axis, sender, str(op))
        return all_gather(part, self.tp)[: tokens * format.columns].view(tokens, format.columns)

    def _my_part(self, x: Tensor) -> Tensor:
        if not self.format.same_on_tp:
            return x.contiguous()
        flat, size = x.flatten(), -(-x.numel() // self.tp.size)
        part = flat[self.tp.rank * size : (self.tp.rank + 1) * size]
        if len(part) == size:  # padding by 0 would copy
            return part
        return torch.nn.functional.pad(part, (0, size - len(part)))
