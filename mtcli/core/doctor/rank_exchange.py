"""Has ranks exchange data: the sum that each must see, and the time that it takes.

By hand, a second `mtcli doctor` starts the ranks, in a process that can be ended.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress

import torch

from mtcli.core.config.errors import failed
from mtcli.core.doctor.diagnosis import Diagnosis, broken, ok
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.transport.shared_memory import SharedMemory
from mtcli.core.profile.device_rates import collectives, world_axis
from mtcli.core.runtime.launch import Runtime

LIMIT = 120.0  # seconds for the start of ranks and their exchange
TIMEOUT = 60.0  # seconds that a rank waits for another
NAME = "exchange"
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
)
ELEMENTS = 100_003  # of no multiple of any number of ranks


def exchange_among(runtime: Runtime) -> Diagnosis:
    """The exchange of all ranks of a run, the same on each. Raises MtcliError for wrong sums."""
    ranks = runtime.world
    if ranks == 1:
        return ok("one rank has nobody to exchange with", ranks=1)
    axis = world_axis(runtime)
    x = torch.arange(ELEMENTS, dtype=torch.float64, device=runtime.device)
    total = all_reduce(x * (runtime.rank + 1), axis)
    wrong = (total != x * (ranks * (ranks + 1) // 2)).sum().double().reshape(1)
    if number := int(all_reduce(wrong, axis)):
        message = f"{number:,} of {ranks * ELEMENTS:,} sums of {ranks} ranks are wrong"
        raise failed(message, "run it again with --device cpu: then it is the GPUs' links")
    sums = [one for one in collectives(runtime, axis) if one.kind == "all_reduce"]
    shared = isinstance(axis.transport, SharedMemory)
    by = "shared memory" if shared else "NCCL" if runtime.device.type == "cuda" else "gloo"
    times = ", ".join(f"{one.moved:,} bytes in {one.seconds * 1e6:,.0f} us" for one in sums)
    moved, seconds = sums[-1].moved, sums[-1].seconds
    found = f"{ranks} ranks by {by} sum {times} ({moved / seconds / 1e9:.2g} GB/s)"
    timed = [[one.moved, one.seconds] for one in sums]
    return ok(found, ranks=ranks, transport=by, all_reduce=timed)


def exchange_of_new_ranks(nproc: int, gpus: int, device: str) -> Diagnosis:
    """The exchange of ranks that this starts, as `--nproc` of other commands does."""
    chosen = "cpu" if device == "auto" and gpus < nproc else device
    words = ["doctor", "--only", NAME, "--nproc", str(nproc), "--device", chosen, "--json", "-"]
    command = [sys.executable, "-m", "mtcli", *words]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    by_hand = f"mtcli {' '.join(words[:-2])}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:  # type: ignore[call-overload]
        try:
            out, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher then ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
            process.kill()
            return broken(f"{nproc} ranks did not end within {LIMIT:.0f} s", by_hand, ranks=nproc)
    return _answered(out, errors, nproc, by_hand)


def _answered(out: str, errors: str, nproc: int, by_hand: str) -> Diagnosis:
    """Reads a diagnosis from the JSON of the process, or from the problem in it."""
    try:
        answer = json.loads(out)
    except ValueError:
        last = (errors.strip() or "without a word").splitlines()[-1]
        return broken(f"{nproc} ranks ended: {last}", by_hand, ranks=nproc)
    if not answer["ok"]:
        problem = answer["problems"][0]
        return broken(problem["message"], problem["hint"] or by_hand, ranks=nproc)
    (check,) = answer["checks"]
    return Diagnosis(**{field: check[field] for field in Diagnosis._fields})
