"""A sketch's length against the tensors' own, by hand, and its distance between replicas."""

import pytest
import torch
from command_line import mtcli
from tiny import metrics, write_run

from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.sync.norm_sketch import BLOCK, BUCKETS, sketch

CPU = torch.device("cpu")


def length(tensors):
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


CASES = {
    "random": lambda: [torch.randn(700, 777), torch.randn(33)],
    "of rank one": lambda: [torch.randn(1024, 1) @ torch.randn(1, 512)],
    "equal elements": lambda: [torch.full((600, 1001), 0.5)],
    "equal rows as long as the buckets": lambda: [torch.ones(200, 1) @ torch.rand(1, BUCKETS)],
    "in several blocks": lambda: [torch.ones(BLOCK + 5), torch.randn(BLOCK, 2), torch.ones(7)],
}


@pytest.mark.parametrize("case", CASES)
def test_a_sketch_is_as_long_as_the_tensors(case):
    """By 0.8 % in the standard deviation, or 1.1 % of equal elements: four of those here."""
    for seed in range(3):
        torch.manual_seed(seed)
        tensors = CASES[case]()
        assert float(sketch(tensors, CPU).norm()) == pytest.approx(length(tensors), rel=0.044)


def test_lengths_are_right_on_the_mean_and_spread_as_much_as_is_said():
    torch.manual_seed(0)
    ratios = []
    for _ in range(60):
        tensors = [torch.randn(3 * BUCKETS)]
        ratios.append(float(sketch(tensors, CPU).norm()) / length(tensors))
    ratios = torch.tensor(ratios)
    assert abs(float(ratios.mean()) - 1.0) < 4 * 0.008 / 60**0.5
    assert 0.004 < float(ratios.std()) < 0.012


def test_a_sketch_is_linear_and_of_the_elements_in_their_order():
    torch.manual_seed(0)
    a, b = torch.randn(2, BLOCK + 99, dtype=torch.float64)
    whole = sketch([a], CPU)
    torch.testing.assert_close(sketch([a[:1234], a[1234:]], CPU), whole)
    torch.testing.assert_close(sketch([a - 3.0 * b], CPU), whole - 3.0 * sketch([b], CPU))
    assert not torch.allclose(sketch([a.flip(0)], CPU), whole)


LAYOUTS = [("--nproc", 4), ("--nproc", 4, "--set", "parallel.tp=2", "--set", "parallel.pp=1")]
LAYOUTS += [("--nproc", 4, "--set", "parallel.zero=1", "--set", "sync.replicas=2")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["dp", "tp", "zero=1"])
def test_metrics_tell_the_distance_of_replicas_as_a_checkpoint_has_them(layout, tmp_path):
    """awc_dmsgd: two replicas of other methods are equal."""
    optimizer = {"name": "sgd", "momentum": 0.9, "lr": 0.1, "schedule": "constant"}
    train = {"steps": 3, "save_every": 1, "keep": 0}
    sync = {"method": "awc_dmsgd"}
    run = write_run(tmp_path, optimizer=optimizer, train=train, sync=sync)
    done = mtcli("train", run, *layout)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        checkpoint = open_checkpoint(tmp_path / f"run/checkpoints/step-{row['step']:08d}")
        squares, count = 0.0, checkpoint.replicas
        for name in checkpoint.names():
            if not is_optimizer(name):
                x = torch.stack([checkpoint.read(name, replica=i).double() for i in range(count)])
                squares += float((x - x.mean(0)).square().sum()) / count
        assert squares > 1e-8
        assert row["replica_distance"] == pytest.approx(squares**0.5, rel=0.035)
