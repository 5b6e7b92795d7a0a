"""The command: flags, what is printed where, and exit codes."""

import json
import subprocess
import sys

import pytest
from command_line import mtcli

from mtcli.core.data.indexed import Indexed


def preprocess(*arguments, stdin=b""):
    done = mtcli("preprocess", *arguments, stdin=stdin)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    return tmp_path / "a.txt"


def test_numbers_come_first_and_the_files_last(text, tmp_path):
    code, out, errors = preprocess(text, "--output", tmp_path / "x", "--tokenizer", "bytes")
    assert (code, Indexed(tmp_path / "x").num_tokens) == (0, 16)
    assert errors.startswith("1 files of 0.0 MB -> ")
    assert "257 ids by bytes" in errors
    assert "tokens/s" in errors
    assert out.splitlines()[-4:] == [
        str(tmp_path / f"x{suffix}") for suffix in (".tokenizer", ".bin", ".json", ".idx")
    ]


def test_json_on_stdout_is_all_of_stdout(text, tmp_path):
    flags = ("--split-on", "blank", "--workers", 1, "--no-append-eod", "--json", "-")
    _, out, _ = preprocess(text, "--output", tmp_path / "x", "--tokenizer", "bytes", *flags)
    report = json.loads(out)
    wanted = {"documents": 2, "tokens": 12, "workers": 1, "append_eod": False, "split_on": "blank"}
    assert {name: report[name] for name in wanted} == wanted
    assert report["outputs"][-1] == str(tmp_path / "x.idx")


def test_standard_input_and_a_json_file(tmp_path):
    lines = b'{"body": "one"}\n{"body": 2}\n'
    flags = ("--text-key", "body", "--skip-bad", "--append-eod", "--json", tmp_path / "r.json")
    code, out, _ = preprocess(
        "-", "--output", tmp_path / "x", "--tokenizer", "bytes", *flags, stdin=lines
    )
    report = json.loads((tmp_path / "r.json").read_text())
    assert (code, report["documents"], report["skipped"]) == (0, 1, {"not text": 1})
    assert "skipped: not text" in out


def test_wrong_input_exits_2_with_file_line_and_hint(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n')
    code, out, errors = preprocess(
        tmp_path / "a.jsonl", "--output", tmp_path / "x", "--tokenizer", "bytes"
    )
    assert (code, out) == (2, "")
    assert f"error: {tmp_path}/a.jsonl:2: not JSON" in errors
    assert "\n\nhint: mend it" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_what_is_wrong_is_told_as_json_too(tmp_path):
    flags = ("--output", tmp_path / "x", "--tokenizer", "bytes", "--json", "-")
    code, out, errors = preprocess(tmp_path / "gone.txt", *flags)
    told = json.loads(out)
    assert (code, told["ok"]) == (2, False)
    assert [problem["message"] for problem in told["problems"]] == [f"no input {tmp_path}/gone.txt"]
    assert "error: no input" in errors


def test_help_imports_neither_numpy_nor_torch():
    program = (
        "import sys; from mtcli.__main__ import run; code = run(['preprocess', '--help']); "
        "assert code == 0; bad = {'numpy', 'torch', 'tokenizers'} & set(sys.modules); "
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--split-on" in done.stdout


def test_encoding_imports_no_torch():
    program = "import sys; import mtcli.core.data.preprocess; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
