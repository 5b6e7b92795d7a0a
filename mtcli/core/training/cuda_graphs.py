"""Replays a micro-batch as two CUDA graphs, its forward and its backward, recorded once.

A replay launches all kernels of an op at once, so a GPU never waits for the host between them.
Graphs read and write the same memory each time: a micro-batch's tensors are copied into the
recorded inputs, and gradients are added to buckets that begin at zero. Tensor parallel collectives
are part of the graphs (NCCL's can be recorded); all ranks of tp record and replay in one order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.pipeline import OpSpan, Pipeline
from mtcli.core.runtime.health.flight_recorder import FlightRecorder

WARM_UPS = 2  # the first run chooses and compiles kernels, and libraries allocate in it

Run = Callable[[], None]


class Recorder(Protocol):
    """Records the work of a function."""

    def warm_up(self) -> AbstractContextManager[None]:
        """The context of runs before anything is recorded."""

    def record(self, run: Run) -> Run:
        """Records the kernels of `run` without running them; returns a function that does."""


class CudaGraphs:
    """Records CUDA graphs that share one pool of memory and are replayed in the same order.

    Each warm-up begins a new pool; the previous one is freed with its graphs.
    """

    def __init__(self, calls: FlightRecorder) -> None:
        """`calls` has the collectives of this rank."""
        self.calls = calls

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Runs the context on a side stream, as recording does."""
        # A recording cannot free cached memory to make room.
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, run: Run) -> Run:
        """Records `run` as a graph; other threads (the reader's) may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        with (
            self.calls.in_graph() as note_calls,
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode),
        ):
            run()

        def replay() -> None:
            note_calls()
            graph.replay()

        return replay


class CudaGraphPipeline:
    """Runs a Pipeline of one rank and one stage, micro-batch by micro-batch, from recordings."""

    def __init__(self, pipeline: Pipeline[Inputs], begin: Run, recorder: Recorder) -> None:
        """`begin` resets what micro-batches add to: gradients, and the loads of experts."""
        self.pipeline, self.begin, self.recorder = pipeline, begin, recorder
        self.scale = 0.0  # of what is recorded
        self.total: Tensor | None = None
        self.replays: dict[str, Run] = {}

    def train_step(self, load: Callable[[int], Inputs], scale: float) -> Tensor:
        """Runs a step as Pipeline.train_step does; gradients are reduced after the last backward.

        A new scale needs a new recording, unless there are loss weights, whose number differs from
        step to step: then the scale multiplies the weights. With padding, the scale of auxiliary
        losses is a tensor.
        """
        pipeline, losses, spans = self.pipeline, [], []
        first = load(0)
        if self._is_new(first, scale):
            self._record(first, scale)
        factor = scale / self.scale
        self.begin()
        for op in pipeline.ops:
            pipeline.current = op
            with pipeline.around(op):
                start = pipeline.clock()
                if op.kind == "F":
                    self._fill(load(op.micro_batch) if op.micro_batch else first, factor)
                self.replays[op.kind]()
                if op.kind == "F":
                    assert self.total is not None, "the forward sets it"
                    losses.append(self.total.clone())
                spans.append(OpSpan(op, start, pipeline.clock()))
        pipeline.spans = spans
        return torch.stack(losses).double().sum() / factor

    def _is_new(self, inputs: Inputs, scale: float) -> bool:
        """Whether a constant of the graphs has changed."""
        if not self.scale:
            return True
        if self.inputs.padding is None and inputs.aux_scale != self.inputs.aux_scale:
            return True
        return scale != self.scale and self.inputs.weights is None

    def _record(self, inputs: Inputs, scale: float) -> None:
        # First, as each recording takes as much memory as a micro-batch.
        self.replays.clear()
        self.inputs, self.scale, self.total = inputs.clone(), scale, None
        if inputs.padding is not None:
            aux_scale = torch.tensor(float(inputs.aux_scale), device=inputs.tokens.device)
            self.inputs = replace(self.inputs, aux_scale=aux_scale)
        self.begin()
        with self.recorder.warm_up():
            for _ in range(WARM_UPS):
                self._forward()
                self._backward()
        self.replays = {
            "F": self.recorder.record(self._forward),
            "B": self.recorder.record(self._backward),
        }

    def _fill(self, inputs: Inputs, factor: float) -> None:
        for static, new in zip(self.inputs.tensors(), inputs.tensors(), strict=True):
            static.copy_(new)
        if self.inputs.weights is not None:
            self.inputs.weights.mul_(factor)
        if isinstance(self.inputs.aux_scale, Tensor):
            self.inputs.aux_scale.fill_(inputs.aux_scale)

    def _forward(self) -> None:
        stage = self.pipeline.stages[0]
        self.total, self.root = stage.loss(stage(None, self.inputs), self.inputs, self.scale)

    def _backward(self) -> None:
        torch.autograd.backward(self.root)
        del self.root
