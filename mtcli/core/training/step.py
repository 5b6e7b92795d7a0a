"""One training step, as data flows: batch, forward, backward, reduce, clip, update.

The same code runs one process and thousands: the layout decides what is sharded over ranks, and
this file only names what happens in a step.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.config.phases import PhaseSpan, phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.model.build import activation_format, build_stages
from mtcli.core.model.expert_balance import ExpertBalance
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.router_figures import router_figures
from mtcli.core.optim.grad_norm import clip_factor, device_factor, square_sum
from mtcli.core.optim.loss_scale import LossScale
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.optim.optimizer import Optimizer, moment_dtype
from mtcli.core.optim.weight_average import WeightAverage
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.device_read import start_read
from mtcli.core.parallel.groups import Groups, make_groups
from mtcli.core.parallel.pipeline import Pipeline
from mtcli.core.runtime.launch import Runtime
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.schedule.ops import Schedule
from mtcli.core.schedule.validate import problems
from mtcli.core.sync.methods import allocates_shards, replica_exchange, strategy_for
from mtcli.core.sync.replica_average import averaged
from mtcli.core.sync.traffic import EXCHANGED, REDUCED, SyncTraffic
from mtcli.core.training.compile import compile_blocks, compiler_errors
from mtcli.core.training.cuda_graphs import CudaGraphPipeline, CudaGraphs
from mtcli.core.training.loader import MicroBatchLoader, StepBatch
from mtcli.core.training.state import RunState
from mtcli.kernels.attention.backends import sdpa_backends
from mtcli.kernels.gemm import DTYPES

Outcome = Literal["updated", "overflow", "fault"]


class Step(NamedTuple):
    """The result of one optimizer step."""

    step: int
    loss: float  # weighted mean over the global batch's labels, nats
    lr: float
    grad_norm: float  # before clipping; the mean of replicas' own
    seconds: float
    loss_scale: float  # of this step
    outcome: Outcome
    expert_load: float | None = None  # largest over mean, worst layer; None without router biases
    routers: Mapping[str, list[float]] = {}  # figures by layer of experts, of steps that are logged
    labels: float = 1.0  # labels with a weight
    tokens: float = 0.0  # without padding
    replica_steps: tuple[int, ...] = ()  # of a round of asynchronous replicas: those of each


def conclude(run: RunState, loss: float, norm: float) -> Step:
    """Advances a run and its loss scale by a step; equal on every rank, as loss and norm are.

    An `overflow` means that the loss scale was too large for float16: the batch is passed over. A
    `fault` is any other loss or gradient that is not finite: the run stays as it was.
    """
    outcome: Outcome = "updated"
    if not math.isfinite(loss + norm):
        outcome = "overflow" if math.isfinite(loss) and run.loss_scale.can_fall else "fault"
    step, scale = run.step + 1, run.loss_scale.scale
    if outcome != "fault":
        run.step = step
        run.loss_scale.update(outcome == "overflow")
    return Step(step, loss, rate_of(run.span, step), norm, 0.0, scale, outcome)


def rate_of(span: PhaseSpan, step: int) -> float:
    """The learning rate of a step, by the curve of its phase."""
    begin, steps = span.curve
    return learning_rate(span.config.optimizer, step - begin, steps)


class Phases(NamedTuple):
    """When each phase of a step ended on this rank, by the pipeline's clock."""

    begin: float
    data: float  # the micro-batches are there
    pipeline: float  # the last backward is done and everything sent
    reduce: float  # gradients are summed over their ranks
    norm: float  # this rank's part of the gradient norm is known
    agree: float  # loss and norm are known everywhere
    end: float  # the weights are updated


def run_groups(config: RunConfig, runtime: Runtime) -> Groups:
    """The process groups of a run. Collective."""
    layout, timeout = ParallelLayout.of_run(config, runtime.world), config.train.timeout
    return make_groups(layout, runtime.rank, runtime.device, timeout, runtime.recorder)


