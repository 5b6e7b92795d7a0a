import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mtcli.commands.ranks import run_ranks
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import TrainConfig
from mtcli.core.runtime import launch as bringing_up
from mtcli.core.runtime import launch as launch_module
from mtcli.core.runtime.launch import ALLOCATOR, StopSignal, bring_up, cores, environment_world
from mtcli.core.runtime.worker_errors import (
    LAUNCHED,
    LostPeer,
    first_failure,
    telling_of_lost_peers,
)
from mtcli.kernels import limits

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
JOB = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
SLURM = JOB | STEP | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, None),
        (TORCHRUN, 8),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1),
        (SLURM, 8),
        (SLURM | TORCHRUN | {"WORLD_SIZE": "4"}, 4),
        (JOB, None),  # a batch script, in which nobody has started ranks
        (JOB | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in an allocation
        ({"RANK": "0"}, None),
    ],
)
def test_the_world_is_what_the_launcher_says(environ, world):
    assert environment_world(environ) == world


def test_torchrun_and_slurm_name_local_ranks_in_their_own_ways():
    assert bringing_up._ranks(TORCHRUN) == (3, 8, 1, 2)
    assert bringing_up._ranks(SLURM) == (5, 8, 1, 8)
    per_node = {"SLURM_STEP_TASKS_PER_NODE": "5,3"}
    assert bringing_up._ranks(SLURM | per_node) == (5, 8, 1, 3)
    assert bringing_up._ranks(SLURM | per_node | {"SLURM_NODEID": "0"}) == (5, 8, 1, 5)
    assert bringing_up._ranks({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2, 1, 2)


@pytest.mark.parametrize(("asked", "threads"), [("", cores()), ("x", cores()), ("1", 1), ("3", 3)])
def test_alone_there_is_no_process_group_and_every_core_or_what_is_asked_is_used(
    monkeypatch, asked, threads
):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    with bring_up("cpu", 10.0) as alone:
        assert (alone.rank, alone.world, alone.device.type) == (0, 1, "cpu")
        assert not torch.distributed.is_initialized()
        assert torch.get_num_threads() == threads


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_asking_for_a_gpu_that_is_not_there_says_what_to_do():
    with pytest.raises(MtcliError) as caught, bring_up("cuda", 10.0):
        pass
    (problem,) = caught.value.problems
    assert (
        problem.message == "there is no CUDA device here"
        and problem.hint == "--set train.device=cpu"
    )


def test_more_ranks_than_gpus_is_an_error_with_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MtcliError) as caught:
        bringing_up.compute_device("auto", 1)
    (problem,) = caught.value.problems
    assert problem.message == "local rank 1 has no GPU: this machine has 1"
    assert "--nproc 1" in problem.hint
    assert bringing_up.compute_device("auto", 0) == torch.device("cuda", 0)


def test_the_fast_product_is_as_accurate_as_float32():
    with bring_up("cpu", 10.0, "fast"):
        a, b = torch.randn(64, 300), torch.randn(300, 64)
        exact = a.double() @ b.double()
        assert ((a @ b).double() - exact).norm() / exact.norm() < 2e-6


def test_a_product_that_rounds_to_16_bits_is_refused(monkeypatch):
    plain = torch.Tensor.__matmul__

    def rounding(x, y):
        if x.dtype == torch.float32:
            x, y = x.bfloat16().float(), y.bfloat16().float()
        return plain(x, y)

    monkeypatch.setattr(limits, "IS_INTEL", False)
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    torch.set_float32_matmul_precision("highest")
    with bring_up("cpu", 10.0, "fast"):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("is_intel", "precision"), [(True, "highest"), (False, "medium")])
def test_mkl_s_product_is_taken_on_intel_and_an_exact_one_of_onednn_elsewhere(
    monkeypatch, is_intel, precision
):
    plain = torch.Tensor.__matmul__
    exact = lambda x, y: plain(x.double(), y.double()).to(x.dtype)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "__matmul__", exact)
    monkeypatch.setattr(limits, "IS_INTEL", is_intel)
    torch.set_float32_matmul_precision("highest")
    with bring_up("cpu", 10.0, "fast"):
        assert torch.get_float32_matmul_precision() == precision


