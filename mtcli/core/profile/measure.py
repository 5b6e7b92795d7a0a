"""Measures a run: steps with timers, and one under a profiler.

The steps are those of train, on the config's layout. Timed steps come first; one more runs under
torch.profiler, whose own cost therefore touches no time that is reported.
"""

import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mtcli.core.config.schema import RunConfig
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.profile import trace as traces
from mtcli.core.profile.clock import Clock, clock_for, clock_offset, op_range
from mtcli.core.profile.records import RANK_RECORD, Profiled, RankRecord, StepRecord
from mtcli.core.profile.summary import summarized, waiting_of
from mtcli.core.runtime.health.traffic import Traffic
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.peak_flops import device_name, peak_flops
from mtcli.core.runtime.progress import progress_bar
from mtcli.core.training.loader import MicroBatchLoader, open_loader, synthetic_loader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Phases, Trainer


class Measured(NamedTuple):
    """The result of a profile on rank 0: every rank's record, and its own trace."""

    records: list[RankRecord]
    trace: dict[str, Any]
    device: str


def measure(config: RunConfig, runtime: Runtime, warmup: int, steps: int) -> Measured:
    """Runs warm-up steps, timed steps and a profiled one on this config's layout.

    Where the config names no data, tokens come from a counter. Collective; every rank gets all
    records. Raises MtcliError as a training step does.
    """
    trainer = Trainer(config, runtime)
    initialise(trainer)
    clock = trainer.pipeline.clock = clock_for(runtime.device)
    trainer.pipeline.around = op_range(runtime.device)
    open_data = open_loader if config.data.train else synthetic_loader
    loader = open_data(config, trainer.groups)
    peak = peak_flops(config.train.precision, config.train.matmul, runtime.device)
    offset = clock_offset(trainer.groups.world)
    bar = progress_bar("profile", warmup + steps + 1, "step", quiet=runtime.rank > 0)
    timed = []
    for _ in range(warmup + steps):
        timed.append(timed_step(trainer, loader, clock, offset))
        bar.update()
    on_gpu = runtime.device.type == "cuda"
    allocated = torch.cuda.max_memory_allocated(runtime.device) if on_gpu else None
    process = _process_bytes(runtime.device)
    profiled, trace = profiled_step(trainer, loader, clock, offset)
    bar.update()
    bar.close()
    loader.close()
    coordinates = trainer.groups.layout.attention.coordinates(runtime.rank)
    record = RankRecord(
        rank=runtime.rank,
        pp_rank=trainer.groups.pp_rank,
        speaks=not any(index for axis, index in coordinates.items() if axis != "pp"),
        steps=timed[warmup:],
        profiled=profiled,
        state_bytes=trainer.state_bytes_by_kind(),
        allocated_bytes=allocated,
        process_bytes=process,
        peak_flops=peak,
    )
    gathered = gather_values(RANK_RECORD.dump_python(record, mode="json"), trainer.groups.world)
    records = [RANK_RECORD.validate_python(fields) for fields in gathered]
    return Measured(records, trace, device_name(runtime.device))


def timed_step(
    trainer: Trainer, loader: MicroBatchLoader, clock: Clock, offset: float
) -> StepRecord:
    """Runs one training step and times its parts, on rank 0's clock."""
    return _watched_step(trainer, loader, clock, offset)[0]


def _watched_step(
    trainer: Trainer, loader: MicroBatchLoader, clock: Clock, offset: float
) -> tuple[StepRecord, Traffic]:
    """Runs a timed step; returns also the traffic and waits of its collectives."""
    recorder = trainer.groups.world.recorder
    traffic = recorder.traffic = Traffic()
    clock.begin()
    trained = trainer.train_step(loader)
    clock.end()
    recorder.traffic = None

    def moment(stamp: float) -> float:
        return clock.seconds(stamp) + offset

    assert trainer.phases is not None, "a step leaves its phases"
    phases = Phases(*(moment(stamp) for stamp in trainer.phases))
    spans = trainer.pipeline.spans
    shifted = tuple(OpSpan(op, moment(a), moment(b)) for op, a, b in spans)
    step = StepRecord(phases, shifted, trained.tokens)
    if trainer.groups.device.type == "cuda":
        traffic.waits.clear()  # the host went on, its device waited
    elif trainer.strategy.recorded:
        step = step._replace(waiting=waiting_of(step, traffic, offset))
    return step, traffic


def profiled_step(
    trainer: Trainer, loader: MicroBatchLoader, clock: Clock, offset: float
) -> tuple[Profiled, dict[str, Any]]:
    """Runs one training step under torch.profiler; returns its summary and its Chrome trace."""
    activities = [ProfilerActivity.CPU]
    if trainer.groups.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    around = trainer.pipeline.around
    trainer.pipeline.around = lambda op: record_function(f"{traces.OP}{op}")
    shapes = not trainer.strategy.recorded  # FSDP2's collectives have their sizes in the trace
    with profile(
        activities=activities, profile_memory=True, acc_events=True, record_shapes=shapes
    ) as profiler:
        begin = perf_counter()
        with record_function(traces.STEP):
            step, traffic = _watched_step(trainer, loader, clock, offset)
    trainer.pipeline.around = around
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    for axis, size in traces.sharding_bytes(traces.complete(trace["traceEvents"])):
        traffic.add(trainer.groups.axes[axis], size)
    return summarized(trace, step, (begin + offset, begin), traffic), trace


def _process_bytes(device: torch.device) -> int:
    """The process's peak resident bytes so far (CPU), or the bytes in use on the device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