class Trainer:
    """The state of a run on this rank: weights, gradients, optimizer and the step they are at.

    With asynchronous replicas a step is one replica's alone, and no other takes part.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        self.groups = run_groups(config, runtime)
        self.layout = self.groups.layout
        self.dtype = DTYPES[config.train.precision]
        table = run_parameters(config.model, config.lora, config.train.freeze)
        self.table: Mapping[str, Parameter] = table
        self.stages = build_stages(config, self.groups, allocates_shards(config, self.layout))
        self.strategy = strategy_for(config, self.stages, self.groups, self.dtype)
        if config.train.compile:
            compile_blocks(self.stages.values(), config.data.document_mask)
        weights, ownership = self.strategy.weights(), self.strategy.ownership
        moments = moment_dtype(config.train)
        self.optimizer = Optimizer(weights, ownership, config.optimizer, self.dtype, moments)
        self.average = WeightAverage(self.optimizer.masters, config.train.ema)
        self.exchange = replica_exchange(config, self.strategy, self.optimizer)
        inside = REDUCED if self.layout.dp * self.layout.cp > 1 else ()
        self.sync_traffic = SyncTraffic((*EXCHANGED, *inside))
        self.groups.world.recorder.sync_traffic = self.sync_traffic
        by_token = config.parallel.sequence_parallel
        tokens = [self.groups.axes["tokens" if by_token else "samples"]]
        # Replicas with the same weights have the same biases, by the loads of all of them.
        if not self.exchange.weights_differ:
            tokens.append(self.groups.replicas)
        # Adapters are of a model that stays as it is, biases too.
        bias_rate = 0.0 if config.lora.rank else config.model.router_bias_update_rate
        self.balance = ExpertBalance(self.stages.values(), bias_rate, self.groups, tokens)
        self.loss_scale = LossScale.of(config.train)
        self.is_asynchronous = config.sync.asynchronous
        self.enter(phases_of(config)[0])
        self.step = 0
        self._phase_ends: dict[str, float] = {}
        self.phases: Phases | None = None  # of the last step, for profile

    def enter(self, span: PhaseSpan) -> None:
        """Begins a phase of the run: makes anew what depends on the batch, and keeps the state."""
        self.span, self.config = span, span.config
        b, p = self.config.batch, self.config.parallel
        self.micro_batches = b.num_micro_batches(self.layout.batch_shards)
        schedule = _proven_schedule(p.schedule, p.pp, p.vpp, self.micro_batches)
        format = activation_format(self.config)
        self.pipeline = Pipeline(self.stages, schedule, self.groups, format)
        self.cuda_graphs = self._cuda_graphs()
        self.micro_batch_tokens = b.micro_batch_size * b.seq_len // (p.cp * p.grid_rows)
        if self.config.train.compile and span.number:
            # Dynamo compiles for a new shape 8 times and then no more; a resumed run, afresh.
            torch._dynamo.reset()

    def state_bytes(self) -> int:
        """Bytes of this rank's weights, gradients, masters, moments and exchange."""
        return sum(self.state_bytes_by_kind().values())

    def state_bytes_by_kind(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and optimizer; the last counts masters, moments
        and buffers of the exchange with other replicas."""
        weights = [shard.tensor for shard in self.strategy.shards.values()]
        weight_memory = {_memory(weight) for weight in weights}  # masters too, where zero = 3
        buffers = [*self.optimizer.state().values(), *self.exchange.buffers()]
        buffers += self.average.tensors.values()
        kinds = {
            "weights": weights,
            "gradients": self.strategy.gradient_buffers(),
            "optimizer": [x for x in buffers if _memory(x) not in weight_memory],
        }
        return {kind: sum(x.numel() * x.element_size() for x in xs) for kind, xs in kinds.items()}

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on so far: with the seed, all that the next batch depends on."""
        return self.span.samples_before(self.step)

    def train_step(self, loader: MicroBatchLoader) -> Step:
        """One optimizer step on the next global batch; `outcome` says whether it was made."""
        start = perf_counter()
        self.groups.world.recorder.step = self.step + 1
        loss_sum, batch = self.forward_backward(loader)
        squares = square_sum(self.strategy.counted_gradients())
        self._end_phase("norm")
        statistics_LS = self._router_statistics()
        sums = self._global(loss_sum, squares, self.is_asynchronous, statistics_LS)
        read = start_read(sums)
        self._end_phase("agree")
        scale, clip = self.loss_scale.scale, self.config.optimizer.clip
        is_ahead = self.exchange.updates_ahead
        if is_ahead:
            lr = rate_of(self.span, self.step + 1)
            self.exchange.update_ahead(lr, device_factor(sums[:2], clip, scale))  # of one replica
        loss_sums, square_sums, routers = self._on_host(read(), statistics_LS)
        norms = [math.sqrt(square) / scale for square in square_sums]
        step = conclude(self, sum(loss_sums) / (batch.labels or 1.0), sum(norms) / len(norms))
        expert_load = None
        if step.outcome == "updated":
            replica = 0 if self.is_asynchronous else self.groups.replicas.rank
            # A replica whose labels have no weight has no loss, and no gradient.
            if loss_sums[replica]:
                self.exchange.note_loss(loss_sums[replica] / batch.replica_labels)
            if not is_ahead:
                self.exchange.update(step.lr, clip_factor(norms[replica], clip) / scale)
            self.average.update()
            expert_load = self.balance.move_biases()
        elif is_ahead:
            self.optimizer.updates -= 1  # it changed nothing
        self._end_phase("end")
        self.phases = Phases(**self._phase_ends)
        return step._replace(
            seconds=perf_counter() - start,
            expert_load=expert_load,
            routers=routers,
            labels=batch.labels,
            tokens=batch.tokens,
        )

    def forward_backward(
        self, loader: MicroBatchLoader, as_written: bool = False
    ) -> tuple[Tensor | float, StepBatch]:
        """(sum of this rank's weighted losses, its batch), with the gradients reduced.

        `as_written` replays nothing, so that hooks of modules are called.
        """
        self._end_phase("begin")
        batch = loader.step(self.step, self.loss_scale.scale)
        gradient_scale = self.loss_scale.scale / batch.replica_labels
        self._end_phase("data")
        self.exchange.before_step(rate_of(self.span, self.step + 1))
        self.strategy.before_step()
        self.balance.begin()
        backends = sdpa_backends(self.groups.device, repeats=True)
        with compiler_errors(self.config.train.compile), backends:
            loss_sum = self._micro_batches(batch.load, gradient_scale, as_written)
        self._end_phase("pipeline")
        self.strategy.after_backward()
        self.exchange.after_backward()
        self._end_phase("reduce")
        return loss_sum, batch

    def _end_phase(self, name: str) -> None:
        """Notes that a phase of the step, a field of Phases, ends now."""
        self._phase_ends[name] = self.pipeline.clock()

    def _micro_batches(
        self, load: Callable[[int], Inputs], gradient_scale: float, as_written: bool
    ) -> Tensor | float:
        if self.cuda_graphs and not as_written:
            return self.cuda_graphs.train_step(load, gradient_scale)
        return self.pipeline.train_step(
            load,
            tokens=self.micro_batch_tokens,
            scale=gradient_scale,
            before_last_backward=self.strategy.before_last_backward,
        )

    def _cuda_graphs(self) -> CudaGraphPipeline | None:
        """The pipeline that replays micro-batches; None without train.cuda_graphs."""
        if not self.config.train.cuda_graphs:
            return None
        if self.groups.device.type != "cuda":
            hint = "set train.cuda_graphs = false"
            message = "cuda_graphs=true, and there is no CUDA device here"
            raise wrong(message, hint, "train.cuda_graphs")
        return CudaGraphPipeline(
            self.pipeline, self.begin_from_zero, CudaGraphs(self.groups.world.recorder)
        )

    def begin_from_zero(self) -> None:
        """Resets the gradients and the loads of experts that micro-batches add to."""
        self.strategy.before_step(from_zero=True)
        self.balance.begin()

    @torch.no_grad()
    def evaluate(self, loader: MicroBatchLoader) -> float:
        """The weighted mean loss over train.eval_batches global batches of the validation data, of
        the average of replicas that differ.

        The losses of a micro-batch are summed when it has passed the last stage, so the memory that
        evaluation takes does not depend on how many there are.
        """
        steps = self.config.train.eval_batches
        pp, vpp = self.layout.pp, self.layout.vpp
        schedule = _proven_schedule("forward_only", pp, vpp, self.micro_batches)
        pipeline = Pipeline(self.stages, schedule, self.groups, activation_format(self.config))
        last = self.stages.get(self.layout.num_stages - 1)
        total = torch.zeros((), dtype=torch.float64, device=self.groups.device)

        def add(x_TD: Tensor, inputs: Inputs) -> None:
            assert last is not None, "activations come from the last stage"
            total.add_(last.losses(x_TD, inputs).double().sum())

        labels = 0.0
        with averaged(self.exchange), sdpa_backends(self.groups.device, repeats=True):
            for step in range(steps):
                batch = loader.step(step, loss_scale=0.0)
                pipeline.forward(batch.load, self.micro_batch_tokens, add)
                labels += batch.labels
        loss_sums: list[float] = self._global(total, 0.0).view(2, -1)[0].tolist()
        return sum(loss_sums) / labels

    def _router_statistics(self) -> Tensor:
        """This rank's part of what routers count of a step that is logged; empty in others, and
        without experts."""
        if not self.config.model.num_experts or (self.step + 1) % self.config.train.log_every:
            return torch.empty(0)
        return self.balance.statistics(self.config.model)

    def _on_host(
        self, sums: Tensor, statistics_LS: Tensor
    ) -> tuple[list[float], list[float], dict[str, list[float]]]:
        """(weighted losses, squares of gradients of each replica, figures of routers)."""
        size = statistics_LS.numel()
        of_replicas, of_routers = sums.split([len(sums) - size, size])
        losses, squares = of_replicas.view(2, -1).tolist()
        shaped = of_routers.view_as(statistics_LS)
        return losses, squares, router_figures(self.config.model, shaped) if size else {}

    def _global(
        self,
        loss_sum: Tensor | float,
        square_sum: Tensor | float,
        only_replica: bool = False,
        statistics_LS: Tensor | None = None,
    ) -> Tensor:
        """Sums of weighted losses and of gradients' squares of each replica, then the statistics of
        routers, if any: float64, the same on every rank; or, with `only_replica`, of this replica
        alone.

        Each tp rank of the last stage has the same losses, so only rank 0 of tp adds them.
        """
        axis, replicas, replica = self.groups.world, self.layout.replicas, self.groups.replicas.rank
        if only_replica:
            axis, replicas, replica = self.groups.replica, 1, 0
        sums = torch.zeros(2, replicas, dtype=torch.float64, device=self.groups.device)
        sums[0, replica] = loss_sum if self.groups.tp.rank == 0 else 0.0
        sums[1, replica] = square_sum
        flat = sums.flatten()
        if statistics_LS is not None and statistics_LS.numel():
            flat = torch.cat([flat, statistics_LS.flatten()])
        return all_reduce(flat, axis)


@lru_cache(maxsize=2)  # of training, and of evaluation
def _proven_schedule(name: str, pp: int, vpp: int, num_micro_batches: int) -> Schedule:
    """`schedule_for`, in which no rank waits forever: 60 us per op."""
    schedule = schedule_for(name, pp, vpp, num_micro_batches)
    faults = problems(schedule)
    assert not faults, "; ".join(faults)
    return schedule


def _memory(x: torch.Tensor) -> int:
    """A key of a tensor's memory; works for fake tensors, which have no address."""
    return int(x.untyped_storage()._cdata)
