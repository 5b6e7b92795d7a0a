"""Kernels keep their budgets (budgets.py), and which of them are compiled (budgets_seen.py)."""

import importlib
import json
import pkgutil
import warnings

import budgets
import budgets_seen
import pytest
from budgets import HANDFUL, OWN, ROWS, first_of, over_budget
from marks import slow

import mtcli.kernels
from mtcli.kernels.triton_launch import HAS_TRITON, TritonKernel

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


@needs_triton
def test_a_handful_of_kernels_keep_their_budgets():
    if budgets_seen.changes():
        warnings.warn(budgets_seen.line(), RuntimeWarning, stacklevel=1)
    rows = [row for row in ROWS if row[:3] in HANDFUL]
    assert {row[:3] for row in rows} == HANDFUL
    assert over_budget(rows) == []


@needs_triton
@slow("hundreds of kernels of some seconds, if one may have changed")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", [80, 90])
def test_all_kernels_keep_their_budgets(arch):
    if not budgets_seen.changes():
        pytest.skip(budgets_seen.line())
    assert over_budget([row for row in ROWS if row.arch == arch]) == []


def test_the_table_has_every_kernel():
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(mtcli.kernels.__path__, "mtcli.kernels.")
        if not module.name.endswith(".ahead_of_time")  # imports triton
    ]
    kernels = [
        x for module in modules for x in vars(module).values() if isinstance(x, TritonKernel)
    ]
    called = {name for kernel in kernels for name in kernel.function.__code__.co_names}
    launched = {k.name for k in kernels if k.function.__name__ not in called}
    assert {row.kernel for row in ROWS} == launched


def test_an_exception_is_of_some_row():
    unused = [p for p in OWN if not any(first_of({p: True}, row) for row in ROWS)]
    assert unused == []


def test_a_kernel_is_over_budget_by_what_its_row_may_have():
    code = {"spill_stores": 33, "spill_loads": 32, "load_bits": 64, "store_bits": 95, "units": {}}
    kernel = {"error": "", "verdict": ["spill", "smem"], "code": code}
    prefetched, narrow = budgets.PREFETCHED[0], budgets.Row(90, "bf16", "adamw", "adamw._adamw")
    assert budgets.problems(narrow, [kernel]) == ["smem", "spill_stores 33 B > 32"]
    assert budgets.problems(prefetched, [kernel]) == [
        "load_bits 64 < 96", "no cp.async: its rows are not prefetched", "smem",
        "spill_stores 33 B > 32", "store_bits 95 < 96",
    ]  # fmt: skip
    refused = kernel | {"error": "no such instruction", "code": None}
    assert budgets.problems(narrow, [refused]) == ["no such instruction"]


@needs_triton
def test_a_changed_file_is_named_until_all_kernels_were_compiled(monkeypatch, tmp_path):
    seen = tmp_path / "seen.json"
    now = budgets_seen.hashes()
    files = {path.name for path in (budgets_seen.ROOT / "mtcli" / "kernels").rglob("*.py")}
    assert files <= {name.rpartition("/")[2] for name in now}
    assert {"triton", "mtcli/kernels/choices.json", "tests/kernels/budgets.py"} <= now.keys()
    seen.write_text(json.dumps(now | {"mtcli/kernels/norm.py": "another"}))
    monkeypatch.setattr(budgets_seen, "SEEN", seen)
    stale = "kernel budgets: changed (mtcli/kernels/norm.py): all are compiled until `make budgets`"
    assert budgets_seen.line().startswith(stale)
    monkeypatch.setattr(budgets, "over_budget", lambda rows: [f"{rows[0]}: smem"])
    with pytest.raises(SystemExit, match=f"(?s)over their budgets.*{ROWS[0]}: smem"):
        budgets_seen.compile_all()
    assert budgets_seen.line().startswith(stale)
    monkeypatch.setattr(budgets, "over_budget", lambda rows: [])
    budgets_seen.compile_all()
    assert budgets_seen.line().startswith("kernel budgets: unchanged since last seen green (hash ")
