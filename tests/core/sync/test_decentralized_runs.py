"""Decentralized runs: resumed bit for bit, from an average, in narrow precisions, from commands."""

import json
import re

import pytest
import torch
from command_line import mtcli
from marks import slow, slow_cases
from ranks import run_ranks
from tiny import GPT, LLAMA, metrics, run_config, write_run
from trained import checkpoint_of, train_and_save

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.training.state import resume
from mtcli.core.training.step import Trainer

SGD = {"name": "sgd", "momentum": 0.9, "lr": 0.05, "schedule": "constant"}


def config_of(method, model=GPT, optimizer=(), train=(), **sections):
    train = {"steps": 4} | dict(train)
    sync = {"method": method} | sections.pop("sync", {})
    return run_config(model, optimizer=SGD | dict(optimizer), train=train, sync=sync, **sections)


RESUMED = [
    ("decentlam", 4, {"clip": 0.0}, {}, {}, "fp32"),
    ("dmsgd", 4, {}, {"topology": "one_peer_exponential"}, {}, "bf16"),
    ("awc_dmsgd", 4, {}, {"replicas": 2}, {"zero": 1}, "bf16"),
    ("da_dmsgd", 4, {"clip": 0.0}, {}, {"tp": 2}, "fp16"),
]


@pytest.mark.parametrize(
    ("method", "world", "optimizer", "sync", "parallel", "precision"),
    [*RESUMED[:1], *slow_cases("2 s each", *RESUMED[1:])],
)
def test_a_run_that_stopped_after_an_odd_step_goes_on_bit_for_bit(
    method, world, optimizer, sync, parallel, precision, tmp_path
):
    train = {"precision": precision}
    config = config_of(method, LLAMA, optimizer, train, sync=sync, parallel=parallel)
    whole = run_ranks(world, train_and_save, config, tmp_path / "a", 0, 4)[0]
    first = run_ranks(world, train_and_save, config, tmp_path / "b", 0, 1)[0]
    rest = run_ranks(world, train_and_save, config, tmp_path / "b", 1, 4)[0]
    assert [step.loss for step in whole] == [step.loss for step in first + rest]
    a, b = (checkpoint_of(tmp_path / run, 4) for run in "ab")
    assert a.names() == b.names() and any("momentum" in name for name in a.names())
    for name in a.names():
        for replica in a.replicas_of(name):
            assert torch.equal(a.read(name, replica=replica), b.read(name, replica=replica)), name


def resumed(runtime, config, folder):
    """The weights and momenta that a rank has after it has resumed, by name."""
    trainer = Trainer(config, runtime)
    resume(trainer, checkpoint_of(folder, 2))
    weights = {name: shard.tensor.numpy() for name, shard in trainer.strategy.shards.items()}
    return weights, {name: x.numpy() for name, x in trainer.optimizer.state().items()}


@pytest.mark.parametrize(("method", "world"), [("awc_dmsgd", 2), ("all_reduce", 1)])
def test_on_another_number_of_replicas_all_start_from_the_average(method, world, tmp_path):
    fp64 = {"precision": "fp64"}
    run_ranks(4, train_and_save, config_of("awc_dmsgd", LLAMA, train=fp64), tmp_path, 0, 2)
    checkpoint = checkpoint_of(tmp_path, 2)
    assert checkpoint.replicas == 4

    def mean(name):
        return torch.stack([checkpoint.read(name, replica=i) for i in range(4)]).mean(0)

    for weights, state in run_ranks(world, resumed, config_of(method, LLAMA, train=fp64), tmp_path):
        for name, found in weights.items():
            expected = mean(name).reshape(-1)  # rows that pad the vocabulary are zero, and last
            torch.testing.assert_close(
                torch.from_numpy(found).reshape(-1)[: len(expected)], expected, rtol=0, atol=1e-15
            )
        assert state
        for name, found in state.items():
            expected = mean(f"optimizer.{name}").reshape(-1)
            torch.testing.assert_close(
                torch.from_numpy(found).reshape(-1)[: len(expected)], expected, rtol=0, atol=1e-15
            )


