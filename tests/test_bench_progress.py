"""Benchmarks show each row when it is measured, through a pipe too, and the bar on stderr alone."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
BENCH = """
from progress import in_turn, say
print("title")
for name in in_turn(["ours", "theirs"], 2):
    say(f"{name} 1.0")
    input()
"""


@pytest.mark.timeout(120)
def test_a_row_comes_before_the_next_is_measured(tmp_path):
    (tmp_path / "gpu").mkdir()
    for name in ("run.py", "progress.py", "arguments.py", "machine.py", "gpu/record.py"):
        shutil.copy(FOLDER / name, tmp_path / name)
    (tmp_path / "bench_one.py").write_text(BENCH)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, str(tmp_path / "run.py")]
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as run:
        said = [run.stdout.readline() for _ in range(3)]
        assert said == ["\n", "== one (1 of 1)\n", "title\n"]
        for name in ("ours", "theirs", "ours", "theirs"):
            assert run.stdout.readline() == f"{name} 1.0\n"
            run.stdin.write("\n")  # which the benchmark waits for
        out, errors = run.communicate()
    (path,) = (tmp_path / "results").iterdir()
    assert out == f"\nwrote {path}\n" and "theirs" in errors and "4" in errors
    assert run.returncode == 0
