"""Measuring a device and a run: the product rate that MFU divides by, and steps with timers.

The steps are those of train, on the config's layout. Timed steps come first; one more runs under
torch.profiler, whose own cost therefore touches no time that is reported.
"""

import json
import resource
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from mtcli.core.cost.hardware import GPUS
from mtcli.core.data.batches import Batches
from mtcli.core.engine import DTYPES
from mtcli.core.feed import Feed, open_feed
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.pp import OpSpan
from mtcli.core.parallel.traffic import Traffic
from mtcli.core.report import trace as traces
from mtcli.core.report.clock import Clock, clock_for, clock_offset, op_range
from mtcli.core.report.records import RANK_RECORD, Profiled, RankRecord, StepRecord
from mtcli.core.report.summary import summarized, waiting_of
from mtcli.core.runtime import Runtime
from mtcli.core.schedule.ops import Op
from mtcli.core.spec.config import RunConfig
from mtcli.core.trainer import Phases, Trainer
from mtcli.kernels.gemm import matmul

SIDE = {"cpu": 1024, "cuda": 8192}  # large enough to run at full speed; 10 to 20 ms on a core
OTHER_BOARDS = {"pcie", "nvl", "ada", "laptop"}  # of the same names, with other rates


def peak_flops(config: RunConfig, runtime: Runtime) -> float:
    """The rate of this rank's device in FLOP/s that MFU and HFU are fractions of.

    GPUs: the datasheet's dense rate of train.precision, from cost/hardware.py. CPU, and boards that
    are not listed there: the best of five products, measured on all ranks at once.
    """
    name = device_name(runtime.device)
    if name in GPUS:
        return GPUS[name].peak(config.train.precision)
    dtype, side = DTYPES[config.train.precision], SIDE[runtime.device.type]
    a, b = (torch.randn(side, side, device=runtime.device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = perf_counter()
        matmul(a, b).sum().item()
        seconds.append(perf_counter() - start)
    return 2.0 * side**3 / min(seconds)


def device_name(device: torch.device) -> str:
    """The device's name in cost/hardware.py: "cpu", "h100", ..., or "" for an unlisted board."""
    return "cpu" if device.type == "cpu" else board_name(torch.cuda.get_device_name(device))


def board_name(board: str) -> str:
    """The listed name of a board as its driver calls it, or "" where it is not listed.

    "NVIDIA A100-SXM4-80GB" is a100-80gb; the PCIe and NVL boards of a name have other rates.
    """
    words = set(board.lower().replace("-", " ").split())
    listed = [name for name in GPUS if set(name.split("-")) <= words]
    return listed[0] if listed and not words & OTHER_BOARDS else ""


class Measured(NamedTuple):
    """What rank 0 knows after a profile: every rank's record, and its own trace."""

    records: list[RankRecord]
    trace: dict[str, Any]
    device: str


def measure(config: RunConfig, runtime: Runtime, warmup: int, steps: int) -> Measured:
    """Runs warm-up steps, timed steps and a profiled one on this config's layout.

    Where the config names no data, tokens come from a counter. Collective; every rank gets all
    records. Raises MtcliError as a training step does.
    """
    trainer = Trainer(config, runtime)
    trainer.initialise()
    clock = trainer.pipeline.clock = clock_for(runtime.device)
    trainer.pipeline.around = op_range(runtime.device)
    feed = open_feed(config, trainer.groups) if config.data.train else counted(config, trainer)
    peak = peak_flops(config, runtime)
    offset = clock_offset(trainer.groups.world)
    bar = tqdm(total=warmup + steps + 1, unit="step", file=sys.stderr, disable=runtime.rank > 0)
    for _ in range(warmup):
        timed_step(trainer, feed, clock, offset)
        bar.update()
    timed = []
    for _ in range(steps):
        timed.append(timed_step(trainer, feed, clock, offset))
        bar.update()
    allocated, process = _allocated_bytes(runtime.device), _process_bytes(runtime.device)
    profiled, trace = profiled_step(trainer, feed, clock, offset)
    bar.update()
    bar.close()
    feed.close()
    record = RankRecord(
        rank=runtime.rank,
        pp_rank=trainer.groups.pp_rank,
        speaks=_is_first_replica(trainer.groups),
        steps=timed,
        profiled=profiled,
        state_bytes=trainer.state_bytes_by_kind(),
        allocated_bytes=allocated,
        process_bytes=process,
        peak_flops=peak,
    )
    told = gather_values(RANK_RECORD.dump_python(record, mode="json"), trainer.groups.world)
    records = [RANK_RECORD.validate_python(fields) for fields in told]
    return Measured(records, trace, device_name(runtime.device))


def timed_step(trainer: Trainer, feed: Feed, clock: Clock, offset: float) -> StepRecord:
    """One training step and when its parts ran, on rank 0's clock."""
    return _watched_step(trainer, feed, clock, offset)[0]


def _watched_step(
    trainer: Trainer, feed: Feed, clock: Clock, offset: float
) -> tuple[StepRecord, Traffic]:
    """A timed step and what its collectives moved and waited for."""
    ledger = trainer.groups.world.ledger
    traffic = ledger.traffic = Traffic()
    clock.begin()
    trainer.train_step(feed)
    clock.end()
    ledger.traffic = None

    def moment(stamp: float) -> float:
        return clock.seconds(stamp) + offset

    assert trainer.phases is not None, "a step leaves its phases"
    phases = Phases(*(moment(stamp) for stamp in trainer.phases))
    spans = trainer.pipeline.spans
    step = StepRecord(phases, tuple(OpSpan(op, moment(a), moment(b)) for op, a, b in spans))
    if trainer.groups.device.type == "cuda":
        traffic.waits.clear()  # the host went on, its device waited
    elif not trainer.is_sharded:  # torch's FSDP2 waits for collectives that no ledger sees
        step = step._replace(waiting=waiting_of(step, traffic, offset))
    return step, traffic


def profiled_step(
    trainer: Trainer, feed: Feed, clock: Clock, offset: float
) -> tuple[Profiled, dict[str, Any]]:
    """One training step under torch.profiler: what it showed, and its Chrome trace."""
    activities = [ProfilerActivity.CPU]
    if trainer.groups.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    around, trainer.pipeline.around = trainer.pipeline.around, _annotated
    shapes = trainer.is_sharded
    with profile(
        activities=activities, profile_memory=True, acc_events=True, record_shapes=shapes
    ) as profiler:
        begin = perf_counter()
        with record_function(traces.STEP):
            step, traffic = _watched_step(trainer, feed, clock, offset)
    trainer.pipeline.around = around
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    for axis, size in traces.sharding_bytes(traces.complete(trace["traceEvents"])):
        traffic.add(trainer.groups.axes[axis], size)
    return summarized(trace, step, (begin + offset, begin), traffic), trace


def _annotated(op: Op) -> AbstractContextManager[None]:
    return record_function(f"{traces.OP}{op}")


class Counter:
    """Samples of tokens 0, 1, 2, ... for a profile without data: the work is that of any text."""

    def __init__(self, seq_len: int, vocab_size: int, num_samples: int) -> None:
        self.seq_len, self.vocab_size, self.num_samples = seq_len, vocab_size, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, start: int, count: int) -> np.ndarray:
        """Samples start ... start + count - 1: int64 [count, seq_len + 1]."""
        first = np.arange(start, start + count, dtype=np.int64)[:, None] * self.seq_len
        return (first + np.arange(self.seq_len + 1)) % self.vocab_size

    def documents(self, start: int, count: int) -> np.ndarray:
        """Each sample is one document: int32 zeros [count, seq_len + 1]."""
        return np.zeros((count, self.seq_len + 1), np.int32)


def counted(config: RunConfig, trainer: Trainer) -> Feed:
    """A feed of counted tokens."""
    samples = config.train.steps * config.batch.global_batch_size
    counter = Counter(config.batch.seq_len, config.model.vocab_size, samples)
    return Feed(cast(Batches, counter), config, trainer.groups)


def _is_first_replica(groups: Groups) -> bool:
    place = groups.layout.attention.coordinates(groups.rank)
    return all(place[axis] == 0 for axis in place if axis != "pp")


def _allocated_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _process_bytes(device: torch.device) -> int:
    """The most that this process had resident so far (CPU), or what is taken of the device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
