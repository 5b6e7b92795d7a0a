"""Averages of weights, moving and of checkpoints, against float64 sums of the weights by hand."""

import shutil

import pytest
import torch
from command_line import mtcli
from tiny import BIASED, LLAMA, write_run

from mtcli.core.checkpoint.opening import open_checkpoint

STEPS, EMA = 6, 0.7
RUN = {"steps": STEPS, "save_every": 1, "keep": 0, "ema": EMA}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with run.toml, of a run of one rank that has every step's weights and average."""
    folder = tmp_path_factory.mktemp("average")
    write_run(folder, LLAMA, train=RUN)
    train(folder)
    return folder


def train(home, *settings, flags=()):
    sets = [word for setting in settings for word in ("--set", setting)]
    done = mtcli("train", str(home / "run.toml"), *sets, *flags)
    assert done.returncode == 0, done.stderr


def shard(*words):
    done = mtcli("shard", *map(str, words))
    assert done.returncode == 0, done.stderr
    return done


def at(run, step):
    return open_checkpoint(run / "checkpoints" / f"step-{step:08d}")


def weights(checkpoint):
    names = [name for name in checkpoint.names() if not name.startswith("optimizer.")]
    return {name: checkpoint.read(name).double() for name in names}


def averages(checkpoint):
    kind = "optimizer.ema/"
    names = [name for name in checkpoint.names() if name.startswith(kind)]
    return {name.removeprefix(kind): checkpoint.read(name) for name in names}


def by_hand(run, first, last):
    """The moving average after step `last`, from that after `first`, in float64."""
    found = {name: x.double() for name, x in averages(at(run, first)).items()}
    for step in range(first + 1, last + 1):
        now = weights(at(run, step))
        found = {name: EMA * x + (1 - EMA) * now[name] for name, x in found.items()}
    return found


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name].double(), x, rtol=2e-6, atol=1e-8)


def test_the_average_moves_by_the_weights_of_each_step_from_the_first_ones(home, tmp_path):
    run = home / "run"
    close(averages(at(run, STEPS)), by_hand(run, 1, STEPS))
    still = ("optimizer.lr=0.0", "optimizer.weight_decay=0.0", "train.steps=1")
    train(home, f'train.output="{tmp_path}"', *still)
    begun = weights(at(tmp_path, 1))
    first = {n: EMA * x + (1 - EMA) * weights(at(run, 1))[n] for n, x in begun.items()}
    close(averages(at(run, 1)), first)
    moved = (
        by_hand(run, 1, STEPS)["final_norm.weight"] - weights(at(run, STEPS))["final_norm.weight"]
    )
    assert moved.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, []),
        (4, ["parallel.tp=2", "parallel.zero=1"]),
        (2, ["parallel.zero=3"]),
        (2, ["parallel.pp=2"]),
    ],
)
def test_an_average_goes_on_on_every_layout(home, tmp_path, world, settings):
    shutil.copytree(home / "run", tmp_path / "run")
    for step in range(4, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    output = f'train.output="{tmp_path / "run"}"'
    train(home, output, *settings, flags=["--resume", "--nproc", str(world)])
    found, whole = (averages(at(run, STEPS)) for run in (tmp_path / "run", home / "run"))
    close(found, by_hand(tmp_path / "run", 3, STEPS))
    for name, x in whole.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-6)
        assert world > 1 or torch.equal(found[name], x)


def test_the_average_of_bf16_weights_is_of_their_float32_masters(tmp_path):
    write_run(tmp_path, BIASED, train=RUN | {"precision": "bf16"})
    train(tmp_path)
    run = tmp_path / "run"
    found = averages(at(run, STEPS))
    assert {x.dtype for x in found.values()} == {torch.float32}
    masters = at(run, STEPS)
    for name, x in by_hand(run, 5, 5).items():
        now = masters.read(f"optimizer.master/{name}").double()
        torch.testing.assert_close(found[name].double(), EMA * x + (1 - EMA) * now)


def test_an_average_begins_with_the_weights_where_a_resumed_run_asks_for_one(home, tmp_path):
    without = f'train.output="{tmp_path}"'
    train(home, without, "train.ema=0.0", "train.steps=3")
    assert averages(at(tmp_path, 3)) == {}
    train(home, without, "train.steps=4", flags=["--resume"])
    before, after = weights(at(tmp_path, 3)), weights(at(tmp_path, 4))
    close(averages(at(tmp_path, 4)), {n: EMA * before[n] + (1 - EMA) * after[n] for n in before})


@pytest.mark.parametrize("nproc", [1, 2])
def test_shard_writes_the_mean_of_the_last_checkpoints(home, tmp_path, nproc):
    done = shard(
        home / "run", tmp_path / "mean", "--average", 3, "--layout", "tp=2", "--nproc", nproc
    )
    assert "writing mtcli" in done.stderr
    found = open_checkpoint(tmp_path / "mean")
    assert not any(name.startswith("optimizer.") for name in found.names())
    parts = [weights(at(home / "run", step)) for step in (4, 5, 6)]
    for name, x in weights(found).items():
        mean = sum(part[name] for part in parts) / 3
        assert torch.equal(x.float(), mean.float()), name
        assert not torch.equal(x, parts[2][name])


def test_shard_writes_the_moving_average_for_eval_and_hugging_face(home, tmp_path):
    shard(home / "run", tmp_path / "ema", "--average", "ema", "--to", "mtcli")
    close(weights(open_checkpoint(tmp_path / "ema")), by_hand(home / "run", 1, STEPS))
    shard(home / "run", tmp_path / "hf", "--average", "ema", "--verify")
    done = mtcli("shard", "verify", str(tmp_path / "ema"), str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_averaged_is_refused(home, tmp_path):
    shard(home / "run", tmp_path / "hf")
    write_run(tmp_path, LLAMA, train=RUN | {"ema": 0.0, "steps": 2, "save_every": 0})
    train(tmp_path)
    refused = {
        (home / "run", "9"): "--average 9, and {} is a run of 6 checkpoints",
        (home / "run", "1"): "--average 1, and {} is a run of 6 checkpoints",
        (home / "run", "half"): "--average half, and {} is a run of 6 checkpoints",
        (tmp_path / "hf", "ema"): "--average ema of a checkpoint of hf",
        (
            tmp_path / "run",
            "ema",
        ): "{}/checkpoints/step-00000002 holds no moving average of weights",
    }
    for (source, average), message in refused.items():
        done = mtcli("shard", str(source), str(tmp_path / "dst"), "--average", average)
        assert done.returncode == 2 and message.format(source) in done.stderr, done.stderr
    assert not (tmp_path / "dst").exists()
