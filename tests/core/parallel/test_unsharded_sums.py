"""Squares of the parts that ranks hold, summed, are those of the whole parameters."""

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, MOE, run_config

from mtcli.core.parallel.ownership import GlobalSums
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ROWS = [
    (2, GPT, {"tp": 2}, {"micro_batch_size": 2}),
    (2, GPT, {"tp": 2, "sequence_parallel": False}, {}),
    (2, GPT, {"pp": 2}, {}),  # with two copies of the tied embedding
    (3, GPT, {}, {"global_batch_size": 3}),
    (4, GPT, {"pp": 2, "zero": 1}, {}),
    (4, GPT, {"tp": 2, "zero": 3}, {"micro_batch_size": 2}),
    (4, MOE, {"ep": 2}, {}),
    (4, MOE, {"tp": 2, "etp": 2, "zero": 1}, {"micro_batch_size": 2}),
]


def squares(runtime, config):
    """{name: [sum of squares, elements]} of what this rank has parts of."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    parts = trainer.optimizer.masters
    sums = [torch.tensor([float(x.square().sum()), x.count_nonzero()]) for x in parts.values()]
    whole = GlobalSums(parts, trainer.strategy.ownership)(torch.stack(sums))
    return dict(zip(parts, whole.tolist(), strict=True))


@pytest.mark.parametrize(("world", "model", "parallel", "batch"), ROWS, ids=str)
def test_a_part_counts_once_however_many_ranks_hold_it(world, model, parallel, batch):
    whole = squares(Runtime(0, 1, 0, 1, torch.device("cpu")), run_config(model))
    for found in run_ranks(world, squares, run_config(model, parallel=parallel, batch=batch)):
        assert found.keys() <= whole.keys() and len(found) > 3
        for name, (square, count) in found.items():
            assert square == pytest.approx(whole[name][0], rel=1e-6), name
            assert count == whole[name][1], name
