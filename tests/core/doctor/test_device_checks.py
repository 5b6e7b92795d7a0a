"""Checks of devices, by planted GPUs, and the GEMM on this CPU."""

from types import SimpleNamespace

import pytest
import torch

from mtcli.core.doctor import devices as checked
from mtcli.core.doctor import readings

GIB = 2**30
# Of `nvidia-smi topo -m` on a machine with four GPUs, two by two on NVLink; colours included.
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\tSYS\tPIX\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t32-63\t1
NIC0\tPIX\tPIX\tSYS\tSYS\t X \t\t

Legend:
  X    = Self
"""


@pytest.fixture
def plant(monkeypatch):
    """Plants GPUs of 80 GiB as torch and nvidia-smi would show them."""

    def planted(gpus=2, listed=None, cuda="13.0", free=79, errors="0", peers=True, topology=""):
        names = [f"0000:{i}:00.0" for i in range(gpus if listed is None else listed)]
        table = "".join(f"{i}, 580.65, {errors}\n" for i in range(gpus))
        answers = {"topo": topology, f"--query-gpu={checked.QUERY}": table}
        board = SimpleNamespace(name="NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: board)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(readings, "names_in", lambda _: names)
        monkeypatch.setattr(readings, "nvidia_smi", lambda first, *_: answers[first])

    return planted


def test_gpus_are_listed_with_what_is_free(plant):
    plant()
    diagnosis = checked.devices("auto")
    text = "2 x NVIDIA H100 80GB HBM3, 79.0 GiB free on each; driver 580.65, CUDA 13.0"
    assert (diagnosis.state, diagnosis.found) == ("ok", text)


@pytest.mark.parametrize(
    ("planted", "state", "found", "fix"),
    [
        ({"free": 71}, "warn", "others use GPU 0, 1", "nvidia-smi"),
        ({"errors": "3"}, "broken", "memory errors on GPU 0, 1", "--gpu-reset -i 0,1"),
        ({"errors": "[N/A]"}, "ok", "driver 580.65", ""),
        ({"gpus": 0, "listed": 0}, "ok", "the CPU computes", ""),
        ({"gpus": 0, "listed": 8, "cuda": None}, "broken", "8 GPUs, and a torch", "pip install"),
        ({"gpus": 0, "listed": 8}, "broken", "8 GPUs, and torch's CUDA 13.0 finds none", "driver"),
    ],
)
def test_devices_have_their_states(planted, state, found, fix, plant):
    plant(**planted)
    diagnosis = checked.devices("auto")
    assert diagnosis.state == state and found in diagnosis.found and fix in diagnosis.fix


def test_a_gpu_that_is_asked_for_must_be_there_and_none_need_be_used(plant):
    plant(gpus=0, listed=0)
    assert checked.devices("cuda").state == "broken"
    plant(gpus=0, listed=8)
    assert checked.devices("cpu").state == "ok"


def test_links_are_counted_by_kind(plant):
    assert checked.link_kinds(TOPOLOGY) == {"NV18": 2, "SYS": 4}
    plant(gpus=4, topology=TOPOLOGY)
    diagnosis = checked.links("auto")
    assert diagnosis.state == "ok" and diagnosis.found.startswith("2 pairs by NV18, 4 pairs by SYS")
    plant(gpus=4, topology=TOPOLOGY, peers=False)
    diagnosis = checked.links("auto")
    assert diagnosis.state == "warn" and "12 of 12 ways without peer access" in diagnosis.found
    plant(gpus=1)
    assert checked.links("auto").found.startswith("skipped")
    assert checked.links("cpu").numbers == {"gpus": 0}


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr("mtcli.core.plan.measure_cpu.SECONDS", 0.01)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_gemm_has_its_rate_and_the_error_of_float32(brief):
    diagnosis = checked.gemm("cpu")
    assert diagnosis.state == "ok" and "GFLOP/s in fp32, 1024 x 1024 x 1024" in diagnosis.found
    assert 1e9 < diagnosis.numbers["flops"] < 1e13 and diagnosis.numbers["error"] < 2e-6


def test_the_rate_is_that_of_the_measured_seconds(brief, monkeypatch):
    monkeypatch.setattr(checked, "gemm_seconds", lambda *_: 0.5)
    assert checked.gemm("cpu").found.startswith("4 GFLOP/s"), "2 x 1024 ** 3 in half a second"


def test_a_gemm_that_is_a_hundredth_wrong_is_broken(brief, monkeypatch):
    monkeypatch.setattr(checked, "matmul", lambda a, b: 1.01 * (a @ b))
    diagnosis = checked.gemm("cpu")
    assert diagnosis.state == "broken" and diagnosis.found == "its result is wrong by 1.0e-02"
    monkeypatch.setattr(checked, "matmul", lambda a, b: (a @ b) * torch.nan)
    assert checked.gemm("cpu").state == "broken"


def test_a_slow_gpu_is_a_warning(brief, monkeypatch):
    monkeypatch.setattr(checked, "device_name", lambda _: "h100")
    monkeypatch.setattr(checked, "gemm_seconds", lambda *_: 2 * 1024**3 / 30e12)
    diagnosis = checked.gemm("cpu")
    assert diagnosis.state == "warn" and "30,000 GFLOP/s" in diagnosis.found
    assert "of 67,000" in diagnosis.found, "the datasheet's 67 TFLOP/s of float32"
