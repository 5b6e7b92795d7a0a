"""The suite itself: `make test` holds every promise, and an interrupt reaches what tests start."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow import SLOW

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "promises.md").read_text().partition("| promise |")[2]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE))
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def files_of(row):
    """The files of tests that a row names, by path or name; a folder is all of its files."""
    for name in re.findall(r"`((?:tests/(?:\w+/)*)?test_\w+\.py|tests/(?:\w+/)+)`", row):
        if name.endswith("/"):
            yield from sorted((ROOT / name).rglob("test_*.py"))
        else:
            yield ROOT / name if "/" in name else FILES[name]


def names_of(file):
    """The names of a file's tests."""
    nodes = ast.parse(file.read_text()).body
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_the_table_of_promises_is_read():
    assert len(ROWS) >= 25


@pytest.mark.parametrize("promise", ROWS)
def test_make_test_runs_some_test_of_every_file_that_holds_a_promise(promise):
    files = list(files_of(ROWS[promise]))
    assert files, "no test holds it"
    for file in files:
        left_out = {test for test, cases in SLOW.get(file.name, {}).items() if not cases}
        assert names_of(file) - left_out, f"{file.name} is left to make test-all"


@pytest.mark.parametrize("name", SLOW)
def test_what_make_test_leaves_out_is_there(name):
    assert set(SLOW[name]) <= names_of(FILES[name])


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
