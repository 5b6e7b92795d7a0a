"""Runs compared: after the same tokens and time, by their configs, and by their evaluations."""

import json

import pytest
from run_folders import loss_at, write_run

from mtcli.core.evaluate.comparison import compare_files
from mtcli.core.runs.loss_curves import read_curves
from mtcli.core.runs.run_comparison import compare_runs
from mtcli.core.runs.run_summary import summaries


def compared(*folders):
    return compare_runs(read_curves(folders), summaries(folders))


def mean_loss(last):
    return pytest.approx(sum(loss_at(step) for step in range(last - 9, last + 1)) / 10, abs=1e-12)


def test_losses_are_compared_after_the_same_tokens_and_after_the_same_time(tmp_path):
    short = write_run(tmp_path / "a", 20, valid_every=5)
    long = write_run(tmp_path / "b", 60, overrides=["seed=9"])
    path = long / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"step_seconds": 0.25}) + "\n" for row in rows))
    found = compared(short, long)
    assert (found.tokens, found.seconds) == (640, 10.0)
    a, b = found.figures
    assert a[:3] == (640, 10.0, mean_loss(20)) and a[3:] == (
        mean_loss(20),
        mean_loss(20),
        1.1 * loss_at(20),
    )
    assert b[:3] == (1920, 15.0, mean_loss(60)) and b[3:] == (mean_loss(20), mean_loss(40), None)
    assert found.fields == {"seed": [7, 9], "train.steps": [20, 60]}
    assert found.evaluations == {}


def evaluate(folder, name, rights):
    """Writes a result of `mtcli eval --json`: items that are right or wrong."""
    items = [
        {"task": "race", "id": str(number), "hash": "x", "loglikelihoods": [-1.0], "correct": right}
        for number, right in enumerate(rights)
    ]
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (folder / f"{name}.items.jsonl").write_text(lines)
    table = {"checkpoint": str(folder), "items": f"{name}.items.jsonl"}
    table["tasks"] = {"race": {"metric": "accuracy", "accuracy": sum(rights) / len(rights)}}
    (folder / f"{name}.json").write_text(json.dumps(table))


def test_evaluations_of_one_name_in_both_folders_are_compared(tmp_path):
    folders = [write_run(tmp_path / name, 20) for name in "abc"]
    evaluate(folders[0], "race", [True] * 30 + [False] * 10)
    evaluate(folders[2], "race", [False] * 20 + [True] * 5 + [False] * 15)
    evaluate(folders[0], "other", [True])
    found = compared(*folders)
    assert list(found.evaluations) == [("race.json", 0, 2)]
    report = found.evaluations["race.json", 0, 2]
    assert report == compare_files(*(str(folders[side] / "race.json") for side in (0, 2)))
    assert report["tasks"]["race"]["verdict"] == "a"
    data = found.as_json(read_curves(folders))
    (evaluation,) = data["evaluations"]
    assert (evaluation["a"], evaluation["b"]) == (str(folders[0]), str(folders[2]))
    assert evaluation["tasks"] == report["tasks"] and len(data["runs"]) == 3


def test_other_json_in_a_run_s_folder_is_no_evaluation(tmp_path):
    folders = [write_run(tmp_path / name, 20) for name in "ab"]
    for folder in folders:
        (folder / "notes.json").write_text('{"tasks": 1}')
        (folder / "broken.json").write_text("{")
        (folder / "list.json").write_text("[1]")
    assert compared(*folders).evaluations == {}