def test_strict_takes_torchs_own_product():
    torch.set_float32_matmul_precision("highest")
    with bring_up("cpu", 10.0, "strict"):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as bring-up goes, and torch's switches of its products as they come."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    switches = torch.backends.cuda.matmul
    before = {name: getattr(switches, name) for name in REDUCED}
    yield switches
    for name, value in before.items():
        setattr(switches, name, value)


REDUCED = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]


@pytest.mark.parametrize(
    ("matmul", "precision"), [("fast", "highest"), ("strict", "highest"), ("tf32", "high")]
)
def test_a_gpu_sums_in_float32_and_takes_tf32_where_it_is_asked_for(gpu, matmul, precision):
    with bring_up("cuda", 10.0, matmul) as alone:
        assert alone.device == torch.device("cuda", 0)
        assert torch.get_float32_matmul_precision() == precision
        assert not any(getattr(gpu, name) for name in REDUCED)


@pytest.mark.parametrize(
    ("settings", "cuda_graphs", "read"),
    [
        ({}, False, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, True, {}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, False, {"PYTORCH_CUDA_ALLOC_CONF": "a:b"}),
    ],
    ids=["nothing", "graphs", "the user's", "the user's, by the older name"],
)
def test_segments_grow_unless_graphs_are_recorded_or_the_user_says_how(
    monkeypatch, settings, cuda_graphs, read
):
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    monkeypatch.setattr(os, "environ", kept | settings)
    with bring_up("cpu", 10.0, cuda_graphs=cuda_graphs):
        assert {name: v for name, v in os.environ.items() if "ALLOC_CONF" in name} == read


def test_a_run_of_one_rank_leaves_no_variable_in_its_process():
    before = dict(os.environ)
    assert run_ranks(1, TrainConfig(device="cpu"), lambda runtime: runtime.world) == 1
    assert dict(os.environ) == before and environment_world() is None


@pytest.mark.parametrize("failure", [None, RuntimeError])
def test_a_launcher_sets_its_workers_variables_and_leaves_none(monkeypatch, failure):
    before, seen = dict(os.environ), {}

    def run_workers(*arguments):
        seen.update(os.environ)
        if failure:
            raise failure

    monkeypatch.setattr(launch_module, "_run_workers", run_workers)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before["OMP_NUM_THREADS"] = "3"
    with pytest.raises(failure) if failure else nullcontext():
        launch_module.launch(2, ["train"])
    assert seen == ALLOCATOR | before | {LAUNCHED: "1"} and dict(os.environ) == before


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_remembered_and_a_later_one_interrupts(handlers, monkeypatch, number):
    now = [100.0]
    monkeypatch.setattr(launch_module, "monotonic", lambda: now[0])
    stop = StopSignal()
    assert stop.received == 0
    os.kill(os.getpid(), number)
    assert stop.received == number
    now[0] += launch_module.ONE_PRESS - 0.1
    os.kill(os.getpid(), signal.SIGINT)  # the launcher's, of the same press
    now[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)


class Failures:
    """What the elastic launcher raises, of failures (exit code, timestamp, message) by rank."""

    def __init__(self, failures):
        names = ("exitcode", "timestamp", "message")
        self.failures = {
            rank: SimpleNamespace(**dict(zip(names, failure, strict=True)))
            for rank, failure in failures.items()
        }


def told(cause, message):
    """What a worker leaves in its file."""
    return {
        "message": "",
        "extraInfo": {"code": 1, "cause": cause, "problems": [[message, "h", ""]], "hint": ""},
    }


RAISED = {"message": "ValueError: no (a.py:1)", "extraInfo": {"code": 1, "cause": "told"}}
QUIET = {"message": "", "extraInfo": {"code": 1, "cause": "lost"}}
LOST, WATCHED = told("lost", "it broke"), told("watched", "it waited")
WRONG = {"code": 2, "cause": "told", "problems": [["it is wrong", "do this", "a.b"]]}
TOLD = {"message": "", "extraInfo": WRONG | {"hint": "or that"}}


