"""What can be freed of runs: no more than was written and left, and nothing that is in use."""

import json
import subprocess
import sys

import pytest
from run_folders import lock, lock_dead, lock_elsewhere, write_checkpoint, write_run

from mtcli.core.checkpoint.retention import lock_for_reading
from mtcli.core.runs.prunable import (
    UNUSED_SECONDS,
    find_caches,
    find_prunable,
    find_tokens,
    free,
)
from mtcli.core.runs.run_search import find_runs
from mtcli.core.runtime.work_folder import MARK
from mtcli.core.training.run_lock import lock_folder

TEMPORARY = ".metrics.0123456789abcdef.jsonl"


@pytest.fixture
def notes():
    return []


@pytest.fixture
def runs(tmp_path):
    """A folder of runs with an ended one, `a`, that has saved four times."""
    write_run(tmp_path / "runs" / "a", 40, saved=[10, 20, 30, 40], train={"keep": 2})
    return tmp_path / "runs"


def found_in(folder, notes, keep=None):
    return find_prunable(folder, find_runs(folder), keep, notes.append)


def steps_left(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_the_newest_checkpoints_stay_as_the_config_or_the_flag_says(runs, notes):
    found = found_in(runs, notes)
    assert [one.path.name for one in found] == ["step-00000010", "step-00000020"]
    assert [one.kind for one in found] == ["checkpoint"] * 2
    assert all(one.size_bytes == 1002 for one in found)
    assert [one.path.name[-2:] for one in found_in(runs, notes, keep=1)] == ["10", "20", "30"]
    assert found_in(runs, notes, keep=9) == []
    assert free(found, notes.append) == 2004 and steps_left(runs / "a") == [30, 40]
    assert notes == [] and not (runs / "a" / "run.lock").exists()


def test_multiples_that_the_config_keeps_stay(tmp_path, notes):
    train = {"keep": 1, "keep_every": 20}
    write_run(tmp_path / "a", 40, saved=[10, 20, 30, 40], train=train)
    assert [one.path.name[-2:] for one in found_in(tmp_path, notes)] == ["10", "30"]


def test_the_best_that_the_config_keeps_stay(tmp_path, notes):
    """The losses of steps 10, 20, 30 and 40 are 3, 1, 2 and 5."""
    train = {"keep": 1, "keep_best": 2}
    folder = write_run(tmp_path / "a", 40, saved=[10, 20, 30, 40], train=train)
    with (folder / "metrics.jsonl").open("a") as file:
        for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (35, 0.5), (40, 5.0)):
            file.write(json.dumps({"step": step, "valid_loss": loss}) + "\n")
    assert [one.path.name[-2:] for one in found_in(tmp_path, notes)] == ["10"]
    assert [one.path.name[-2:] for one in found_in(tmp_path, notes, keep=2)] == ["10"]


@pytest.mark.parametrize("holding", [lock, lock_elsewhere])
def test_a_run_that_is_held_is_left_as_it_is(runs, notes, holding):
    holding(runs / "a")
    (runs / "a" / TEMPORARY).touch()
    assert found_in(runs, notes, keep=1) == []
    (text,) = notes
    assert "a is left as it is: process " in text


def test_a_run_that_begins_meanwhile_is_not_touched(runs, notes):
    found = found_in(runs, notes)
    with lock_folder(runs / "a", resume=True):
        assert free(found, notes.append) == 0 and steps_left(runs / "a") == [10, 20, 30, 40]
    assert len(notes) == 2 and "stays: " in notes[0] and "held by another run" in notes[0]


def test_a_dead_run_is_pruned(runs, notes):
    lock_dead(runs / "a")
    assert free(found_in(runs, notes), notes.append) == 2004
    assert steps_left(runs / "a") == [30, 40]


def test_a_checkpoint_that_is_read_stays(runs, notes):
    found = found_in(runs, notes)
    reading = lock_for_reading(found[0].path)
    assert free(found, notes.append) == 1002 and steps_left(runs / "a") == [10, 30, 40]
    assert notes == [f"{found[0].path} stays: it is being read"]
    reading.release()


