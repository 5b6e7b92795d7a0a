"""Biases of experts against plain Python over the whole global batch, and what they do to loads."""

import math
from functools import cache

import pytest
import torch
from ranks import run_ranks
from tiny import BIASED, MOE, Samples, run_config

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, shards
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
TALL = {"micro_batch_size": 2}
STILL = {"lr": 0.0, "warmup_steps": 0}  # weights stay, biases move
RATE, STEPS = 0.03, 5
# one layer, whose router therefore sees the same tokens whatever the biases are
ONE = MOE | {"num_layers": 1, "num_experts": 8, "init_std": 0.5}
ONE |= {"router_score": "sigmoid", "router_bias_update_rate": RATE}


def trainer_of(config, runtime=ALONE):
    trainer = Trainer(config, runtime)
    initialise(trainer)
    return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)


def moved(runtime, configs):
    """Of each config (each step's ratio of loads, the last bias where this rank has the layer)."""
    found = []
    for config in configs:
        trainer, loader = trainer_of(config, runtime)
        ratios = [trainer.train_step(loader).expert_load for _ in range(STEPS)]
        loader.close()
        found.append((ratios, [router.bias.tolist() for router in trainer.balance.routers]))
    return found


@cache
def by_hand(num_experts):
    """The same in plain Python: a token, an expert and a step at a time."""
    model = ONE | {"num_experts": num_experts}
    trainer, loader = trainer_of(run_config(model, optimizer=STILL, train={"precision": "fp64"}))
    (router,) = trainer.balance.routers
    seen = []
    router.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].detach()))
    bias, ratios = [0.0] * num_experts, []
    for _ in range(STEPS):
        seen.clear()
        trainer.train_step(loader)
        loads = [0] * num_experts
        for logits in (torch.cat(seen) @ router.weight.T).tolist():
            biased = [1 / (1 + math.exp(-z)) + b for z, b in zip(logits, bias, strict=True)]
            for expert in sorted(range(num_experts), key=lambda e: -biased[e])[:2]:
                loads[expert] += 1
        assert sum(loads) == 4 * 8 * 2, "every token of the global batch, twice"
        mean = sum(loads) / num_experts
        ratios.append(max(loads) / mean)
        for expert, load in enumerate(loads):
            bias[expert] += RATE * ((mean > load) - (mean < load))
    loader.close()
    return ratios, bias


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [({}, {}), ({"cp": 2, "ep": 2}, {}), ({"pp": 2, "stage_layers": [0, 1]}, {})]),
        (4, [({"tp": 2, "etp": 2, "zero": 1}, TALL)]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_biases_move_by_the_loads_of_the_whole_global_batch(world, layouts):
    train = {"precision": "fp64", "steps": STEPS}
    # 64 copies: 8 each, or 10.67
    cases = [(count, parallel, batch) for count in (8, 6) for parallel, batch in layouts]
    configs = [
        run_config(
            ONE | {"num_experts": count},
            parallel=parallel,
            batch=batch,
            optimizer=STILL,
            train=train,
        )
        for count, parallel, batch in cases
    ]
    ranks = run_ranks(world, moved, configs)
    for number, (count, parallel, _) in enumerate(cases):
        ratios, bias = by_hand(count)
        odd = {round(b / RATE) % 2 for b in bias}
        assert odd == ({0, 1} if count == 8 else {1}), "some loads of 8 experts are the mean"
        for rank in ranks:
            assert rank[number][0] == pytest.approx(ratios, rel=1e-12)
        biases = [values for rank in ranks for values in rank[number][1]]
        assert len(biases) == (1 if parallel.get("pp") else world)
        for values in biases:
            assert values == pytest.approx(bias, abs=1e-12)


def counted(runtime, configs):
    """The copies that each router of this rank counted in the second of two steps of each."""
    found = []
    for config in configs:
        trainer, loader = trainer_of(config, runtime)
        for _ in range(2):
            trainer.train_step(loader)
        loader.close()
        found.append([int(router.load_E.sum()) for router in trainer.balance.routers])
    return found


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (1, [{"recompute": again} for again in ("none", "full", "selective")]),
        (2, [{"pp": 2, "schedule": "zero_bubble", "recompute": "full"}]),
    ],
    ids=["one rank", "a pipeline"],
)
def test_a_copy_counts_once_however_often_it_is_computed(world, layouts):
    changes = {}, {"sequence_aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}, {"capacity_factor": 0.5}
    cases = [(BIASED | change, parallel) for change in changes for parallel in layouts]
    configs = [run_config(model, parallel=parallel) for model, parallel in cases]
    copies = 4 * 8 * 2  # sequences, tokens of each, experts of a token
    for case, ranks in zip(
        cases, zip(*run_ranks(world, counted, configs), strict=True), strict=True
    ):
        assert [load for rank in ranks for load in rank] == [copies] * 2, case


def test_evaluation_counts_nothing_and_moves_nothing():
    trainer, loader = trainer_of(run_config(BIASED, train={"eval_batches": 2}))
    trainer.evaluate(loader)
    loader.close()
    for router in trainer.balance.routers:
        assert not router.load_E.any() and not router.bias.any()


def test_a_step_that_is_not_finite_moves_no_bias_and_leaves_no_load_to_the_next():
    trainer, loader = trainer_of(run_config(BIASED))
    trainer.train_step(loader)
    (router, _), before = trainer.balance.routers, trainer.balance.routers[0].bias.clone()
    norm = trainer.stages[0].get_parameter("final_norm.weight")
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
    step = trainer.train_step(loader)
    assert step.outcome == "fault" and step.expert_load is None
    assert torch.equal(router.bias, before) and before.any()
    trainer.forward_backward(loader)  # as the search for the first fault does
    with torch.no_grad():
        norm.copy_(kept)
    assert trainer.train_step(loader).outcome == "updated"
    loader.close()
    assert int(router.load_E.sum()) == 4 * 8 * 2


def skewed(rate):
    """Each step's largest load over the mean, by the router's answers, where one expert leads."""
    model = ONE | {"router_bias_update_rate": rate}
    batch = {"micro_batch_size": 8, "global_batch_size": 16}
    trainer, loader = trainer_of(run_config(model, optimizer=STILL, batch=batch))
    stage, chosen = trainer.stages[0], []
    router = stage.get_submodule("blocks.0.mlp.router")
    router.register_forward_hook(lambda *call: chosen.append(call[2][1].experts))
    with torch.no_grad():
        stage.get_parameter("embedding.weight")[:, 0] += 3.0  # what all tokens share,
        router.weight[:2, 0] += 10.0  # leads them to two of the experts
    ratios = []
    for _ in range(40):
        chosen.clear()
        trainer.train_step(loader)
        loads = torch.bincount(torch.cat(chosen).flatten(), minlength=8)
        ratios.append(float(loads.max() / loads.double().mean()))
    loader.close()
    return ratios


def test_a_skewed_load_evens_out_with_biases_and_stays_without():
    without, with_biases = skewed(0.0), skewed(RATE)
    assert with_biases[0] == without[0] > 2.5
    late, late_without = (sum(ratios[-20:]) / 20 for ratios in (with_biases, without))
    assert late < 1.8 < 2.5 < late_without


def test_biases_are_float32_under_bfloat16_and_have_no_gradient_or_optimizer_state():
    trainer, loader = trainer_of(run_config(BIASED, train={"precision": "bf16"}))
    trainer.train_step(loader)
    loader.close()
    (bias, _) = [router.bias for router in trainer.balance.routers]
    assert bias.dtype == torch.float32 and bias.grad is None and not bias.requires_grad
    steps = {round(value / 0.01, 4) for value in bias.tolist()}
    assert steps <= {-1.0, 0.0, 1.0} and len(steps) > 1
    saved = [piece for piece in shards(trainer) if piece.name.endswith("router.bias")]
    assert [piece.tensor.dtype for piece in saved] == [torch.float32] * 2
    assert not [name for name in trainer.optimizer.state() if name.endswith("router.bias")]
    assert not [name for name in trainer.strategy.gradients if name.endswith("router.bias")]
