"""Predicts a step's bytes, seconds, FLOPs and MFU, from the classes that training uses.

The schedule is simulated with the seconds of each stage's forward and backward; data parallel
traffic and the optimizer are added. MFU counts 3 forward passes with the full square of attention,
whatever is computed (arXiv:2205.05198, appendix A); HFU adds recomputation.

Published FLOP counts follow other conventions, which differ in the multiple of a forward pass (3,
or 4 where blocks are recomputed) and in attention (its full square, or its causal half).
"""

from dataclasses import dataclass

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.rules import require
from mtcli.core.config.schema import LoraConfig, RunConfig
from mtcli.core.mesh.parameters import count_active_adapters, forward_flops, training_flops
from mtcli.core.plan.costs import Costs, Pass
from mtcli.core.plan.hardware import Device, device_named, for_run
from mtcli.core.plan.memory import Memory, each_stage
from mtcli.core.plan.step_time import (
    evaluation_seconds,
    pipeline_seconds,
    pipeline_timeline,
    step_costs,
)
from mtcli.core.plan.workload import Workload
from mtcli.core.schedule.timeline import Timeline

NO_ADAPTERS = LoraConfig()


@dataclass(frozen=True)
class Convention:
    """A way of counting FLOPs; `again` adds one more forward pass of every block, without the
    head."""

    name: str
    again: bool = False
    causal: bool = False
    attention: bool = True

    def token_flops(
        self,
        model: ModelConfig,
        seq_len: int,
        lora: LoraConfig = NO_ADAPTERS,
        freeze: tuple[str, ...] = (),
    ) -> float:
        """FLOPs of a step per token (with `again`: arXiv:2104.04473, equation 3)."""
        attended = seq_len if self.attention else 0
        again = blocks_flops(model, attended, lora, self.causal) if self.again else 0.0
        return training_flops(model, attended, lora, self.causal, freeze) + again


MODEL = Convention("3x forward, full attention")  # arXiv:2205.05198, appendix A
CAUSAL = Convention("3x forward, causal attention", causal=True)
WEIGHTS = Convention("3x forward, no attention", attention=False)  # 6 FLOPs a parameter
HARDWARE = Convention("4x forward, full attention", again=True)
HARDWARE_CAUSAL = Convention("4x forward, causal attention", again=True, causal=True)

CONVENTIONS = (MODEL, CAUSAL, WEIGHTS, HARDWARE, HARDWARE_CAUSAL)
FLOP_CONVENTION = MODEL.name


