"""The CPU benchmark of the training step trains the same model whoever trains it."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_contenders_have_our_losses(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_train

    flags = ["--model", "nano", "--repeats", "1", "--steps", "3", "--contenders", "ours,hf,plain"]
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *flags])
    rows = bench_train.measure(bench_train.parse())
    assert len(rows) == 3
    assert all(row["largest_loss_gap"] < 1e-5 for row in rows.values())
    assert rows["hf"]["losses"][0] > 1.001 * rows["hf"]["losses"][-1], "weights have to change"
