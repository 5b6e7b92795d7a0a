"""`mtcli curate` from the command line: kills, answers in JSON, and the shipped configuration."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import mtcli

from mtcli.core.curate.config import load_config
from mtcli.core.data.blend_order import blend_indices

ROOT = Path(__file__).parent.parent.parent
# Tells its own peak: what the system says of a child counts its parent's memory before the exec.
PEAK = """
import atexit, re
atexit.register(lambda: print(*re.findall(r"VmHWM.*", open("/proc/self/status").read())))
from mtcli.__main__ import main
main()
"""
STAGES = 'stages=["normalise", "language", "exact", "fuzzy"]'


@pytest.fixture
def corpus(tmp_path):
    """Three megabytes of prose in two files, a tenth of it copies."""
    source = random.Random(11)
    words = (ROOT / "docs" / "architecture.md").read_text().split()
    for name in ("a", "b"):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            texts = []
            for number in range(600):
                text = " ".join(source.choices(words, k=350))
                if texts and number % 10 == 0:
                    text = source.choice(texts) + " again"
                texts.append(text)
                file.write(json.dumps({"id": f"{name}{number}", "text": text}) + "\n")
    return tmp_path


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(900)
def test_a_run_killed_ten_times_and_resumed_writes_the_same_bytes(corpus):
    arguments = ["curate", "a.jsonl", "b.jsonl", "--set", STAGES]
    began = time.monotonic()
    assert mtcli(*arguments, "--output", "whole", "--workers", "1", folder=corpus).returncode == 0
    seconds = time.monotonic() - began
    want, source, kills = files(corpus / "whole"), random.Random(3), 0
    while kills < 10:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtcli", *arguments, "--output", "killed", "--resume"]
            + ["--workers", str(1 + kills % 2)],
            cwd=corpus, env=os.environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.wait(source.uniform(0.2, 1.0) * seconds) == 0
            assert files(corpus / "killed") == want
            shutil.rmtree(corpus / "killed")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    done = mtcli(*arguments, "--output", "killed", "--resume", folder=corpus)
    assert done.returncode == 0, done.stderr
    assert files(corpus / "killed") == want


def test_the_memory_that_is_said_beforehand_is_enough_and_not_twice_as_much(corpus):
    arguments = ["curate", "a.jsonl", "b.jsonl", "--output", "o", "--workers", "1"]
    said = json.loads(mtcli(*arguments, "--dry-run", "--json", "-", folder=corpus).stdout)
    for _ in range(2):  # numba compiles its loops in the first run of a machine, and keeps them
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *arguments, "--force"],
            cwd=corpus,
            check=True,
            capture_output=True,
        )
    peak = 1024 * int(done.stdout.split()[-2])
    assert peak < said["memory_bytes"] < 2 * peak
    written = sum(path.stat().st_size for path in (corpus / "o").glob("shard-*"))
    assert written < said["output_bytes"] < said["disk_bytes"] and said["documents"] == 1200


def test_the_answer_in_json_has_the_report_and_the_time(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "x"}\n')
    arguments = ["curate", "a.jsonl", "--output", "out", "--set", "stages=['exact']"]
    planned = json.loads(mtcli(*arguments, "--dry-run", "--json", "-", folder=tmp_path).stdout)
    assert (planned["documents"], planned["text_bytes"], planned["files"]) == (2, 2, 1)
    assert planned["memory_bytes"] > 0 and not (tmp_path / "out").exists()
    told = json.loads(mtcli(*arguments, "--json", "-", folder=tmp_path).stdout)
    assert told["ok"] and told["documents"] == 1 and told["seconds"] > 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report == {key: told[key] for key in report}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.jsonl", "--output", "o"], "no input none.jsonl"),
        (["a.jsonl", "--output", "o", "--config", "c.toml"], "there is no config file"),
        (["a.jsonl", "--output", "a.jsonl"], "a.jsonl is a file"),
        (["a.jsonl", "--output", "o", "--text-key", "body"], 'no key "body"'),
        (["a.jsonl", "--output", "o", "--address", "head:6379"], "joins no cluster"),
        (["a.jsonl", "--output", "/proc/x"], "--output: /proc/x cannot be written"),
        (["a.jsonl", "--output", "o", "--set", "fuzzy.threshold=0"], "a number from 0.01 to 1"),
        (
            ["a.jsonl", "--output", "o", "--engine", "ray", "--address", "h:1", "--workers", "2"],
            "its own cores",
        ),
        (["train-quality", "--good", "a.jsonl", "--output", "q"], "--bad: no input"),
        (["a.jsonl", "--good", "a.jsonl", "--output", "q"], "a word too many"),
        (["a.jsonl", "--output", "o", "--set", "decontaminate.tasks=['t']"], "t cannot be read"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_hint(words, said, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    done = mtcli("curate", *words, folder=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "hint:" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_configuration_of_mt_nlg_has_its_weights_and_draws_within_one_of_them():
    config = load_config(str(ROOT / "docs" / "curate-mt-nlg.toml"))
    assert sum(config.blend.values()) == pytest.approx(1.0, abs=1e-9) and len(config.blend) == 15
    assert set(config.fuzzy.priority) == set(config.blend)
    weights, count = list(config.blend.values()), 20_000
    owner, drawn = blend_indices(weights, count).owner, [0] * 15
    for number, dataset in enumerate(owner.tolist(), start=1):
        drawn[dataset] += 1
        assert abs(drawn[dataset] - number * weights[dataset]) < 1
    assert all(abs(n - count * w) < 1 for n, w in zip(drawn, weights, strict=True))


def test_what_a_blend_misses_and_leaves_out_is_said(tmp_path):
    path = tmp_path / "in.jsonl"
    records = [{"text": name, "source": name} for name in ("wiki", "crawl")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = ["--set", "blend.wiki=1.0", "--set", "blend.books=2.0"]
    done = mtcli(
        "curate", path, "--output", tmp_path / "out", "--set", 'stages=["exact"]', *weights
    )
    assert "note: books: a weight in [blend], and no documents" in done.stderr
    assert "note: crawl: documents, and no weight in [blend]" in done.stderr


@pytest.mark.parametrize("flag", [("--dry-run",), ("--set", "nope.x=1"), ("--engine", "ray")])
def test_flags_of_corpora_are_refused_beside_train_quality(flag, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "x"}\n')
    words = ("train-quality", "--good", path, "--bad", path, "--output", tmp_path / "q.bin")
    done = mtcli("curate", *words, *flag)
    assert done.returncode == 2 and f"{flag[0]} is for corpora" in done.stderr
    assert not (tmp_path / "q.bin").exists()
