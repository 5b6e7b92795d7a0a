"""Experts, ranks of experts and senders that no token meets: the one-rank run, zeros included."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from tiny import MOE, Samples, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ONE = MOE | {"num_experts": 8, "top_k": 1, "normalize_top_k": False, "router_score": "sigmoid"}
ONE |= {"router_bias_update_rate": 0.001}
FIRST = {"capacity_factor": 1.0, "drop_policy": "position"}  # the first token of each sequence
MODELS = {
    "all to one expert": ONE,
    "all to one expert, padded": ONE | {"capacity_factor": 8.0, "pad_to_capacity": True},
    "one token to one expert": ONE | FIRST,
    "one token to one expert, padded": ONE | FIRST | {"pad_to_capacity": True},
    "8 times as many experts as tokens": ONE | {"num_experts": 64},
}


class Answer(NamedTuple):
    """A step of a rank: loss, gradients it keeps and their rows, those no backward touched."""

    loss: float
    gradients: dict
    rows: dict
    untouched: set
    tokens: list  # of each of this rank's experts, by the calls of the first layer


def stepped(runtime, parallel, batch):
    """The Answer of every model, on a rank."""
    answers = {}
    for name, model in MODELS.items():
        train = {"precision": "fp64", "matmul": "strict"}
        config = run_config(model, parallel=parallel, batch=batch, train=train)
        trainer = Trainer(config, runtime)
        initialise(trainer)
        stage, calls = trainer.stages[0], []
        experts = stage.get_submodule("blocks.0.mlp.experts")

        def note(module, given, to=calls):
            to.append(None if given[1] is None else given[1].tolist())

        experts.register_forward_pre_hook(note)
        if model["num_experts"] == 8:
            for router in trainer.balance.routers:
                with torch.no_grad():
                    router.bias[5] = 9.0
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        loss = trainer.train_step(loader).loss
        loader.close()
        views = {key: view.clone() for key, view in trainer.strategy.gradients.items()}
        rows = {key: trainer.strategy.ownership.rows(key) for key in views}
        untouched = set() if parallel.get("zero") == 3 else trainer.strategy.fresh
        answers[name] = Answer(loss, views, rows, untouched, calls)
    return answers


@cache
def one_rank():
    return run_ranks(1, stepped, {}, {})[0]


@pytest.mark.parametrize(
    ("world", "parallel", "batch"),
    [
        (2, {"cp": 2, "ep": 2}, {}),
        (4, {"ep": 2, "zero": 3}, {}),
        (2, {"etp": 2, "zero": 1, "dispatcher": "all_gather"}, {}),
        (4, {"tp": 2, "ep": 2, "etp": 2, "dispatcher": "all_gather"}, {"micro_batch_size": 2}),
    ],
    ids=str,
)
def test_what_no_token_meets_has_zero_gradients_on_every_layout(world, parallel, batch):
    found = run_ranks(world, stepped, parallel, batch)
    for name, model in MODELS.items():
        config = run_config(model, parallel=parallel)
        layout, table = ParallelLayout.of(config.parallel, world), parameters(config.model)
        whole = one_rank()[name]
        for rank, answer in enumerate(answers[name] for answers in found):
            assert answer.loss == pytest.approx(whole.loss, rel=1e-12)
            assert answer.untouched == set(), "a gradient of zeros, not a missing one"
            for key, gradient in answer.gradients.items():
                described = table[key]
                expected = torch.zeros(described.local_shape(layout), dtype=torch.float64)
                box = described.box(layout, rank)
                inside = tuple(slice(n) for n in box.size)
                everything = described.local_shape(ParallelLayout(1))
                expected[inside] = whole.gradients[key].view(everything)[box.slices]
                expected = expected.view(described.stored_shape(layout))
                scale = float(whole.gradients[key].norm())
                error = float((gradient - expected[answer.rows[key]]).norm())
                assert error <= 1e-10 * scale, f"{key} of {name}: {error} of {scale}"


def test_the_cases_are_cases():
    whole = one_rank()
    for name in MODELS:
        up = whole[name].gradients["blocks.0.mlp.experts.gate_up.weight"]
        up = up.unflatten(0, (MODELS[name]["num_experts"], -1))
        used = [expert for expert, gradient in enumerate(up) if gradient.any()]
        if "one expert" in name:
            assert used == [5], "experts 0 to 3, half of the ranks at ep=2, get nothing"
        else:
            assert 1 < len(used) <= 32
    first = run_ranks(2, stepped, {"cp": 2, "ep": 2}, {})
    tokens = [answers["one token to one expert"].tokens for answers in first]
    assert tokens == [[[0, 0, 0, 0]] * 4, [[0, 1, 0, 0]] * 4], "one row, which one rank sends"
