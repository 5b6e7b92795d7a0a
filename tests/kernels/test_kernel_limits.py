"""What a planner reads of the kernels needs no torch."""

import subprocess
import sys


def test_limits_are_read_without_torch():
    code = "import sys, mtcli.kernels.limits; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
