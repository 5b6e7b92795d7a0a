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
    assert errors.startswith("1 file of 0.0 MB -> ")
    assert "257 ids by bytes" in errors
    assert "\r" not in errors, "a bar is for terminals"
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
    assert "\n\nhint: mend the line" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_what_is_wrong_is_told_as_json_too(tmp_path):
    flags = ("--output", tmp_path / "x", "--tokenizer", "bytes", "--json", "-")
    code, out, errors = preprocess(tmp_path / "gone.txt", *flags)
    told = json.loads(out)
    assert (code, told["ok"]) == (2, False)
    assert [problem["message"] for problem in told["problems"]] == [
        f"there is no file or folder {tmp_path}/gone.txt"
    ]
    assert "error: there is no file or folder" in errors


def test_help_imports_neither_numpy_nor_torch():
    program = (
        "import sys; from mtcli.__main__ import run; code = run(['preprocess', '--help']); "
        "assert code == 0; bad = {'numpy', 'torch', 'tokenizers'} & set(sys.modules); "
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--split-on" in done.stdout


def test_encoding_imports_neither_torch_nor_the_fields_of_a_run():
    """A run's fields take pydantic 60 ms, a seventh of a small command."""
    program = (
        "import sys; import mtcli.core.data.preprocess; "
        "assert not {'torch', 'mtcli.core.config.schema'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def report_of(*arguments, **options):
    code, out, errors = preprocess(*arguments, "--json", "-", **options)
    assert code == 0, errors
    return json.loads(out), errors


def test_what_a_folder_holds_besides_is_told_by_its_endings(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("a.txt", "wiki.train.tokens", "b.csv", "sub/c.csv", "d.md", "e.tar.gz", "f"):
        (tmp_path / "in" / name).write_text("text\nsome\n")
    flags = ("--output", tmp_path / "x", "--tokenizer", "bytes", "--force")
    report, errors = report_of(tmp_path / "in", *flags)
    assert report["left_out"] == {".csv": 2, ".md": 1, ".tar.gz": 1, "without an ending": 1}
    assert report["documents"] == 2
    said = "left out of folders: 2 .csv, 1 .md, 1 .tar.gz, 1 without an ending; "
    assert f"{said}name such files, or all with --format" in errors
    named, errors = report_of(tmp_path / "in" / "*.md", tmp_path / "in" / "b.csv", *flags)
    assert (named["documents"], named["text_bytes"], named["left_out"]) == (2, 14, {})
    (tmp_path / "in" / "e.tar.gz").unlink()
    every, errors = report_of(tmp_path / "in", "--format", "text", *flags)
    assert (every["documents"], every["left_out"]) == (6, {}) and "left out" not in errors


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("text", "one two"),
        ("jsonl", '{"text": "one two"}\n'),
        ("csv", "id,text\n1,one two\n"),
        ("tsv", "id\ttext\n1\tone two\n"),
    ],
)
def test_any_text_is_read_as_the_format_that_is_named(tmp_path, kind, content):
    (tmp_path / "data.of-mine").write_text(content)
    flags = ("--format", kind, "--output", tmp_path / "x", "--tokenizer", "bytes")
    report, _ = report_of(tmp_path / "data.of-mine", *flags, "--no-append-eod")
    assert (report["documents"], report["tokens"]) == (1, 7)
    piped, _ = report_of("-", *flags, "--no-append-eod", "--force", stdin=content.encode())
    assert piped["sha256"] == report["sha256"]


def test_parquet_is_not_piped(tmp_path):
    flags = ("--format", "parquet", "--output", tmp_path / "x", "--tokenizer", "bytes")
    code, _, errors = preprocess("-", *flags, stdin=b"PAR1")
    assert (code, "standard input cannot be Parquet" in errors) == (2, True)


def test_documents_that_are_left_out_are_named_by_their_lines(tmp_path):
    lines = [f'{{"text": "{n}"}}' if n % 3 else "{" for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = ("--output", tmp_path / "x", "--tokenizer", "bytes", "--skip-bad")
    report, errors = report_of(tmp_path / "a.jsonl", *flags)
    where = [line.split(": not JSON")[0] for line in report["skipped_first"]]
    assert where == [f"{tmp_path}/a.jsonl:{n}" for n in range(1, 30, 3)]
    assert [line for line in errors.splitlines() if line.startswith("skipped ")] == [
        *(f"skipped {line}" for line in report["skipped_first"]),
        "skipped 10 more",
    ]


def test_a_limit_on_documents_is_a_flag_and_is_told_with_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "12345"}\n{"text": "123456"}\n')
    words = (tmp_path / "a.jsonl", "--output", tmp_path / "x", "--tokenizer", "bytes")
    code, _, errors = preprocess(*words, "--max-document-bytes", 5)
    assert code == 2
    assert f"error: {tmp_path}/a.jsonl:2: a document of more than 5 bytes" in errors
    assert "hint: raise --max-document-bytes" in errors
    report, _ = report_of(*words, "--max-document-bytes", 5, "--skip-bad")
    assert (report["documents"], report["skipped"]) == (1, {"too large": 1})
    code, _, errors = preprocess(*words, "--max-document-bytes", 0)
    assert (code, "--max-document-bytes" in errors) == (2, True)


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json", ".tokenizer"])
def test_an_output_that_names_a_file_is_refused_with_its_prefix(text, tmp_path, ending):
    code, _, errors = preprocess(text, "--output", tmp_path / f"x{ending}", "--tokenizer", "bytes")
    assert (code, f"hint: name the prefix, --output {tmp_path}/x\n" in errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_corpus_too_small_for_its_vocabulary_is_told(text, tmp_path):
    report, errors = report_of(text, "--output", tmp_path / "x", "--tokenizer", "train:50000")
    filled = report["tokenizer"]["vocab_size"]
    said = f"warning: train:50000 asked for 50,000 ids, and the corpus fills {filled}: "
    assert filled < 300 and said in errors
    flags = ("--output", tmp_path / "y", "--tokenizer", f"train:{filled}")
    assert "warning" not in report_of(text, *flags)[1]
