"""`mtcli curate` from the command line: kills, answers in JSON, and the shipped configuration."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import in_process, mtcli
from marks import slow
from ranks import run_ranks

from mtcli.__main__ import run
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


def write_corpus(folder, count, length):
    """Prose in two files, a tenth of it copies."""
    source = random.Random(11)
    words = (ROOT / "docs" / "concepts" / "architecture.md").read_text().split()
    for name in ("a", "b"):
        with open(folder / f"{name}.jsonl", "w") as file:
            texts = []
            for number in range(count):
                text = " ".join(source.choices(words, k=length))
                if texts and number % 10 == 0:
                    text = source.choice(texts) + " again"
                texts.append(text)
                file.write(json.dumps({"id": f"{name}{number}", "text": text}) + "\n")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_note_says_that_one_cluster_has_most_of_a_source(tmp_path):
    texts = [f"{'the same words ' * 9}{number}" for number in range(12)]
    lines = [json.dumps({"id": n, "text": t, "source": "forms"}) for n, t in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["in.jsonl", "--output", "out", "--set", "stages=['fuzzy']", "--workers", "1"]
    done = in_process("curate", *words, folder=tmp_path)
    said = "note: 12 of 12 documents of forms are one fuzzy cluster, of which 0 stays"
    assert said in done.stderr and done.returncode == 0


def kill_at(renaming, after, counter):
    """Has this process killed at some renaming of a file, of its own or a worker's."""
    command, replace = os.getpid(), Path.replace

    def counted(path, target):
        with counter.open("ab") as file:
            file.write(b".")
        is_last = counter.stat().st_size == renaming
        if is_last and not after:
            os.kill(command, signal.SIGKILL)
        replace(path, target)
        if is_last:
            os.kill(command, signal.SIGKILL)

    Path.replace = counted


def forked(words, *fault):
    """How a command ended in a fork of this process, which has all imported, with a fault in it."""
    pid = os.fork()
    if not pid:
        multiprocessing.current_process()._config["daemon"] = False  # it has workers
        if fault:
            kill_at(*fault)
        os._exit(run(words))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_ten_times(runtime, folder):
    """The files of a run, and of one that was killed ten times, by what each attempt made."""
    os.chdir(folder)
    arguments = ["curate", "a.jsonl", "b.jsonl", "--set", STAGES]
    assert run([*arguments, "--output", "whole", "--workers", "1"]) == 0
    source, codes, found = random.Random(3), [], []
    while codes.count(-signal.SIGKILL) < 10:
        number = len(codes)
        words = [*arguments, "--output", "killed", "--resume", "--workers", str(1 + number % 2)]
        fault = source.randint(1, 4), source.random() < 0.7, Path(f"count-{number}")
        codes.append(forked(words, *fault))
        assert codes[-1] in (0, -signal.SIGKILL), codes
        if codes[-1] == 0:
            found.append(files(Path("killed")))
            shutil.rmtree("killed")
    codes.append(forked([*arguments, "--output", "killed", "--resume"]))
    return files(Path("whole")), [*found, files(Path("killed"))], codes


def test_a_run_killed_ten_times_and_resumed_writes_the_same_bytes(tmp_path):
    write_corpus(tmp_path, 60, 60)
    ((whole, found, codes),) = run_ranks(1, killed_ten_times, tmp_path)
    assert codes[-1] == 0, codes
    assert all(made == whole for made in found)


@slow("three megabytes in two processes, 8 s")
def test_the_memory_that_is_said_beforehand_is_enough_and_not_twice_as_much(tmp_path):
    write_corpus(tmp_path, 600, 350)
    arguments = ["curate", "a.jsonl", "b.jsonl", "--output", "o", "--workers", "1"]
    said = json.loads(mtcli(*arguments, "--dry-run", "--json", "-", folder=tmp_path).stdout)
    for _ in range(2):  # numba compiles its loops in the first run of a machine, and keeps them
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *arguments, "--force"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    peak = 1024 * int(done.stdout.split()[-2])
    assert peak < said["memory_bytes"] < 2 * peak
    written = sum(path.stat().st_size for path in (tmp_path / "o").glob("shard-*"))
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


def test_a_wrong_command_line_ends_with_2_and_a_hint(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    ray = ["--engine", "ray", "--address", "h:1", "--workers", "2"]
    quality = ["train-quality", "--good", "a.jsonl", "--output", "q"]
    for words, said in (
        (["none.jsonl", "--output", "o"], "there is no file or folder none.jsonl"),
        (["a.jsonl", "--output", "o", "--config", "c.toml"], "there is no config file"),
        (["a.jsonl", "--output", "a.jsonl"], "a.jsonl is a file"),
        (["a.jsonl", "--output", "o", "--text-key", "body"], 'no key "body"'),
        (["a.jsonl", "--output", "o", "--address", "head:6379"], "joins no cluster"),
        (["a.jsonl", "--output", "/proc/x"], "--output: /proc/x cannot be written"),
        (["a.jsonl", "--output", "o", "--set", "fuzzy.threshold=0"], "a number from 0.01 to 1"),
        (["a.jsonl", "--output", "o", *ray], "its own cores"),
        (quality, "--bad: no input"),
        (["a.jsonl", "--good", "a.jsonl", "--output", "q"], "a word too many"),
        (["a.jsonl", "--output", "o", "--set", "decontaminate.tasks=['t']"], "t cannot be read"),
        ([*quality, "--bad", "a.jsonl", "--dry-run"], "--dry-run is for corpora"),
        ([*quality, "--bad", "a.jsonl", "--set", "nope.x=1"], "--set is for corpora"),
        ([*quality, "--bad", "a.jsonl", "--engine", "ray"], "--engine is for corpora"),
    ):
        done = in_process("curate", *words, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr, f"{words}: {done.stderr}"
        assert "hint:" in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not (tmp_path / "q").exists(), words


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
