"""A command that computes imports torch without collecting garbage."""

import subprocess
import sys

PROGRAM = """
import gc, sys
from mtcli.core.runtime.launch import bring_up

assert "torch" not in sys.modules and gc.get_freeze_count() == 0
collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch" in sys.modules))
with bring_up("cpu", 60.0):
    assert "torch" in sys.modules and gc.isenabled()
    stays = gc.get_freeze_count()
    assert stays > 100_000, stays
garbage = collections.count(True)
assert garbage < 20, garbage  # 380 collections otherwise
with bring_up("cpu", 60.0):
    assert gc.get_freeze_count() <= stays, "what a process has made since is collected"
"""


def test_torch_is_imported_without_collecting_garbage_and_stays():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