@pytest.mark.parametrize(
    ("failures", "text", "code"),
    [
        ({0: (1, 5, LOST), 3: (-9, 5, "")}, "rank 3 failed: it was killed by SIGKILL", 1),
        ({0: (1, 4, LOST), 1: (2, 5, TOLD)}, "wrong\n\nhint: do this\n\nhint: or that", 2),
        ({0: (1, 4, LOST), 1: (1, 5, "")}, "rank 1 failed: it ended with exit code 1", 1),
        ({0: (1, 4, LOST), 1: (1, 5, RAISED)}, "rank 1 failed: ValueError: no (a.py:1)", 1),
        ({0: (1, 6, RAISED), 1: (1, 5, "")}, "rank 1 failed: it ended with exit code 1", 1),
        ({0: (-15, 5, ""), 1: (1, 6, LOST)}, "rank 0 failed: it was killed by SIGTERM", 1),
        ({0: (-15, 6, ""), 1: (1, 6, LOST)}, "error: it broke", 1),
        ({0: (-9, 5, ""), 1: (1, 6, WATCHED), 2: (2, 4, TOLD)}, "error: it waited", 1),
        ({0: (1, 4, QUIET), 1: (1, 5, LOST)}, "error: it broke", 1),
        ({0: (1, 4, QUIET), 1: (-15, 5, "")}, "rank 1 failed: it was killed by SIGTERM", 1),
    ],
    ids=["killed", "told", "first", "raised", "earliest", "terminated", "lost", "watched", "quiet"]
    + ["quieter"],
)
def test_of_several_failures_the_cause_is_told(failures, text, code):
    error = first_failure(Failures(failures))
    assert text in str(error) and int(error.code) == code


def test_a_rank_that_was_killed_is_told_with_what_is_saved_by_then():
    error = first_failure(Failures({1: (-9, 5, "")}), lambda: "look there")
    assert str(error).endswith("rank 1 failed: it was killed by SIGKILL\n\nhint: look there")


def test_a_worker_that_was_interrupted_interrupts_the_launcher():
    error = first_failure(Failures({0: (1, 5, LOST), 1: (130, 5, "")}))
    assert isinstance(error, KeyboardInterrupt)


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:28: "
GLOO += "Connection reset by peer. This is typically caused by a remote worker hanging. GLHF!"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError(GLOO), "Read error [127.0.0.1]:28: Connection reset by peer"),
        (torch.distributed.DistNetworkError("Broken pipe\nframe #0"), "Broken pipe"),
        (torch.distributed.DistStoreError("wait timeout"), "wait timeout"),
    ],
)
def test_a_connection_that_breaks_is_told_in_a_line(monkeypatch, error, what):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(LostPeer) as caught, telling_of_lost_peers(3):
        raise error
    said = "rank 3 does not reach another rank, or the run's store at node7, port 29500: " + what
    assert caught.value.problems[0].message == said and caught.value.code == 1
    hint = "look for the rank that failed first; run the same command again"
    assert caught.value.problems[0].hint == hint


def test_an_error_of_another_kind_is_left_alone():
    with pytest.raises(RuntimeError, match="^shapes differ$"), telling_of_lost_peers(0):
        raise RuntimeError("shapes differ")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's allocator")
def test_the_only_rank_keeps_freed_blocks_as_workers_do_from_their_environment():
    code = """
import resource, sys
from mtcli.core.runtime.launch import keep_freed_blocks
if sys.argv[1:]:
    keep_freed_blocks()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**25)
before = faults()
for _ in range(20):
    bytearray(2**25)
print(faults() - before)
"""
    path = os.pathsep.join(sys.path)

    def faults(*words, **more):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **more}
        return int(subprocess.check_output([sys.executable, "-c", code, *words], env=env))

    fresh = 20 * 2**25 // resource.getpagesize()
    assert faults() > fresh // 600  # huge pages of 512 at the most
    assert max(faults("rank"), faults(**ALLOCATOR)) < fresh // 1000
    assert faults("rank", MALLOC_MMAP_MAX_="65536", MALLOC_TOP_PAD_="0") > fresh // 600
