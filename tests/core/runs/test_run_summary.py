"""Runs summed up: how each goes, what its last steps say, and what differs between configs."""

import json
import time

import pytest
from run_folders import (
    add_events,
    age,
    lock,
    lock_dead,
    lock_elsewhere,
    loss_at,
    write_checkpoint,
    write_run,
)

from mtcli.core.config.errors import MtcliError
from mtcli.core.runs.records_tail import TAIL_BYTES, last_records, last_with
from mtcli.core.runs.run_search import find_all_runs, find_runs, require_one_run
from mtcli.core.runs.run_summary import summaries, varied_fields
from mtcli.core.runs.run_tables import listed_table

NOW = 1_800_000_000.0


def summed(folder, now=None):
    (run,) = summaries([folder], now)
    return run


def test_figures_are_those_of_the_last_steps(tmp_path):
    run = summed(write_run(tmp_path / "a", 20, of=50, valid_every=5, saved=[20]))
    assert (run.step, run.steps, run.tokens, run.seconds) == (20, 50, 640, 10.0)
    assert run.loss == pytest.approx(sum(map(loss_at, range(11, 21))) / 10, abs=1e-12)
    assert run.last_loss == loss_at(20)
    assert run.valid_loss == 1.1 * loss_at(20) and run.host == "node7"
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert run.size_bytes == sum(path.stat().st_size for path in files) > 1000


def test_a_run_that_nobody_holds_has_finished_stopped_or_failed(tmp_path):
    assert summed(write_run(tmp_path / "whole", 20)).state == "finished"
    assert summed(write_run(tmp_path / "told", 20, of=50, saved=[10, 20])).state == "stopped"
    died = summed(write_run(tmp_path / "died", 20, of=50, saved=[10]))
    assert died.state == "failed" and "step 20 and saved step 10 last" in died.reason
    write_run(tmp_path / "nan", 20, of=50, saved=[20])
    add_events(tmp_path / "nan", {"event": "failed", "step": 20, "reason": "loss nan"})
    assert summed(tmp_path / "nan")[1:3] == ("failed", "loss nan")
    add_events(tmp_path / "nan", {"event": "resumed", "step": 20})
    assert summed(tmp_path / "nan").state == "stopped"
    early = write_run(tmp_path / "early", 20, of=50, saved=[20])
    add_events(early, {"event": "stopped_early", "step": 20, "reason": "no lower loss"})
    add_events(early, {"event": "saved", "step": 20, "bytes": 1})
    assert summed(early)[1:3] == ("finished", "stopped early: no lower loss")
    (early / "events.jsonl").write_text("")
    add_events(early, {"event": "stopped_early", "step": 10, "reason": "it has gone on since"})
    assert summed(early).state == "stopped"


def test_a_lock_of_a_living_process_is_a_run_under_way_and_of_a_dead_one_is_dead(tmp_path):
    folder = write_run(tmp_path / "a", 20)
    age(folder, NOW - 1e6)
    lock(folder)
    assert summed(folder, NOW).state == "running"
    lock_dead(folder)
    dead = summed(folder, NOW)
    assert dead.state == "dead lock" and dead.reason.endswith("has died")


def test_a_run_of_another_machine_is_under_way_while_its_files_change(tmp_path):
    folder = write_run(tmp_path / "a", 20)
    lock_elsewhere(folder)
    for silence, state in ((-30, "running"), (599, "running"), (601, "dead lock")):
        age(folder, NOW - silence)
        run = summed(folder, NOW)
        assert (run.state, run.host) == (state, "node9")
    assert "no file has changed for 601 s" in run.reason
    text = (
        (folder / "metrics.jsonl").read_text().replace('"step_seconds": 0.5', '"step_seconds": 60')
    )
    (folder / "metrics.jsonl").write_text(text)
    for silence, state in ((1199, "running"), (1201, "dead lock")):  # 20 steps
        age(folder, NOW - silence)
        assert summed(folder, NOW).state == state
    (folder / "run.lock").write_text("")
    assert "that it does not name" in summed(folder, NOW).reason


def test_trials_of_a_sweep_end_as_the_sweep_says(tmp_path):
    folder = tmp_path / "sweep"
    for name in ("bad", "late"):
        write_run(folder / name, 20, of=50, saved=[20])
    trials = [{"name": "bad", "status": "diverged", "reason": "loss 99"}]
    trials += [{"name": "late", "status": "stopped", "reason": "below the median"}]
    (folder / "sweep.json").write_text(json.dumps({"trials": trials}))
    found = summaries(find_runs(tmp_path))
    assert [run[:3] for run in found] == [
        (folder / "bad", "failed", "loss 99"),
        (folder / "late", "stopped", "below the median"),
    ]
    (folder / "sweep.json").write_text("{")
    assert [run.state for run in summaries(find_runs(tmp_path))] == ["stopped", "stopped"]


def test_what_differs_is_what_the_configs_say_but_for_where_they_are(tmp_path):
    write_run(tmp_path / "a", 20)
    write_run(tmp_path / "b", 20, optimizer={"lr": 0.5, "betas": [0.8, 0.9]})
    (write_run(tmp_path / "c", 20) / "config.toml").write_text("broken = ")
    found = summaries(find_runs(tmp_path))
    assert varied_fields(found) == ["optimizer.lr", "optimizer.betas"]
    assert found[1].fields["optimizer.lr"] == 0.5 and found[2].fields == {}
    assert found[2].steps is None and found[2].state == "failed"


