"""A rank that is slower than the others is named, in metrics and in the report of the run."""

import json
import time

from command_line import mtcli
from drills import Drill

SLOW, SECONDS = 2, 0.05


def sleep_in_every_step(rank):
    """A fault: one rank takes longer for its part of a step."""
    if rank != SLOW:
        return
    from mtcli.core.parallel.pipeline import Pipeline

    train_step = Pipeline.train_step

    def slow(*args, **kwargs):
        time.sleep(SECONDS)
        return train_step(*args, **kwargs)

    Pipeline.train_step = slow


def test_a_rank_that_sleeps_is_named_as_the_straggler(tmp_path):
    drill = Drill(tmp_path)
    settings = ["parallel.tp=2", "train.steps=5", "train.log_every=2"]
    done = drill.train(nproc=4, settings=settings, fault=sleep_in_every_step)
    assert done.returncode == 0, done.errors
    rows = [json.loads(line) for line in (drill.output / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "computing_rank_max" in row]
    assert [row["step"] for row in told] == [2, 4]
    for row in told:
        assert row["computing_rank_max"] == SLOW != row["waiting_rank_max"]
        assert row["computing_seconds_max"] > SECONDS
        assert row["computing_seconds_max"] - row["computing_seconds_median"] > 0.8 * SECONDS
        assert row["waiting_seconds_max"] > 0.8 * SECONDS
    page = tmp_path / "run.html"
    shown = mtcli("profile", drill.output, "--report", page, "--json")
    assert shown.returncode == 0, shown.errors
    times = json.loads(shown.stdout)["rank_times"]
    assert times["computing_seconds"]["ranks"] == [{"rank": SLOW, "steps": 2}]
    assert times["steps"] == 2 and times["computing_seconds"]["max"] > SECONDS
    assert f"rank {SLOW} in 2 of 2 steps" in page.read_text()
    text = mtcli("profile", drill.output).stdout
    assert f"rank {SLOW} in 2 of 2 steps" in text


def test_one_rank_tells_of_no_others(tmp_path):
    drill = Drill(tmp_path)
    drill.train(settings=["train.steps=2"])
    assert "waiting" not in (drill.output / "metrics.jsonl").read_text()
    assert "rank_times" not in json.loads(mtcli("profile", drill.output, "--json").stdout)
