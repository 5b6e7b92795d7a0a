"""The suite itself: each promise names its tests, and an interrupt reaches what tests start."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_promise_names_tests_that_are_in_the_suite():
    table = (ROOT / "docs" / "concepts" / "promises.md").read_text().partition("| promise |")[2]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= 25
    for promise, proof in rows:
        names = re.findall(r"`((?:fused/)?tests/[\w/]*(?:/|test_\w+\.py))`", proof)
        assert names, f"{promise} names no test"
        assert [name for name in names if not (ROOT / name).exists()] == []


def test_what_tests_start_hears_an_interrupt_though_the_shell_ignores_it():
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import conftest
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    command, folder = [sys.executable, "-c", code], ROOT / "tests"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
