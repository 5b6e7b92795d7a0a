"""The table of layouts: whatever the ranks, a run is the one-rank run.

Each row trains a tiny model on a layout and is held to one process by itself: initial weights bit
for bit, the first step's loss and every gradient of every rank (replicas, padding and the second
copy of a tied embedding too), and the loss curve of 20 steps. A new axis is a new row of LAYOUTS.
`python tests/test_parity.py --table` prints the differences that docs/parity.md shows.
"""

import sys
from functools import cache
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ranks import run_ranks
from tiny import DROPPING, GPT, LLAMA, Samples, run_config

from mtcli.core.feed import Feed
from mtcli.core.spec import check
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters
from mtcli.core.trainer import Trainer

EXACT, CLOSE, STEPS = 1e-10, 1e-5, 20  # relative, in float64 and float32; steps of the curve

MODELS = {
    "gpt": GPT,
    "gpt dropout": GPT | DROPPING,
    "llama": LLAMA,
    "llama dropout": LLAMA | DROPPING,
}


class Row(NamedTuple):
    """A layout on `world` ranks of a model: `parallel` and `batch` sections over the defaults."""

    model: str
    world: int
    parallel: dict
    batch: dict = {}

    def __str__(self):
        sizes = {"world": self.world} | self.parallel | self.batch
        return f"{self.model}: " + " ".join(f"{k}={v}" for k, v in sizes.items())

    def config(self, precision="fp64", steps=STEPS):
        train = {"precision": precision, "steps": steps, "matmul": "strict"}
        model = MODELS[self.model]
        return run_config(model, parallel=self.parallel, batch=self.batch, train=train)


NO_SP = {"sequence_parallel": False}
TALL = {"micro_batch_size": 2}
ROWS = [
    Row("gpt dropout", 2, {"tp": 2}, TALL),
    Row("llama", 2, {"tp": 2}, TALL),
    Row("gpt dropout", 2, {"tp": 2} | NO_SP, TALL),
    Row("llama dropout", 2, {"tp": 2, "recompute": "selective"} | NO_SP, TALL),
    Row("gpt", 2, {"pp": 2}),
    Row("gpt dropout", 2, {"pp": 2, "schedule": "gpipe"}),
    Row("llama", 2, {"pp": 2, "stage_layers": [1, 3]}),
    Row("gpt dropout", 4, {"pp": 4, "stage_layers": [0, 2, 2, 0]}),
    Row("gpt dropout", 2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    Row("gpt", 2, {}),  # dp=2
    Row("llama dropout", 2, {"bucket_mib": 0.001}, TALL),
    Row("gpt dropout", 1, {"recompute": "full"}, TALL),
    Row("gpt dropout", 4, {"tp": 2, "pp": 2, "recompute": "selective"}, TALL),
    Row("llama dropout", 4, {"tp": 2, "pp": 2, "recompute": "full"} | NO_SP, TALL),
    Row("gpt dropout", 4, {"tp": 2}, TALL),
    Row("llama", 4, {"pp": 2, "stage_layers": [3, 1]}),
]
LARGE = Row("gpt dropout", 8, {"tp": 2, "pp": 2})


class Measured(NamedTuple):
    """What a rank saw: its local weights and first gradients by name, and global numbers."""

    weights: dict
    gradients: dict
    losses: list
    norms: list


def train_on(runtime, config, steps):
    """Trains `steps` steps on a rank and returns its Measured."""
    trainer = Trainer(config, runtime)
    trainer.initialise()
    named = [(n, p) for stage in trainer.stages.values() for n, p in stage.named_parameters()]
    weights = {name: parameter.detach().clone() for name, parameter in named}
    feed = Feed(Samples(config), config, trainer.groups)
    done = [trainer.train_step(feed)]
    gradients = {name: view.clone() for name, view in trainer.gradients.views.items()}
    done += [trainer.train_step(feed) for _ in range(steps - 1)]
    feed.close()
    return Measured(weights, gradients, [s.loss for s in done], [s.grad_norm for s in done])


def measure(runtime, row):
    """(one step in float64, a curve in float32) of a row on a rank."""
    return train_on(runtime, row.config("fp64"), 1), train_on(runtime, row.config("fp32"), STEPS)


@cache
def one_rank(model):
    """The oracle: the same model and samples in one process, one sequence at a time."""
    return run_ranks(1, measure, Row(model, 1, {}))[0]


class Differences(NamedTuple):
    """The largest differences of a row from one rank, relative; gradients by parameter norm."""

    loss_64: float
    gradient_64: float
    gradient_32: float
    curve_32: float


def compare(row):
    """The Differences of a row. Raises AssertionError where a weight differs in any bit, or where
    a padding row has a gradient."""
    ranks, (exact, close) = run_ranks(row.world, measure, row), one_rank(row.model)
    found = [
        Differences(
            worst([exact.losses, exact.norms], [mine.losses, mine.norms]),
            slices(row, rank, mine, exact),
            slices(row, rank, rounded, close),
            worst([close.losses, close.norms], [rounded.losses, rounded.norms]),
        )
        for rank, (mine, rounded) in enumerate(ranks)
    ]
    held = [set(mine.weights) for mine, _ in ranks]
    assert set.union(*held) == set(exact.weights), "together the ranks hold every parameter"
    return Differences(*(max(values) for values in zip(*found, strict=True)))


def slices(row, rank, mine, whole):
    """The largest relative difference of a rank's gradients from its slices of the whole ones."""
    layout = ParallelLayout.of(row.config().parallel, row.world)
    table, largest = parameters(row.config().model), 0.0
    for name, gradient in mine.gradients.items():
        box = table[name].rectangle(layout, rank)
        inside = tuple(slice(n) for n in box.size)
        weight = mine.weights[name].clone()
        assert torch.equal(weight[inside], whole.weights[name][box.slices]), name
        error = gradient[inside] - whole.gradients[name][box.slices]
        largest = max(largest, float(error.norm() / whole.gradients[name].norm()))
        weight[inside] = 0
        gradient[inside] = 0
        assert not weight.any() and not gradient.any(), f"{name}: padding is not zero"
    return largest


def worst(expected, found):
    """The largest relative difference of two lists of lists of numbers."""
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (expected, found))
    return float(((a - b).abs() / a.abs()).max())


