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
from hypothesis import assume, given, settings
from ranks import run_ranks
from tiny import DROPPING, GPT, LLAMA, MOE, Samples, run_config

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
    "moe": MOE,
    "moe capped": MOE | {"capacity_factor": 1.0},
    "moe early": MOE | {"capacity_factor": 0.5, "drop_policy": "position", "pad_to_capacity": True},
    "moe wide": MOE
    | {"num_experts": 8, "router_groups": 4, "router_top_groups": 2}
    | {"router_score": "sigmoid", "shared_expert_ffn_hidden_size": 8, "shared_expert_gate": True},
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
    Row("gpt dropout", 2, {"zero": 1}),
    Row("llama", 4, {"tp": 2, "zero": 1, "bucket_mib": 0.002}, TALL),
    Row("gpt dropout", 4, {"pp": 2, "zero": 1}),
    Row("llama", 1, {"zero": 1}),
    Row("llama", 2, {"cp": 2}),
    Row("gpt dropout", 2, {"cp": 2, "cp_mode": "all_gather"}),
    Row("llama", 2, {"cp": 2, "cp_mode": "a2a", "zero": 1}),
    Row("llama dropout", 4, {"tp": 2, "cp": 2}, TALL),
    Row("moe", 2, {"ep": 2}),
    Row("moe", 4, {"tp": 2, "ep": 2, "etp": 2, "zero": 1}, TALL),
    Row("moe", 4, {"cp": 2, "pp": 2, "etp": 2}),
    Row("gpt dropout", 2, {"pp": 2, "schedule": "zero_bubble"}),
    Row("llama", 4, {"tp": 2, "pp": 2, "schedule": "zero_bubble", "zero": 1}, TALL),
    Row("moe capped", 4, {"tp": 2, "cp": 2, "ep": 4}, TALL),
    Row("moe capped", 2, {"ep": 2, "dispatcher": "all_gather"}),
    Row("moe early", 4, {"tp": 2, "ep": 2, "etp": 2, "dispatcher": "all_gather"}, TALL),
    Row("moe early", 2, {"cp": 2, "ep": 2}),
    Row("gpt dropout", 2, {"zero": 3}),
    Row("llama", 4, {"tp": 2, "zero": 3, "recompute": "full"}, TALL),
    Row("gpt dropout", 4, {"pp": 2, "zero": 3, "schedule": "gpipe"} | NO_SP),
    Row("moe", 4, {"cp": 2, "ep": 2, "zero": 3}),
    Row("moe capped", 4, {"tp": 2, "ep": 2, "etp": 2, "pp": 1, "zero": 3}, TALL),
    Row("moe wide", 8, {"tp": 2, "cp": 2, "ep": 8}, TALL),
]
LARGE = Row("gpt dropout", 8, {"tp": 2, "pp": 2})


class Measured(NamedTuple):
    """What a rank saw: its weights, and the rows it keeps of the first gradients, by name."""

    weights: dict
    gradients: dict
    rows: dict
    losses: list
    norms: list


def train_on(runtime, config, steps):
    """Trains `steps` steps on a rank and returns its Measured."""
    trainer = Trainer(config, runtime)
    trainer.initialise()
    weights = {n: (held.tensor.clone(), held.rows) for n, held in trainer.gradients.held.items()}
    feed = Feed(Samples(config), config, trainer.groups)
    done = [trainer.train_step(feed)]
    gradients = {name: view.clone() for name, view in trainer.gradients.views.items()}
    rows = {name: trainer.ownership.rows(name) for name in gradients}
    done += [trainer.train_step(feed) for _ in range(steps - 1)]
    feed.close()
    return Measured(weights, gradients, rows, *([s[i] for s in done] for i in (1, 3)))


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
    """The Differences of a row. Raises AssertionError where a weight differs in any bit."""
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
    kept = sum(gradient.numel() for mine, _ in ranks for gradient in mine.gradients.values())
    assert kept >= sum(gradient.numel() for gradient in exact.gradients.values())
    return Differences(*(max(values) for values in zip(*found, strict=True)))


def slices(row, rank, mine, whole):
    """The largest relative difference of a rank's gradients from its slices of the whole ones,
    zeros where it holds padding."""
    layout = ParallelLayout.of(row.config().parallel, row.world)
    table, largest = parameters(row.config().model), 0.0
    for name, gradient in mine.gradients.items():
        box = table[name].rectangle(layout, rank)
        shape = table[name].local_shape(layout)
        weight, expected = (torch.zeros(shape, dtype=gradient.dtype) for _ in range(2))
        weight[box.inside] = whole.weights[name][0][box.slices]
        kept, at = mine.weights[name]
        assert torch.equal(kept, weight[at]), f"{name} starts otherwise"
        expected[box.inside] = whole.gradients[name][box.slices]
        error = gradient - expected[mine.rows[name]]
        largest = max(largest, float(error.norm() / whole.gradients[name].norm()))
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
    """Layouts of 4 ranks of any of the models, most of them legal."""
    model = draw(st.sampled_from(sorted(MODELS)))
    sizes = {axis: draw(st.sampled_from([1, 2])) for axis in ("tp", "cp", "pp")}
    experts = st.sampled_from([1, 2] if model == "moe" else [1])
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    parallel = sizes | {
        "ep": draw(experts),
        "etp": draw(experts),
        "sequence_parallel": draw(st.booleans()),
        "cp_mode": draw(st.sampled_from(["ring", "all_gather", "a2a"])),
        "zero": draw(st.sampled_from([0, 1, 3])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "bucket_mib": draw(st.sampled_from([1e-6, 0.004, 25.0])),
        "schedule": schedule,
        "vpp": 2 if schedule == "interleaved" else 1,
    }
    stages, layers = sizes["pp"] * parallel["vpp"], MODELS[model]["num_layers"]
    cuts = draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1))
    ends = [0, *sorted(cuts), layers]
    parallel["stage_layers"] = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    batch = {"micro_batch_size": draw(st.sampled_from([1, 2]))}
    return Row(model, 4, parallel, batch)


@settings(max_examples=10)
@given(layouts())
def test_any_legal_layout_of_four_ranks_has_the_one_rank_gradients(row):
    assume(not check.problems(row.config(), row.world))
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
