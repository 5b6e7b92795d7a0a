"""What a planner reads of the kernels without torch is what they do."""

import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mtcli.kernels.limits import random_bytes
from mtcli.kernels.random import keep_mask, keep_rows


def test_limits_are_read_without_torch():
    code = "import sys, mtcli.kernels.limits; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_mask_takes_as_many_numbers_at_its_peak():
    rows, columns = 512, 256
    index, firsts = torch.arange(rows * columns), torch.arange(rows) * columns
    of_all = _peak(lambda: keep_mask(5, index, 0.5)) + index.nbytes
    assert of_all == pytest.approx(random_bytes(rows * columns, columns, cpu=False), rel=0.05)
    in_blocks = _peak(lambda: keep_rows(5, firsts, columns, 0.5))
    assert in_blocks == pytest.approx(random_bytes(rows * columns, columns, cpu=True), rel=0.01)


def _peak(function):
    """Bytes that a function allocates at its peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    moments = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = [sum(size for _, size in moments[: i + 1]) for i in range(len(moments))]
    return max(alive)