@dataclass(frozen=True)
class Prediction:
    """The cost of one step of a workload on one kind of device."""

    work: Workload
    device: Device
    stages: tuple[Memory, ...]  # of each pipeline rank's first rank, its fullest
    costs: Costs
    step_seconds: float
    bubble_fraction: float  # idle over busy time, (pp - 1) / m for 1F1B
    is_rehearsed: bool = False  # its real stages were run; else its activations are estimates

    @property
    def memory(self) -> Memory:
        """Bytes of the fullest rank."""
        return self.stages[self.fullest_stage]

    @property
    def fullest_stage(self) -> int:
        """The pipeline rank with most bytes; the first of equal ones."""
        totals = [stage.total for stage in self.stages]
        return totals.index(max(totals))

    @property
    def fullest_rank(self) -> int:
        """The first rank of `fullest_stage`."""
        return self.work.layout.attention.rank(pp=self.fullest_stage)

    @property
    def waits_for_host(self) -> bool:
        """Whether starting a block's work takes the host longer than the GPU computes."""
        return not self.device.physics.host_adds and self.costs.host.total > self.costs.busy.total

    @property
    def fits(self) -> bool:
        """Whether the rank with most bytes stays within the device's usable memory."""
        return self.memory.total <= self.device.usable_bytes

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of the global batch per second and device."""
        return self.work.tokens_per_step / self.step_seconds / self.work.layout.world

    @property
    def model_flops_per_gpu(self) -> float:
        """FLOP/s per device that the model needs, by FLOP_CONVENTION."""
        flops = training_flops(
            self.work.model, self.work.seq_len, self.work.lora, freeze=self.work.freeze
        )
        return flops * self.tokens_per_second_per_gpu

    @property
    def hardware_flops_per_gpu(self) -> float:
        """FLOP/s per device, recomputation included."""
        return (1 + recomputed_share(self.work)) * self.model_flops_per_gpu

    @property
    def flops_by_convention(self) -> dict[str, float]:
        """FLOP/s per device, by convention of counting."""
        m, seq_len = self.work.model, self.work.seq_len
        rate = self.tokens_per_second_per_gpu
        run = self.work.lora, self.work.freeze
        return {c.name: c.token_flops(m, seq_len, *run) * rate for c in CONVENTIONS}

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, of the peak in the GEMMs' precision."""
        return self.model_flops_per_gpu / self.device.peak(self.work.sizes.gemm)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation."""
        return self.hardware_flops_per_gpu / self.device.peak(self.work.sizes.gemm)

    @property
    def communication_seconds(self) -> dict[str, float]:
        """Seconds per step that a rank communicates along each axis, hidden or not."""
        work, costs = self.work, self.costs
        blocks = work.num_micro_batches * work.most_layers
        again = 1.0 if work.recompute == "full" else 0.0

        def total(seconds: Pass) -> float:
            return blocks * ((1 + again) * seconds.forward + seconds.backward)

        hops = 2.0 * work.num_micro_batches * work.layout.vpp
        return {
            "tp": total(costs.tensor),
            "cp": total(costs.context),
            "ep": total(costs.expert),
            "pp": hops * costs.hop,
            "dp": costs.gradients + total(costs.sharded),
        }

    @property
    def evaluation_seconds(self) -> float:
        """Seconds of a global batch of validation data: forward passes alone.

        Its memory is below that of a step, as nothing is saved for backward.
        """
        return evaluation_seconds(self.work, self.costs)

    def timeline(self, num_micro_batches: int | None = None) -> Timeline:
        """The simulated pipeline of the step, or of the first `num_micro_batches` of it."""
        count = num_micro_batches or self.work.num_micro_batches
        return pipeline_timeline(self.work, self.costs, count)


def predict(config: RunConfig, world: int, device: str) -> Prediction:
    """The cost of a step of a run config on `world` devices named `device`.

    Raises MtcliError with every rule that the config breaks, or for an unknown device.
    """
    require(config, world)
    return predict_workload(
        Workload.of(config, world), for_run(device_named(device), config, world)
    )


def predict_workload(work: Workload, device: Device) -> Prediction:
    """The cost of a workload's step."""
    costs = step_costs(work, device)
    pipeline, bubble = pipeline_seconds(work, costs)
    step = pipeline + costs.gradients_exposed + costs.optimizer + costs.overhead
    return Prediction(work, device, tuple(each_stage(work, device)), costs, step, bubble)


def recomputed_share(work: Workload) -> float:
    """FLOPs that the backward recomputes (all blocks' forwards, or attention's) over those of a
    step without."""
    m, flops = work.model, training_flops(work.model, work.seq_len, work.lora, freeze=work.freeze)
    if work.recompute == "full":
        return blocks_flops(m, work.seq_len, work.lora) / flops
    if work.recompute == "selective":
        return (forward_flops(m, work.seq_len) - forward_flops(m, 0)) / flops
    return 0.0


def blocks_flops(model: ModelConfig, seq_len: int, lora: LoraConfig, causal: bool = False) -> float:
    """FLOPs of one token's forward through the blocks and their adapters, without the head."""
    head = 2.0 * model.vocab_size * model.hidden_size
    return forward_flops(model, seq_len, causal) - head + 2.0 * count_active_adapters(model, lora)