def test_a_field_that_an_older_run_lacks_has_its_default(tmp_path):
    write_run(tmp_path / "new", 20)
    write_run(tmp_path / "set", 20, train={"patience": 3})
    text = (write_run(tmp_path / "old", 20) / "config.toml").read_text()
    gone = (
        "patience =",
        "eps =",
        "betas =",
        "valid =",
    )  # an int, a float, a tuple and an empty one
    lines = [line for line in text.splitlines() if not line.startswith(gone)]
    assert len(text.splitlines()) == len(lines) + len(gone)
    (tmp_path / "old" / "config.toml").write_text("\n".join(lines))
    new, old, patient = found = summaries([tmp_path / name for name in ("new", "old", "set")])
    assert varied_fields([new, old]) == []
    assert varied_fields(found) == ["train.patience"]
    assert [run.value("train.patience") for run in found] == [0, 0, 3]


def test_what_differs_fits_a_column_of_the_table(tmp_path):
    write_run(tmp_path / "a")
    (run,) = summaries([tmp_path / "a"])
    fields = {f"data.field{number}": "a" * number * 5 for number in range(8)}
    columns, rows = listed_table([run._replace(fields=fields)], list(fields))[1:]
    cell = rows[0][list(columns).index("differs")]
    assert cell == "field0='' field1='aaaaa' and 6 more"
    long = {"train.freeze": "b" * 500, "model.num_layers": 3}
    columns, rows = listed_table([run._replace(fields=long)], list(long))[1:]
    cell = rows[0][list(columns).index("differs")]
    assert cell.startswith("freeze='bbb") and cell.endswith("... and 1 more") and len(cell) < 60


def test_runs_are_found_below_a_folder_and_not_through_links(tmp_path):
    for name in ("b", "group/sub/a", ".hidden/x"):
        write_run(tmp_path / "runs" / name, 1)
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "notes").mkdir()
    names = [str(path.relative_to(tmp_path / "runs")) for path in find_runs(tmp_path / "runs")]
    assert names == ["b", "group/sub/a"]
    assert find_runs(tmp_path / "runs" / "b") == [tmp_path / "runs" / "b"]
    given = [str(tmp_path / "runs" / "b"), str(tmp_path / "runs")]
    assert [path.name for path in find_all_runs(given)] == ["b", "a"]
    with pytest.raises(MtcliError, match="holds 2 runs, and one is taken"):
        require_one_run(str(tmp_path / "runs"))
    with pytest.raises(MtcliError, match="holds no run"):
        find_all_runs([str(tmp_path / "runs" / "notes")])
    with pytest.raises(MtcliError, match="there is no folder"):
        find_runs(tmp_path / "run")
    with pytest.raises(MtcliError, match="is a file"):
        find_runs(tmp_path / "runs" / "b" / "config.toml")


def test_of_a_long_file_the_end_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0, "pad": "x" * 80}) for step in range(1, 5001)]
    lines[40] = json.dumps({"step": 41, "valid_loss": 2.5})
    path.write_text("\n".join(lines) + '\n{"step": 5001, "lo')
    rows = last_records(path)
    steps = [row["step"] for row in rows]
    assert steps == list(range(steps[0], 5001)) and steps[0] > 0
    assert TAIL_BYTES - 250 < sum(len(json.dumps(row)) + 1 for row in rows) <= TAIL_BYTES
    assert last_with(path, "valid_loss") == {"step": 41, "valid_loss": 2.5}
    assert last_with(path, "nothing") is None and last_with(tmp_path / "none", "loss") is None


def test_of_a_file_that_is_too_large_to_be_read_the_end_is_read(tmp_path):
    folder = write_run(tmp_path / "a", 20, valid_every=7)
    rows = (folder / "metrics.jsonl").read_bytes()
    with (folder / "metrics.jsonl").open("wb") as file:
        file.seek(1 << 31)  # a hole, which takes no space
        file.write(b"\n" + rows)
    run = summed(folder)
    assert (run.step, run.tokens, run.valid_loss) == (20, 640, 1.1 * loss_at(14))


def test_steps_without_a_finite_loss_and_damaged_lines_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null, "total_tokens": true}\nnonsense\n[1]\n')
    run = summed(folder)
    assert run.step == 4 and run.tokens is None
    assert run.loss == pytest.approx(sum(map(loss_at, (1, 2, 3))) / 3)


def test_a_moment_is_this_one_unless_it_is_given(tmp_path):
    folder = write_run(tmp_path / "a", 3)
    lock_elsewhere(folder)
    assert summed(folder).state == "running" and abs(summed(folder).changed_at - time.time()) < 60
    assert summed(folder, time.time() + 1e4).state == "dead lock"


def test_links_count_as_themselves(tmp_path):
    folder = write_run(tmp_path / "a", 3)
    before = summed(folder).size_bytes
    (tmp_path / "large").write_bytes(bytes(100_000))
    (folder / "link").symlink_to(tmp_path / "large")
    assert before < summed(folder).size_bytes < before + 1000
    write_checkpoint(folder, 3, size=5000)
    assert summed(folder).size_bytes > before + 5000