def test_what_is_not_ours_or_a_link_or_another_run_s_start_stays(runs, notes, tmp_path):
    checkpoints = runs / "a" / "checkpoints"
    (checkpoints / "step-00000010" / "mine.txt").touch()
    (checkpoints / "step-00000005").symlink_to(write_checkpoint(tmp_path / "else", 5))
    write_run(runs / "b", 1, train={"init": str(checkpoints / "step-00000020")})
    (checkpoints / "step-00000050.partial").mkdir()
    (checkpoints / "step-00000050.partial" / "mine.txt").touch()
    (checkpoints / "step-00000060.partial").symlink_to(tmp_path / "else")
    (runs / "theirs.partial").mkdir()
    (runs / "a" / ".config.toml").touch()
    (runs / "a" / TEMPORARY).symlink_to(tmp_path / "x")
    assert found_in(runs, notes) == []
    assert [text.partition(" stays: ")[2] for text in notes] == [
        "mine.txt in it is of no checkpoint",
        "a run began with it (train.init)",
    ]
    (runs / "linked").mkdir()
    (runs / "linked" / "metrics.jsonl").touch()
    (runs / "linked" / "checkpoints").symlink_to(checkpoints)
    notes.clear()
    assert found_in(runs, notes) == []
    assert any("linked is left as it is" in text and "is a link" in text for text in notes)


def test_leftovers_of_killed_processes_are_freed(runs, notes):
    checkpoints = runs / "a" / "checkpoints"
    save = checkpoints / "step-00000050.partial"
    save.mkdir()
    (save / "rank-00000.safetensors").write_bytes(bytes(50))
    work = runs / "hf.partial"
    work.mkdir()
    (work / "mtcli.lock").write_text("x")
    (work / "anything").write_bytes(bytes(70))
    (runs / "a" / TEMPORARY).write_bytes(bytes(30))
    found = found_in(runs, notes, keep=9)
    assert {one.path: one.size_bytes for one in found} == {
        work: 71, save: 50, runs / "a" / TEMPORARY: 30
    }  # fmt: skip
    assert {one.kind for one in found} == {"leftover"}
    assert free(found, notes.append) == 151 and not notes
    assert not any(one.path.exists() for one in found)


def test_unfinished_work_that_a_process_has_locked_stays(runs, notes):
    work = runs / "hf.partial"
    work.mkdir()
    mark = work / "mtcli.lock"
    mark.write_text("x")
    assert [one.path for one in found_in(runs, notes, keep=9)] == [work]
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX)"
    code += "; print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(mark)], **pipes) as process:
        process.stdout.readline()
        assert found_in(runs, notes, keep=9) == []
        process.stdin.close()


def test_caches_that_nothing_used_for_a_week_are_freed(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("rehearsals", "searches", "eval", "mine", "tokenizers"):
        (tmp_path / "mtcli" / name).mkdir(parents=True)
        (tmp_path / "mtcli" / name / "x.json").write_text(json.dumps(name))
    now = (tmp_path / "mtcli" / "eval" / "x.json").stat().st_atime
    assert find_caches(now + UNUSED_SECONDS - 60) == []
    found = find_caches(now + UNUSED_SECONDS + 60)
    assert [str(one.path.relative_to(tmp_path / "mtcli")) for one in found] == [
        "eval/x.json", "rehearsals/x.json", "searches/x.json", "tokenizers/x.json"
    ]  # fmt: skip
    assert free(found, notes.append) == len('"eval""rehearsals""searches""tokenizers"')
    assert [path.name for path in (tmp_path / "mtcli").rglob("x.json")] == ["x.json"]


def test_tokens_of_a_text_that_no_run_names_are_freed_after_a_week(tmp_path, notes):
    folder, old, used = tmp_path / "a.txt.tokenized", "0" * 16, "1" * 16
    folder.mkdir()
    (folder / MARK).write_text("mark")
    for key in (old, used, "mine"):
        (folder / f"{key}.tokenizer").mkdir()
        (folder / f"{key}.tokenizer" / "tokenizer.json").write_text("12345")
        for suffix in (".bin", ".idx", ".json"):
            (folder / f"{key}{suffix}").write_text("123")
    runs = [write_run(tmp_path / "run", 2, data={"train": [str(folder / used)]})]
    now = (folder / f"{old}.bin").stat().st_atime
    assert find_tokens(runs, now + UNUSED_SECONDS - 60) == []
    found = find_tokens(runs, now + UNUSED_SECONDS + 60)
    names = [f"{old}{suffix}" for suffix in (".bin", ".idx", ".json", ".tokenizer")]
    assert [one.path.name for one in found] == names and {one.kind for one in found} == {"cache"}
    assert free(found, notes.append) == 3 * 3 + 5 and notes == []
    left = {path.name for path in folder.iterdir()}
    assert len(left) == 9 and MARK in left and not any(name.startswith(old) for name in left)
    (folder / MARK).unlink()
    assert find_tokens(runs, now + 9 * UNUSED_SECONDS) == [], "a folder without mtcli's mark"
