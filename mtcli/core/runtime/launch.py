"""Start-up of a process: its rank, device and threads, and the start of worker processes.

Reads the environments of torchrun (and of `accelerate launch` and `--nproc`, which set the same
variables) and of Slurm. Imports torch only inside functions, as allocator settings must precede the
import.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING

from mtcli.core.config.errors import wrong
from mtcli.core.runtime.attempts import Attempt, alone, keeps_store
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.import_torch import import_torch
from mtcli.core.runtime.slurm import slurm_task, whole
from mtcli.core.runtime.variables import INTERFACES, restored
from mtcli.core.runtime.worker_errors import (
    LAUNCHED,
    GoesOn,
    again,
    end_rank,
    first_failure,
    hand_over,
    telling_of_lost_peers,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SEGMENTS = "PYTORCH_ALLOC_CONF"  # torch's settings of its allocators
ONE_PRESS = 2.0  # seconds in which signals are of one Ctrl-C


@dataclass(frozen=True)
class Runtime:
    """This process's rank, device and recorder."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: "torch.device"
    recorder: FlightRecorder = field(default_factory=FlightRecorder)  # of its collectives
    attempt: Attempt = field(default_factory=alone)


def environment_world(environ: Mapping[str, str] = os.environ) -> int | None:
    """The world size that a launcher has set; None in a process started by hand."""
    ranks = _ranks(environ)
    return ranks[1] if ranks else None


def environment_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process's rank, as its launcher says; 0 in a process started by hand."""
    ranks = _ranks(environ)
    return ranks[0] if ranks else 0


def speaks_first() -> bool:
    """Says whether this process is the one that speaks for a command before its ranks start: that
    which starts them, or the first one of another launcher's."""
    return not environment_rank() and LAUNCHED not in os.environ


def launch(
    nproc: int, arguments: list[str], max_restarts: int = 0, goes_on: GoesOn = again
) -> None:
    """Runs `mtcli <arguments>` in `nproc` workers and returns once all are done.

    Raises MtcliError with the first failure's own text.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // nproc))}
    settings = ALLOCATOR | threads
    command = [sys.executable, "-m", "mtcli", *arguments]
    with restored(*settings, LAUNCHED):
        os.environ.update(settings | os.environ | {LAUNCHED: "1"})
        _run_workers(nproc, command, max_restarts, goes_on)


def keep_freed_blocks() -> None:
    """Has this process's allocator keep freed blocks, as that of workers does."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # of glibc
        for name, value in ALLOCATOR.items():
            if name not in os.environ:
                # A threshold of -1 is never reached, as one that is no int.
                libc.mallopt(MALLOPT[name], int(value) if int(value) < 2**31 else -1)


@contextmanager
def bring_up(
    device: str,
    timeout: float,
    matmul: str = "fast",
    debug_collectives: bool = False,
    cuda_graphs: bool = False,
    goes_on: GoesOn = again,
) -> Iterator[Runtime]:
    """Creates the process groups and their watchdog, and yields this process's Runtime.

    A rank that waits for another for `timeout` seconds ends the run, with the hint `goes_on`. An
    error inside is passed to mtcli's launcher, which reports the first one, once.
    """
    with restored(SEGMENTS, *INTERFACES):
        if not cuda_graphs:
            let_segments_grow()
        try:
            ranks = _ranks(os.environ) or (0, 1, 0, 1)
            with telling_of_lost_peers(ranks[0], goes_on):
                runtime, store = _start(ranks, device, timeout, matmul, debug_collectives)
                with _watched(runtime, store, timeout, goes_on):
                    yield runtime
        except (Exception, KeyboardInterrupt) as error:
            if LAUNCHED in os.environ:
                hand_over(error)
            raise
        finally:
            torch = sys.modules.get("torch")
            if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


# Of a scheduler, a terminal's Ctrl-C and Ctrl-\\, and a lost ssh.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class StopSignal:
    """Remembers a signal of STOPS, so that a run can save after its step; a second one ends the
    run.

    A terminal sends Ctrl-C to every process, and the launcher forwards it to its ranks: signals
    within ONE_PRESS seconds count as one.
    """

    def __init__(self) -> None:
        self.received, self.at = 0, 0.0
        for number in STOPS:
            if not _is_ignored(number):
                signal.signal(number, self._receive)

    @property
    def name(self) -> str:
        """The name of the signal that came, here or to another rank."""
        return signal.Signals(self.received).name if self.received else "a signal to another rank"

    def _receive(self, number: int, frame: object) -> None:
        if not self.received:
            self.received, self.at = number, monotonic()
        elif monotonic() - self.at > ONE_PRESS:
            raise KeyboardInterrupt