@pytest.mark.parametrize("row", [*ROWS, LARGE], ids=str)
def test_every_layout_is_the_one_rank_run(row):
    found = compare(row)
    assert found.loss_64 < EXACT and found.gradient_64 < EXACT, found
    assert found.gradient_32 < CLOSE and found.curve_32 < CLOSE, found


@st.composite
def layouts(draw):
    """Any legal layout of 4 ranks that can be trained, on any of the models."""
    tp = draw(st.sampled_from([1, 2]))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if n * tp <= 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    parallel = {
        "tp": tp,
        "pp": pp,
        "sequence_parallel": draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "bucket_mib": draw(st.sampled_from([1e-6, 0.004, 25.0])),
        "schedule": schedule,
        "vpp": draw(st.sampled_from([2, 4])) if schedule == "interleaved" else 1,
    }
    stages = pp * parallel["vpp"]
    cuts = sorted(draw(st.lists(st.integers(0, 4), min_size=stages - 1, max_size=stages - 1)))
    ends = [0, *cuts, 4]
    parallel["stage_layers"] = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    batch = {"micro_batch_size": draw(st.sampled_from([1, 2] if tp * pp > 1 else [1]))}
    return Row(draw(st.sampled_from(sorted(MODELS))), 4, parallel, batch)


@settings(max_examples=8)
@given(layouts())
def test_any_legal_layout_of_four_ranks_has_the_one_rank_gradients(row):
    assert not check.problems(row.config(), row.world)
    exact, _ = one_rank(row.model)
    for rank, mine in enumerate(run_ranks(row.world, train_on, row.config("fp64"), 1)):
        assert worst([exact.losses, exact.norms], [mine.losses, mine.norms]) < EXACT
        assert slices(row, rank, mine, exact) < EXACT


def print_table():
    """Prints docs/parity.md's table: the measured differences of every row."""
    print("| model and layout | loss, fp64 | gradients, fp64 | gradients, fp32 | curve, fp32 |")
    print("|---|---|---|---|---|")
    for row in [*ROWS, LARGE]:
        print(f"| {row} | " + " | ".join(f"{value:.1e}" for value in compare(row)) + " |")


if __name__ == "__main__" and sys.argv[1:] == ["--table"]:
    print_table()
