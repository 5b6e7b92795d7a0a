"""Runs `mtcli plan --dry-run`: the real trainer of any rank of any world, with fake tensors.

The training classes are built with fake tensors in a fake world, and run a real step, whose live
bytes are counted. The plan, which has run a few blocks of one micro-batch, is compared with them.
"""

from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from mtcli.core.config import rules
from mtcli.core.config.counts import counted
from mtcli.core.config.errors import failed, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.memory import Memory, rank_memory
from mtcli.core.plan.predict import Prediction
from mtcli.core.plan.search import with_batch
from mtcli.core.plan.workload import Workload
from mtcli.core.rehearse.fake_world import fake_trainer
from mtcli.core.training.loader import synthetic_loader
from mtcli.core.training.step import Trainer

KINDS = ("weights", "gradients", "optimizer")
TOLERANCE = 0.05  # of the activations' peak; state has to be equal to the byte


@dataclass(frozen=True)
class DryRun:
    """Bytes that a rank's step allocated, measured vs planned."""

    rank: int
    device: str  # whose kernels were assumed
    micro_batches: int
    state: dict[str, int]  # bytes by kind
    activation_peak: int  # bytes of everything besides the state, at most
    peak_at: str
    evaluation_peak: int | None  # the same of an evaluation, where the config has any
    predicted: Memory
    seconds: float

    @property
    def title(self) -> str:
        """The title: the rank, its micro-batches and where memory peaked, in one line."""
        step = f"a step of {self.micro_batches} micro-batches, kernels of a {self.device}"
        return f"Dry run of rank {self.rank}: {step}; {self.seconds:.1f} s; peak in {self.peak_at}"

    @property
    def problems(self) -> list[str]:
        """The numbers on which the plan and the step disagree, each in words."""
        problems = [
            f"{kind}: the step holds {self.state[kind]:,} bytes and the plan says {said:,}"
            for kind, said in self._predicted_state().items()
            if said != self.state[kind]
        ]
        counted, said = self.activation_peak, round(self.predicted.besides_state)
        if abs(_apart(said, counted)) > TOLERANCE:
            words = f"activations: the step holds {counted:,} bytes at its peak and the plan says"
            problems.append(f"{words} {said:,}, {abs(_apart(said, counted)):.1%} off")
        if self.evaluation_peak is not None and self.evaluation_peak > (1 + TOLERANCE) * said:
            words = f"evaluation: it holds {self.evaluation_peak:,} bytes at its peak"
            problems.append(f"{words} and the plan says that a step's {said:,} are enough")
        return problems

    def as_json(self) -> dict[str, Any]:
        """The JSON of `mtcli plan --dry-run --json`."""
        return {
            "rank": self.rank,
            "state_bytes": sum(self.state.values()),
            "predicted_state_bytes": sum(self._predicted_state().values()),
            "activation_peak_bytes": self.activation_peak,
            "evaluation_peak_bytes": self.evaluation_peak,
            "predicted_activation_bytes": round(self.predicted.besides_state),
            "seconds": self.seconds,
            "state_bytes_by_kind": self.state,
            "peak_at": self.peak_at,
            "micro_batches": self.micro_batches,
            "kernels": self.device,
            "problems": self.problems,
        }

    def rows(self) -> list[list[str]]:
        """Rows of a table: kind, bytes counted, bytes planned, how far apart."""
        said = self._predicted_state() | {"activations, peak": round(self.predicted.besides_state)}
        counted = self.state | {"activations, peak": self.activation_peak}
        said["in all"], counted["in all"] = sum(said.values()), sum(counted.values())
        if self.evaluation_peak is not None:  # of the activations' bytes, which it shares
            said["evaluation, at most"] = said["activations, peak"]
            counted["evaluation, at most"] = self.evaluation_peak
        return [
            [kind, f"{size:,}", f"{said[kind]:,}", f"{_apart(said[kind], size):+.2%}"]
            for kind, size in counted.items()
        ]

    def require_agreement(self) -> None:
        """Raises MtcliError (exit 1) with every number on which plan and step disagree."""
        if self.problems:
            hint = "the plan's formulas or the engine's allocations have changed: report both"
            raise failed(f"rank {self.rank}: {'; '.join(self.problems)}", hint)

    def _predicted_state(self) -> dict[str, int]:
        return {kind: round(getattr(self.predicted, kind)) for kind in KINDS}


def dry_run(config: RunConfig, plan: Prediction, rank: int | None) -> DryRun:
    """Runs a step of a rank (the fullest one where None) of a planned config.

    The step has the micro-batches of `shortened`. Raises MtcliError where there is no such rank.
    """
    # TRAINING_RULES refuse what cannot be trained; its step can be counted nevertheless.
    work, device, world = plan.work, plan.device, plan.work.layout.world
    rules.require(config, world, *rules.ENGINE_RULES, without=rules.TRAINING_RULES)
    rank = plan.fullest_rank if rank is None else rank
    if not 0 <= rank < world:
        raise wrong(
            f"--rank {rank} is not one of {counted(world, 'rank')}", f"0 to {world - 1}", "--rank"
        )
    start, config = perf_counter(), shortened(config, work)
    with fake_trainer(config, world, rank, device.name == "cpu", device.widens) as (trainer, live):
        live.where = lambda: _moment(trainer)
        state = trainer.state_bytes_by_kind()
        loader = synthetic_loader(config, trainer.groups)
        live.begin()
        with closing(loader):
            trainer.train_step(loader)
            trainer.strategy.settle()
            step_peak, peak_at = live.peak, live.peak_at
            live.begin()
            if config.train.eval_every:
                trainer.evaluate(loader)
    state_bytes = sum(state.values())
    return DryRun(
        rank=rank,
        device="cpu" if device.name == "cpu" else "gpu",
        micro_batches=trainer.micro_batches,
        state=state,
        activation_peak=step_peak - state_bytes,
        peak_at=peak_at,
        evaluation_peak=live.peak - state_bytes if config.train.eval_every else None,
        predicted=rank_memory(work, plan.stages, rank),
        seconds=perf_counter() - start,
    )


def shortened(config: RunConfig, work: Workload) -> RunConfig:
    """The config with fewer micro-batches but the same peak: pp fill the pipeline, two more follow.

    gpipe needs all of them, as it keeps all alive; interleaving needs 2 * pp and the remainder of
    the last group.
    """
    pp, count = work.layout.pp, work.num_micro_batches
    few = 2 * pp + count % pp if work.layout.vpp > 1 else pp + 2
    if pp == 1 or work.schedule_name != "gpipe":
        count = min(count, few)
    return with_batch(config, count * work.micro_batch_size * work.layout.batch_shards)


def _moment(trainer: Trainer) -> str:
    pipeline = trainer.pipeline
    return "the update" if pipeline.spans else str(pipeline.current or "the data")


def _apart(said: float, counted: float) -> float:
    return said / counted - 1 if counted else float(said > 0)
