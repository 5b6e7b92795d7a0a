"""A rank whose node is slow, or has no GPU where the others have, is named."""

import json
import os
import time

from command_line import mtcli
from drills import Drill
from marks import slow
from tiny import metrics

SLOW, SECONDS = 2, 0.5


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


@slow("four ranks that sleep, 3 s")
def test_a_rank_that_sleeps_is_named_as_the_straggler(tmp_path):
    drill = Drill(tmp_path)
    settings = ["parallel.tp=2", "train.steps=5", "train.log_every=2"]
    done = drill.train(nproc=4, settings=settings, fault=sleep_in_every_step)
    assert done.returncode == 0, done.errors
    told = [row for row in metrics(drill.output) if "computing_rank_max" in row]
    assert [row["step"] for row in told] == [2, 4]
    row = told[-1]  # the first step has other work too
    assert row["computing_rank_max"] == SLOW != row["waiting_rank_max"], row
    assert row["computing_seconds_max"] > SECONDS
    assert row["computing_seconds_max"] - row["computing_seconds_median"] > 0.5 * SECONDS
    assert row["waiting_seconds_max"] > 0.5 * SECONDS
    page = tmp_path / "run.html"
    shown = mtcli("profile", drill.output, "--report", page, "--json", "-")
    assert shown.returncode == 0, shown.errors
    times = json.loads(shown.stdout)["rank_times"]
    slowest = times["computing_seconds"]["ranks"]
    assert times["steps"] == 2 and SLOW in [one["rank"] for one in slowest]
    assert times["computing_seconds"]["max"] > SECONDS
    named = f"rank {slowest[0]['rank']} in {slowest[0]['steps']}"
    assert named in page.read_text() and named in mtcli("profile", drill.output).stdout


def see_no_gpu(rank):
    """A fault: all ranks but one have GPUs, as far as bring-up goes."""
    import torch

    from mtcli.core.runtime import launch

    torch.cuda.set_device = lambda device: None
    kind = "cpu" if rank == SLOW else "cuda"
    launch.compute_device = lambda name, local_rank: torch.device(
        kind, 0 if kind == "cuda" else None
    )


def test_a_rank_that_has_no_gpu_where_the_others_have_is_named_at_the_start(tmp_path):
    drill = Drill(tmp_path)
    done = drill.train(nproc=4, fault=see_no_gpu)
    assert done.codes == [1] * 4
    for error in done.errors:
        assert f"rank {SLOW} on {os.uname().nodename} has cpu; 3 of 4 ranks have cuda" in error
        assert "hint: nvidia-smi on that host" in error
    assert not drill.output.exists()


def test_one_rank_tells_of_no_others(tmp_path):
    drill = Drill(tmp_path)
    drill.train(settings=["train.steps=2"])
    assert "waiting" not in (drill.output / "metrics.jsonl").read_text()
    assert "rank_times" not in json.loads(mtcli("profile", drill.output, "--json", "-").stdout)