def _is_ignored(number: signal.Signals) -> bool:
    """Whether the process was started to ignore the signal, as nohup does for a hang-up."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _ranks(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, local world) from a launcher's variables."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = ("0", "1", environ["RANK"], environ["WORLD_SIZE"])
        values = [environ.get(n, d) for n, d in zip(names, defaults, strict=True)]
        rank, world, local_rank, local_world = map(whole, names, values)
        if rank >= world:
            hint = "ranks are 0 to WORLD_SIZE - 1; a launcher such as torchrun sets both"
            raise wrong(f"RANK={rank} of WORLD_SIZE={world}", hint)
        return rank, world, local_rank, local_world
    task = slurm_task(environ)
    return task and task[:4]


def _start(
    ranks: tuple[int, int, int, int],
    device: str,
    timeout: float,
    matmul: str,
    debug_collectives: bool,
) -> "tuple[Runtime, dist.Store | None]":
    import_torch()
    import torch

    rank, world, local_rank, local_world = ranks
    where = compute_device(device, local_rank)
    if where.type == "cpu":
        torch.set_num_threads(_threads(local_world))
        set_matmul(matmul)
    else:
        torch.cuda.set_device(where)
        set_gpu_matmul(matmul)
    if world == 1 and not keeps_store():
        return Runtime(rank, world, local_rank, local_world, where), None
    import torch.distributed as dist

    from mtcli.core.runtime.health.consistency import ConsistencyGuard
    from mtcli.core.runtime.rendezvous import attempt_alone, meet

    if world == 1:
        attempt = attempt_alone(timeout)
        return Runtime(rank, world, local_rank, local_world, where, attempt=attempt), None

    store, attempt = meet(rank, world, timeout, where)
    check = None
    if debug_collectives:
        check = ConsistencyGuard(dist.PrefixStore("calls", store.clone()), rank).compare  # type: ignore[attr-defined]  # not in torch's stub

    from mtcli.core.runtime.health.cuda_mark import CudaMark

    recorder = FlightRecorder(check, CudaMark if where.type == "cuda" else None)
    return Runtime(rank, world, local_rank, local_world, where, recorder, attempt), store


@contextmanager
def _watched(
    runtime: Runtime, store: "dist.Store | None", timeout: float, goes_on: GoesOn
) -> Iterator[None]:
    """Runs this rank's watchdog inside, if there are other ranks."""
    if store is None:
        yield
        return
    import torch.distributed as dist

    from mtcli.core.runtime.health.watchdog import Watchdog

    # A connection of its own: what waits on one holds up every other thread that uses it.
    watch_store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]  # not in torch's stub
    end = partial(end_rank, goes_on=goes_on)
    watchdog = Watchdog(runtime.recorder, watch_store, runtime.rank, runtime.world, timeout, end)
    watchdog.start(os.getpid())
    try:
        yield
        watchdog.leave()
    except Exception as error:
        if isinstance(error, RuntimeError):
            watchdog.explain()
        watchdog.give_up()
        raise
    finally:
        watchdog.stop()


def let_segments_grow() -> None:
    """Has CUDA's caching allocator use expandable segments, which fragment less where shapes change
    from step to step (experts, documents). torch reads the setting at its first allocation.

    CUDA graphs allocate from a private pool, whose segments do not expand.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch's older name of it
        os.environ.setdefault(SEGMENTS, "expandable_segments:True")


def compute_device(name: str, local_rank: int) -> "torch.device":
    """The device of a rank of this machine, by train.device. Raises MtcliError where there is
    none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise wrong("there is no CUDA device here", "--set train.device=cpu", "device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        message = f"local rank {local_rank} has no GPU: this machine has {count}"
        raise wrong(message, f"--nproc {count} at most, or --set train.device=cpu", "device")
    return torch.device("cuda", local_rank)


def _threads(local_world: int) -> int:
    """The number of threads: OMP_NUM_THREADS for a single process on its machine, else this rank's
    share of the cores, as torchrun sets the variable to 1 for several."""
    asked = os.environ.get("OMP_NUM_THREADS", "") if local_world == 1 else ""
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores() // local_world)


def set_matmul(matmul: str) -> None:
    """Chooses the fastest GEMMs on CPU that are as accurate as torch's own: `kernels.gemm` for
    bfloat16; oneDNN for float32, but on Intel's CPUs.

    torch's `medium` precision lets oneDNN choose. On AMD it computes true float32 at up to 2.1
    times MKL's speed. On Intel without AMX MKL is faster by 2 to 17 % (benchmarks/bench_gemm.py),
    and with AMX oneDNN rounds to bfloat16. Other CPUs may round too, so a measured error decides,
    and not the CPU's name.
    """
    import torch

    from mtcli.kernels.gemm import choose_gemm_dtype
    from mtcli.kernels.limits import IS_INTEL

    if matmul == "strict":
        return
    choose_gemm_dtype()
    if IS_INTEL:
        return
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(192, 192, generator=generator) for _ in range(2))
    for x, y in ((a, b), (a, b.T), (a.T, b)):
        exact = x.double() @ y.double()
        error = ((x @ y).double() - exact).norm() / exact.norm()
        if error > 2e-6:  # 8 times what float32 sums of 192 products show, 1/1000 of bfloat16's
            torch.set_float32_matmul_precision("highest")
            return


def set_gpu_matmul(matmul: str) -> None:
    """Has a GPU sum 16-bit GEMMs in float32 throughout, and float32 ones in TF32 if asked.

    By default torch lets cuBLAS round partial sums to 16 bits where it splits a long contraction
    over multiprocessors (split-K, as in gradients of weights).
    """
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if matmul == "tf32":
        torch.set_float32_matmul_precision("high")


def _run_workers(nproc: int, command: list[str], max_restarts: int, goes_on: GoesOn) -> None:
    import logging

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mtcli.core.runtime.rendezvous import LoopbackRendezvous

    logging.disable(logging.ERROR)  # elastic's loggers; what fails comes as an exception
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    try:
        # Elastic would make a folder of its own for why ranks failed, and leave it.
        with TemporaryDirectory(prefix="mtcli-") as logs:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=f"mtcli-{os.getpid()}",
                rdzv_backend="loopback",
                max_restarts=max_restarts,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                signals_to_handle=",".join(one.name for one in STOPS if not _is_ignored(one)),
            )
            elastic_launch(config, command[0])(*command[1:])
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        raise first_failure(error, goes_on) from None


# glibc gives freed blocks back to the system and faults them in again at the next step; keeping
# them made a training step 1.25 to 1.5 times faster (benchmarks/bench_train.py). Read at exec; in a
# process that runs, mallopt(3) sets the same.
MALLOPT = {"MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2}
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
