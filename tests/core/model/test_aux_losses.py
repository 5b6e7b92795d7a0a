"""Losses of routers by their formulas: gradients of a step on each layout, against autograd of
E sum_e f_e P_e (arXiv:2101.03961, section 2.2) and of mean logsumexp^2 (arXiv:2202.08906, 3)."""

from functools import cache

import pytest
import torch
from parity_runs import train_on
from ranks import run_ranks
from tiny import MOE, Samples, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.inputs import make_inputs
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
SIZE, SEQUENCES, S = 2, 4, 8  # micro-batches of two sequences, of a step's four
NONE = {"aux_loss_coeff": 0.0, "sequence_aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}
LOSSES = {
    "batch": {"aux_loss_coeff": 0.5},
    "sequence": {"sequence_aux_loss_coeff": 0.5},
    "z": {"z_loss_coeff": 0.5},
    "sigmoid, all": {"router_score": "sigmoid", **dict.fromkeys(NONE, 0.2)},
}
WITHOUT = {"none": {}, "sigmoid, none": {"router_score": "sigmoid"}}
LAYOUTS = [
    (1, {}),
    (4, {"tp": 2, "cp": 2, "etp": 2}),
]  # of any other layout the parity table compares mixtures with these losses


def config_of(changes, parallel):
    batch = {"micro_batch_size": SIZE, "global_batch_size": SEQUENCES, "seq_len": S}
    sections = {"train": {"precision": "fp64", "matmul": "strict"}, "optimizer": {"clip": 0.0}}
    model = MOE | NONE | {"init_std": 0.3} | changes
    return run_config(model, parallel=parallel, batch=batch, **sections)


def balance(probabilities_TE, top_k):
    """E sum_e f_e P_e of some tokens: f_e of the choices are e's, and P_e is its mean share."""
    tokens, experts = probabilities_TE.shape
    counts = [0] * experts
    for row in probabilities_TE.tolist():
        for expert in sorted(range(experts), key=lambda e: -row[e])[:top_k]:
            counts[expert] += 1
    shares = torch.tensor(counts, dtype=torch.float64) / (tokens * top_k)
    return experts * (shares * probabilities_TE.mean(0)).sum()


def router_losses(logits_TE, model):
    """What a layer adds to the mean loss of a micro-batch."""
    scores = logits_TE.sigmoid() if model.router_score == "sigmoid" else logits_TE.softmax(-1)
    scores = scores / scores.sum(-1, keepdim=True)
    rows = [balance(row, model.top_k) for row in scores.split(S)]
    return (
        model.aux_loss_coeff * balance(scores, model.top_k)
        + model.sequence_aux_loss_coeff * sum(rows) / len(rows)
        + model.z_loss_coeff * logits_TE.logsumexp(-1).square().mean()
    )


@cache
def by_hand(name):
    """Gradients of one step by parameter, from a stage that knows of no loss but the tokens'."""
    config = config_of((LOSSES | WITHOUT)[name], {})
    model, trainer = config.model, Trainer(config, ALONE)
    initialise(trainer)
    (stage,) = build_stages(config, trainer.groups).values()  # autograd returns its gradients
    stage.load_state_dict(trainer.stages[0].state_dict())
    logits = []

    def note(router, arguments):
        logits.append(arguments[0] @ router.weight.T)

    for block in stage.blocks.values():
        block.mlp.router.register_forward_pre_hook(note)
    total, num_micro_batches = 0.0, SEQUENCES // SIZE
    for first in range(0, SEQUENCES, SIZE):
        rows = torch.as_tensor(Samples(config).batch(first, SIZE))
        inputs = make_inputs(model, torch.float64, rows[:, :-1], labels=rows[:, 1:])
        logits.clear()
        loss = stage.losses(stage(None, inputs), inputs).mean()
        assert len(logits) == model.num_layers
        total = total + (loss + sum(router_losses(x, model) for x in logits)) / num_micro_batches
    names, weights = zip(*stage.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, weights), strict=True))


def gradients(runtime, parallel):
    """The first gradients of a rank with each of the losses, by parameter."""
    configs = {name: config_of(changes, parallel) for name, changes in LOSSES.items()}
    return {n: train_on(runtime, config, Samples, 1).gradients for n, config in configs.items()}


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS, ids=str)
def test_gradients_are_those_of_the_formulas(world, parallel):
    config, alone = config_of({}, parallel), ParallelLayout(1)
    layout, table = ParallelLayout.of(config.parallel, world), parameters(config.model)
    for rank, measured in enumerate(run_ranks(world, gradients, parallel)):
        for name in LOSSES:
            for parameter, (gradient, _) in measured[name].items():
                described, whole = table[parameter], by_hand(name)[parameter]
                box = described.box(layout, rank)
                expected = whole.view(described.local_shape(alone))[box.slices]
                found = gradient.view(described.local_shape(layout))[box.inside]
                assert (found - expected).norm() < 1e-10 * whole.norm(), (name, parameter)


@pytest.mark.parametrize("name", LOSSES)
def test_the_losses_of_these_tests_are_seen_in_every_router(name):
    without = "sigmoid, none" if "sigmoid" in name else "none"
    for parameter, gradient in by_hand(name).items():
        if parameter.endswith("router.weight"):
            assert (gradient - by_hand(without)[parameter]).norm() > 0.01 * gradient.norm()
