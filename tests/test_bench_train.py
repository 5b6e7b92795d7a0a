"""The CPU benchmark of the training step trains the same model whoever trains it."""

import sys
from pathlib import Path

import pytest
from marks import slow

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def losses_of(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_train

    def losses(child):
        flags = ["--model", "nano", "--steps", "3", "--child", child]
        monkeypatch.setattr(sys, "argv", ["bench_train.py", *flags])
        return bench_train.run_child(bench_train.parse())["losses"]

    return losses


@slow("imports transformers, and trains three models of 4 s")
def test_contenders_have_our_losses(losses_of):
    ours = losses_of("ours")
    for name in ("hf", "plain"):
        assert losses_of(name) == pytest.approx(ours, rel=1e-5), name
    assert ours[0] > 1.001 * ours[-1], "weights have to change between steps"
