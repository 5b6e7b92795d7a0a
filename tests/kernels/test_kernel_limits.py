"""What a planner reads of the kernels without torch is what they do."""

import subprocess
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from mtcli.kernels.dropout import dropout_reference
from mtcli.kernels.limits import RANDOM_BITS_PEAK


def test_limits_are_read_without_torch():
    code = "import sys, mtcli.kernels.limits; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_dropout_mask_on_a_cpu_takes_as_many_numbers_at_its_peak():
    rows, columns = 512, 256
    y, numbers = torch.ones(rows, columns), torch.arange(rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        dropout_reference(y, numbers, 5, 0.5)
    events = profiler.profiler.kineto_results.events()
    moments = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = [sum(size for _, size in moments[: i + 1]) for i in range(len(moments))]
    numbers_alive = max(alive) / (8 * rows * columns)
    assert RANDOM_BITS_PEAK <= numbers_alive < RANDOM_BITS_PEAK + 0.1