@pytest.mark.parametrize(
    "method",
    ["decentlam", *slow_cases("72 steps of 4 ranks, 3 s", "dmsgd", "awc_dmsgd", "da_dmsgd")],
)
def test_a_run_that_ended_at_a_tiny_rate_goes_on_at_the_full_one(method, tmp_path):
    """Its rate rises 15,000 times in a step; it learns on as a run that was planned as long."""
    optimizer = {"lr": 0.3, "schedule": "cosine", "min_lr": 1e-5, "clip": 0.0, "momentum": 0.9}
    short, long = (config_of(method, optimizer=optimizer, train={"steps": n}) for n in (24, 48))
    run_ranks(4, train_and_save, short, tmp_path, 0, 24)
    found = run_ranks(4, train_and_save, long, tmp_path, 24, 48)[0]
    planned = run_ranks(4, train_and_save, long, None, 0, 48)[0]
    assert found[0].lr > 500 * optimizer["min_lr"]
    assert all(a.loss < b.loss + 0.15 for a, b in zip(found, planned[24:], strict=True))


@pytest.mark.parametrize(
    ("precision", "rel"), [("bf16", 5e-3), *slow_cases("1 s", ("fp32", 1e-5), ("fp16", 2e-3))]
)
def test_narrow_precisions_have_float64_s_curve_to_rounding(precision, rel):
    curves = []
    for one in (precision, "fp64"):
        config = config_of("decentlam", optimizer={"clip": 0.0}, train={"precision": one})
        curves.append([step.loss for step in run_ranks(4, train_and_save, config)[0]])
    assert curves[0] == pytest.approx(curves[1], rel=rel)


def test_a_learning_rate_of_zero_moves_nothing_and_divides_by_nothing():
    config = config_of("decentlam", optimizer={"lr": 0.0}, train={"steps": 3})
    steps = run_ranks(4, train_and_save, config, None, 0, 3)[0]
    assert all(step.outcome == "updated" and step.lr == 0.0 for step in steps)


@slow("four commands, 2 s")
def test_a_run_says_that_its_average_is_evaluated_and_every_command_reads_it(tmp_path):
    """The loss that train tells of the average is that of the exported folder's model."""
    optimizer, sync = SGD | {"lr": 0.3}, {"method": "awc_dmsgd"}
    train = {"steps": 3, "eval_every": 3, "eval_batches": 2}
    run = write_run(tmp_path, optimizer=optimizer, train=train, sync=sync)
    done = mtcli("train", run, "--nproc", 4, "--set", "parallel.tp=2")
    assert done.returncode == 0, done.stderr
    line = r"sync +awc_dmsgd \(ring\), 2 replicas; what is evaluated and exported is their average"
    assert re.search(line, done.stdout)
    rows = metrics(tmp_path / "run")
    assert rows[-1]["replica_distance"] > 1e-3 and rows[-1]["sync_bytes"] > 0

    exported = mtcli("shard", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--verify")
    assert exported.returncode == 0, exported.stderr
    words = "has 2 replicas that differ, and what is read is their average"
    assert words in exported.stderr
    source, found = open_checkpoint(tmp_path / "run"), open_checkpoint(tmp_path / "hf")
    for name in found.names():
        mean = torch.stack([source.read(name, replica=i).double() for i in range(2)]).mean(0)
        assert torch.equal(found.read(name), mean.float()), name

    # The oracle of the loss of the average: a one-rank run from it, whose rate moves nothing.
    still = ("--set", "optimizer.lr=0", "--set", "train.steps=1", "--set", "train.eval_every=1")
    plain = ("--set", "sync.method=all_reduce", "--set", f"train.output={tmp_path / 'still'}")
    again = mtcli("train", run, "--init", tmp_path / "run", *still, *plain)
    assert again.returncode == 0, again.stderr
    assert words in again.stderr
    told = json.loads((tmp_path / "still/metrics.jsonl").read_text())
    assert told["valid_loss"] == pytest.approx(rows[-1]["valid_loss"], rel=1e-5)

    more = ("--set", "parallel.tp=1", "--set", "train.steps=4")
    other = ("--set", "sync.method=dmsgd", "--set", "optimizer.momentum=0")
    resumed = mtcli("train", run, "--resume", "--nproc", 4, *more, *other)
    assert resumed.returncode == 0, resumed.stderr
    note = "the checkpoint has 2 replicas: all 4 replicas start from their average"
    assert note in resumed.stderr and words not in resumed.stderr  # said once
    assert "dmsgd (ring) as dsgd, since optimizer.momentum is 0, 4 replicas" in resumed.stdout
