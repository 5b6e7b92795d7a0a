"""On a GPU the update is queued before the host reads loss and norm, and changes no result.

AdamW's kernel is interpreted here; all else of a step runs as on a CPU.
"""

import math
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from tiny import GPT, Samples, run_config

from mtcli.core.optim.adamw import Adamw
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.triton_launch import interpreted

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
SCALED = {"precision": "fp16", "loss_scale": 2.0**12}
OVERFLOWS = {"precision": "fp16", "initial_loss_scale": 2.0**36, "loss_scale_hysteresis": 1}


@pytest.fixture
def started():
    """A function that starts a run whose optimizer alone is interpreted; `ahead` as on a GPU."""
    step = Optimizer.step

    def interpreted_step(optimizer, *numbers):
        with interpreted():
            step(optimizer, *numbers)

    def start(ahead, **sections):
        train = {"matmul": "strict"} | sections.pop("train", {})
        config = run_config(GPT, train=train, **sections)
        with interpreted(), patch.object(Adamw, "reads_factor", ahead):
            trainer = Trainer(config, ALONE)
            assert trainer.exchange.updates_ahead == ahead and trainer.optimizer.by_kernels
        stack.enter_context(patch.object(Adamw, "reads_factor", ahead))
        initialise(trainer)
        return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Optimizer, "step", interpreted_step))
        yield start


def outcome_of(trainer, loader, steps):
    """What a run has come to: its steps without their seconds, the loss scale, and its tensors."""
    done = [trainer.train_step(loader)._replace(seconds=0.0) for _ in range(steps)]
    loader.close()
    tensors = {name: x.clone() for name, x in trainer.optimizer.state().items()}
    tensors |= {name: x.clone() for name, x in trainer.optimizer.weights.items()}
    return done, trainer.step, trainer.optimizer.updates, trainer.loss_scale.scale, tensors


@pytest.mark.parametrize(
    ("sections", "outcome", "expected_scale"),
    [
        ({"optimizer": {"clip": 0.0}}, "updated", 1.0),
        ({"optimizer": {"clip": 0.5}, "train": SCALED}, "updated", 2.0**12),
        ({"train": OVERFLOWS}, "overflow", 2.0**33),
    ],
    ids=["without clipping", "clipped, of a scaled loss", "overflows"],
)
def test_an_update_ahead_of_the_read_is_the_one_behind_it_to_the_last_bit(
    started, sections, outcome, expected_scale
):
    *ahead, tensors = outcome_of(*started(True, **sections), steps=3)
    *behind, expected = outcome_of(*started(False, **sections), steps=3)
    assert repr(ahead) == repr(behind)  # norms that are nan too
    assert all(torch.equal(x, expected[name]) for name, x in tensors.items())
    steps, number, updates, scale = ahead
    assert [step.outcome for step in steps] == [outcome] * 3
    assert (number, updates, scale) == (3, 3 * (outcome == "updated"), expected_scale)


def test_a_loss_that_is_not_finite_moves_no_weight_moment_or_step(started):
    trainer, loader = started(True)
    trainer.train_step(loader)
    weights = trainer.optimizer.weights
    with torch.no_grad():
        weights["final_norm.weight"].fill_(math.nan)
    before = {name: x.clone() for name, x in (weights | trainer.optimizer.state()).items()}
    step = trainer.train_step(loader)
    loader.close()
    assert (step.step, step.outcome, trainer.step, trainer.optimizer.updates) == (2, "fault", 1, 1)
    for name, x in (weights | trainer.optimizer.state()).items():
        torch.testing.assert_close(x, before[name], rtol=0.0, atol=0.0, equal_nan=True)
