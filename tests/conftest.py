"""What every test shares: one thread, no network, and properties that are the same each run."""

import os
import re
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared with the ranks
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# a plan for `cpu` is made with made-up numbers: tests measure no machine
os.environ.setdefault("MTCLI_CALIBRATION", str(Path(__file__).parent / "calibration.json"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# what tests start keeps the bytecode of mtcli and tests, which each would compile for 0.3 s
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if not any(Path("/dev").glob("nvidia*")):  # before triton: what it makes is then interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As in a background job of a shell. What tests start would inherit it, and some send SIGINT;
    # a handler is not inherited, and this one leaves this process as deaf as it was.
    signal.signal(signal.SIGINT, lambda number, frame: None)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

pytest_plugins = ["processor_time"]

# Files of few tests, by which xdist orders them, that would be the last to end
LONG = re.compile(r"/test_(docs|fused_models|bench_gpu|two_agents|ray|cluster_files)\.py")

settings.register_profile("mtcli", deadline=None, derandomize=True, database=None)
settings.load_profile("mtcli")


@pytest.fixture(autouse=True)
def _torch_as_it_comes():
    """What a command sets for its process (threads, how products are made) ends with the test."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.set_float32_matmul_precision("highest")
    if products := sys.modules.get("mtcli.kernels.gemm"):
        products.set_bfloat16_in_float32(False)


@pytest.fixture(autouse=True)
def _no_rank_of_a_launcher():
    """A test that leaves a launcher's variables would make later ones ranks of it."""
    yield
    left = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    for name in left:
        del os.environ[name]
    assert not left


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests share its fixtures, and so a process; in parity those of a model its one-rank
    run. Pages share none, and begin first: one may take longer than what is left at the end."""
    from xdist.scheduler import LoadScopeScheduling

    class OneProcessPerFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, *_ = nodeid.split("::")
            if path.endswith("/test_parity.py"):
                return nodeid.partition(": ")[0]
            return nodeid if path.endswith("/test_docs.py") else path

        def _assign_work_unit(self, node):
            long = next((scope for scope in self.workqueue if LONG.search(scope)), None)
            if long:
                self.workqueue.move_to_end(long, last=False)
            super()._assign_work_unit(node)

    return OneProcessPerFile(config, log)


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def _has_cuda():
    import torch

    return torch.cuda.is_available()
