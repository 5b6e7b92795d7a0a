"""The names of the Python interface: listed, typed, and imported on use alone."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from indexed_dataset import write_dataset

import mtcli
from mtcli.core.data.indexed import token_dtype

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "python.md"


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_mtcli_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import mtcli; "
    assert python(code + "print(set(sys.modules) - before)") == "{'mtcli'}"


def test_a_plan_and_a_dataset_load_no_torch():
    code = "import sys, mtcli; mtcli.plan, mtcli.tokens, mtcli.MtcliError; "
    assert python(code + "print('torch' in sys.modules, 'transformers' in sys.modules)") == (
        "False False"
    )


def test_the_page_lists_every_name_and_member():
    table = PAGE.read_text().split("## Stable names")[1]
    rows = dict(re.findall(r"^\| `mtcli\.(\w+)[^|]*\| (.*) \|$", table, re.MULTILINE))
    assert rows.keys() == set(mtcli.__all__) == set(mtcli.__all__) & set(dir(mtcli))
    for name in ("Model", "Plan"):
        members = {member for member in vars(getattr(mtcli, name)) if member[0] != "_"}
        assert set(re.findall(r"`(\w+)`", rows[name])) == members - {"answer"}, name


def test_what_is_public_is_typed():
    for name in ("open", "plan", "Model", "TokenData", "Plan"):
        one = getattr(mtcli, name)
        members = [one] if not isinstance(one, type) else vars(one).values()
        functions = [getattr(member, "fget", member) for member in members]
        for function in filter(lambda f: isinstance(f, Callable), functions):
            if function.__name__[0] != "_":
                hints = get_type_hints(function)
                variables = function.__code__.co_varnames[: function.__code__.co_argcount]
                assert set(variables) - {"self"} <= hints.keys() and "return" in hints, function


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mtcli' has no attribute 'train'"):
        mtcli.train  # noqa: B018


def test_documents_are_what_was_written(tmp_path):
    rows = [np.arange(n) + 7 for n in (3, 0, 5, 1)]
    write_dataset(tmp_path / "data", rows, token_dtype(101))
    data = mtcli.tokens(tmp_path / "data")
    assert [row.tolist() for row in data] == [row.tolist() for row in rows]
    assert data[-1].tolist() == [7] and [len(row) for row in data[1:3]] == [0, 5]
    assert len(data) == 4 and data.tokens.tolist() == np.concatenate(rows).tolist()
    assert isinstance(data.tokens.base, np.memmap) and np.shares_memory(data[2], data.tokens)
    assert data.dtype == np.uint16
    with pytest.raises(IndexError):
        data[4]
    with pytest.raises(mtcli.MtcliError, match="preprocess writes it beside"):
        data.text(0)


def test_a_plan_is_the_command_s(tmp_path):
    from mtcli.core.plan.predict import predict

    plan = mtcli.plan("tiny", gpus=2, device="h100", overrides=["parallel.tp=2"], tokens="1B")
    alone = predict(plan.config, 2, "h100")
    assert plan.step_seconds == alone.step_seconds and plan.mfu == alone.mfu
    assert plan.tokens_per_second == pytest.approx(16 * 256 / plan.step_seconds)
    assert plan.fits and plan.layout == "tp=2 micro-batch 8"
    figures = plan.as_json()
    assert figures["memory_bytes"]["total"] == pytest.approx(plan.memory_bytes, abs=5)
    assert tuple(figures["step_seconds_range"]) == plan.step_seconds_range
    assert figures["budget"]["tokens"] == 1e9
    plan.save(tmp_path / "run.toml")
    again = mtcli.plan(tmp_path / "run.toml", gpus=2, device="h100")
    assert again.config == plan.config and again.step_seconds == plan.step_seconds
    with pytest.raises(mtcli.MtcliError) as caught:
        mtcli.plan("tiny", gpus=2, overrides=["parallel.tp=3"], tokens="x")
    assert {"parallel.tp", "tokens"} <= {problem.field for problem in caught.value.problems}
