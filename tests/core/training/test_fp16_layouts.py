"""Half precision on layouts: gradients against float64, the loss scale against one rank, resuming.

A float16 result is off by at most HALF of itself. Backward passes of 4 layers round a few dozen
times, at random, which came to 1e-3 to 2.5e-3 of a parameter's gradient; a factor of 1.01 is 1e-2.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from marks import slow, slow_cases
from ranks import run_ranks
from tiny import DROPPING, GPT, LLAMA, MOE, Samples, run_config
from trained import train_and_save

from mtcli.core.mesh.parameters import parameters
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

HALF = 2.0**-11
MODELS = {"gpt": GPT | DROPPING, "llama": LLAMA, "moe": MOE}
TALL = {"micro_batch_size": 2}
NO_SP = {"sequence_parallel": False}
ROWS = [
    ("llama", 4, {"tp": 2, "pp": 2, "recompute": "full"} | NO_SP, TALL),
    ("gpt", 4, {"tp": 4, "tp_mode": "2d"}, TALL),
    ("gpt", 2, {"pp": 2, "schedule": "zero_bubble"}, {}),
    ("llama", 2, {"cp": 2, "zero": 1}, {}),
    ("moe", 4, {"ep": 2, "zero": 3, "dispatcher": "all_gather"}, {}),
]
# Scales up to 3% larger or smaller give the same steps: no element is so near to float16's largest
# that its rounding, which a layout changes, could decide.
FAR = {"gpt": 0.96 * 2.0**36, "llama": 0.96 * 2.0**36, "moe": 1.04 * 2.0**36}
NEAR = {"initial_loss_scale": 0.98 * 2.0**22, "loss_scale_window": 4}


def config_of(name, parallel, batch, **train):
    settings = {"precision": "fp16", "matmul": "strict"} | train
    return run_config(MODELS[name], parallel=parallel, batch=batch, train=settings)


def begun(runtime, config):
    """A trainer with the seed's weights as float16 has them, and its loader."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    with torch.no_grad():
        for _, tensor, _ in trainer.strategy.shards.values():
            tensor.copy_(tensor.half())
    trainer.optimizer.reset_masters()
    return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)


class First(NamedTuple):
    """A rank's first step: (name, rectangle, gradient there) of all that it keeps, and the norm."""

    gradients: list
    norm: float


def first_step(runtime, config):
    """The First of a config, its gradients clipped and unscaled."""
    trainer, loader = begun(runtime, config)
    norm = trainer.train_step(loader).grad_norm
    loader.close()
    found = []
    for name, view in trainer.strategy.gradients.items():
        kept = OwnedShard(trainer.table[name], view, trainer.strategy.ownership.rows(name))
        for box, part in kept.blocks(trainer.groups):
            found.append((name, box, part.double().clone()))
    return First(found, norm)


def scales(runtime, name, parallel, batch):
    """(loss scale, outcome) of 20 steps from a scale that is far too large."""
    far = {"initial_loss_scale": FAR[name], "loss_scale_hysteresis": 1}
    trainer, loader = begun(runtime, config_of(name, parallel, batch, **far))
    done = [trainer.train_step(loader) for _ in range(20)]
    loader.close()
    return [(step.loss_scale, step.outcome) for step in done]


def both(runtime, name, parallel, batch):
    """(First, scales) of a row on a rank."""
    first = first_step(runtime, config_of(name, parallel, batch))
    return first, scales(runtime, name, parallel, batch)


@cache
def exact(name):
    """(gradients by name, norm) of the float64 oracle on one rank."""
    first = run_ranks(1, first_step, config_of(name, {}, {}, precision="fp64"))[0]
    table = parameters(config_of(name, {}, {}).model)
    whole = {key: torch.full(table[key].shape, torch.nan).double() for key, *_ in first.gradients}
    for key, box, part in first.gradients:
        whole[key][box.slices] = part
    return whole, first.norm


@cache
def one_rank_scales(name, micro_batch_size):
    """The scales of one process with micro-batches of that size."""
    return run_ranks(1, scales, name, {}, {"micro_batch_size": micro_batch_size})[0]


@pytest.mark.parametrize(
    "row", [ROWS[-1], *(pytest.param(row, marks=slow("3 to 6 s")) for row in ROWS[:-1])], ids=str
)
def test_a_layout_has_float64_s_gradients_to_rounding_and_one_rank_s_loss_scales(row):
    name, world, parallel, batch = row
    whole, norm = exact(name)
    expected = one_rank_scales(name, batch.get("micro_batch_size", 1))
    assert {outcome for _, outcome in expected} == {"updated", "overflow"}
    seen = set()
    for first, found in run_ranks(world, both, name, parallel, batch):
        assert found == expected
        assert first.norm == pytest.approx(norm, rel=2 * HALF)
        for key, box, part in first.gradients:
            error = float((part - whole[key][box.slices]).norm() / whole[key].norm())
            assert error < 8 * HALF, key
            seen.add(key)
    assert seen == set(whole), "together the ranks hold every parameter"


def train(*arguments):
    """((loss scale, outcome), loss) of each step of `train_and_save`, as two lists."""
    done = train_and_save(*arguments)
    return [(step.loss_scale, step.outcome) for step in done], [step.loss for step in done]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(a run's folder with step 7 of 16, what each step of the whole run came to, its losses)."""
    folders = [tmp_path_factory.mktemp(name) for name in ("whole", "half")]
    config = config_of("llama", {"tp": 2}, {}, **NEAR)
    known, losses = run_ranks(2, train, config, folders[0], 0, 16)[0]
    run_ranks(2, train, config, folders[1], 0, 7)
    assert max(known[7:]) > known[7], "it grows after the stop,"
    for part in (known[:7], known[7:]):
        assert len({outcome for _, outcome in part}) == 2, "and overflows before and after"
    return folders[1], known, losses


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {"tp": 2}), *slow_cases("2 s", (2, {"cp": 2, "zero": 1}))],
    ids=str,
)
def test_a_run_goes_on_with_its_loss_scale_and_updates_on_any_layout(
    stopped, world, parallel, tmp_path
):
    folder, known, losses = stopped
    (tmp_path / "step-00000007").symlink_to(folder / "step-00000007")
    config = config_of("llama", parallel, {}, **NEAR)
    again, more = run_ranks(world, train, config, tmp_path, 7, 16)[0]
    assert again == known[7:]
    if parallel == {"tp": 2}:
        assert more == losses[7:], "bit for bit"
    assert more == pytest.approx(losses[7:], rel=2 * HALF)
