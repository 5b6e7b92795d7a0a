"""`mtcli sweep` from its command line: what its run folders hold, and how it refuses."""

import json

import pytest
from command_line import mtcli
from tiny import write_run

from mtcli.core.checkpoint.opening import open_checkpoint

RUN = {"train": {"steps": 6, "precision": "fp64", "save_every": 3}}


def sweep(config, *words, out="out", **options):
    return mtcli("sweep", config, *words, "--output", config.parent / out, **options)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(folder):
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in metrics(folder)]


def assert_same_run(made, wanted, tolerance=1e-10):
    """Two run folders have the same losses, and the same tensors in their newest checkpoints."""
    for a, b in zip(curves(made), curves(wanted), strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    ours, alone = open_checkpoint(made), open_checkpoint(wanted)
    assert (ours.step, sorted(ours.names())) == (alone.step, sorted(alone.names()))
    assert ours.extra == alone.extra
    for name in alone.names():
        x = alone.read(name)
        assert float((ours.read(name) - x).norm()) <= tolerance * max(1e-3, float(x.norm())), name


def test_every_trial_s_folder_is_that_of_a_run_alone_but_for_who_diverges(tmp_path):
    config = write_run(tmp_path, **RUN)
    done = sweep(config, "--vary", "optimizer.lr=1e-3,3e-3,1e6", "--vary", "model.dropout=0,0.2")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    found = json.loads((out / "sweep.json").read_text())
    assert [t["status"] for t in found["trials"]] == ["finished"] * 4 + ["diverged"] * 2
    assert all("lr=1e+06" in t["name"] and t["reason"] for t in found["trials"][4:])
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for lr, drop in ((1e-3, 0.0), (3e-3, 0.2)):
        name = f"lr={lr:g}_dropout={drop:g}"
        words = (f"optimizer.lr={lr}", f"model.dropout={drop}", f"train.output={tmp_path / name}")
        alone = mtcli("train", config, *(w for word in words for w in ("--set", word)))
        assert alone.returncode == 0, alone.stderr
        assert_same_run(out / name, tmp_path / name)
        own, theirs = ((f / name / "config.toml").read_text() for f in (out, tmp_path))
        assert own.replace(str(out), str(tmp_path)) == theirs
    losses = [trial["loss"] for trial in found["trials"][:4]]
    assert losses == sorted(losses)
    rows = done.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [trial["name"] for trial in found["trials"]]


def test_a_trial_s_folder_goes_on_with_train_and_is_exported(tmp_path):
    config = write_run(tmp_path, train={"steps": 3, "precision": "fp32"})
    assert sweep(config, "--vary", "optimizer.lr=1e-3,3e-3").returncode == 0
    trial = tmp_path / "out" / "lr=0.003"
    words = ("--set", "train.steps=5", "--resume")
    done = mtcli("train", trial, *words)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(trial)] == [1, 2, 3, 4, 5]
    done = mtcli("shard", trial, tmp_path / "hf", "--to", "hf")
    assert done.returncode == 0, done.stderr


def test_a_sweep_that_was_told_to_stop_saves_all_and_goes_on_bit_for_bit(tmp_path):
    words = ("--vary", "optimizer.lr=1e-3,3e-3,1e6", "--max-fused", "2")
    config = write_run(tmp_path, train={"steps": 8, "precision": "fp32"})
    assert sweep(config, *words, out="whole").returncode == 0
    done = sweep(config, *words, out="cut", fault=stop_after_two_steps)
    assert done.returncode == 130, done.stderr
    first = json.loads((tmp_path / "cut" / "sweep.json").read_text())["trials"]
    assert {t["steps"] for t in first} == {2, 0} and {t["status"] for t in first} == {"waiting"}
    refused = sweep(config, *words, out="cut")
    assert refused.returncode == 2
    assert "2 of 3 trials have run folders" in refused.stderr and "--resume" in refused.stderr
    done = sweep(config, *words, "--resume", out="cut")
    assert done.returncode == 0, done.stderr
    for name in ("lr=0.001", "lr=0.003"):
        assert_same_run(tmp_path / "cut" / name, tmp_path / "whole" / name, tolerance=0.0)


def stop_after_two_steps(rank):
    """Puts a stop file into the folder of the sweep once the second step was recorded."""
    from pathlib import Path

    from mtcli.core.sweep import board

    stepped = board.Board.stepped

    def told(self, running, rate):
        stepped(self, running, rate)
        if len(running[0].losses) == 1:
            Path(self.output, "stop").touch()

    board.Board.stepped = told
