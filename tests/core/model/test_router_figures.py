"""The figures of routers in metrics.jsonl, against plain arithmetic and on every kind of layout."""

import math

import pytest
import torch
from ranks import run_ranks
from tiny import BIASED, MOE, Samples, run_config

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.metrics import StepFacts, _by_layer, _row
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
EXACT = {"precision": "fp64", "steps": 3}
PEAKED = {"init_std": 0.5, "num_experts": 6, "capacity_factor": 1.0}
UNGROUPED = {"router_groups": 1, "router_top_groups": 1}
SIGMOID = BIASED | PEAKED | UNGROUPED | {"aux_loss_coeff": 0.02}
SOFTMAX = MOE | PEAKED | {"z_loss_coeff": 0.01, "aux_loss_coeff": 0.0}
DENSE_FIRST = SOFTMAX | {"first_dense_layers": 1, "ffn_hidden_size": 20, "capacity_factor": 0.0}
PARALLEL = {"parallel_residual": True}


def figures(runtime, config, steps=2):
    """(the figures of each step, what routers of this rank counted in the last)."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    done = [trainer.train_step(loader).routers for _ in range(steps)]
    loader.close()
    return done, [int(router.load_E.sum()) for router in trainer.balance.routers]


def by_hand(model):
    """Figures of the first step, a sequence and an expert at a time, from the routers' inputs."""
    config = run_config(model, train=EXACT)
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    seen = {router.layer: [] for router in trainer.balance.routers}
    for router in trainer.balance.routers:
        record = seen[router.layer].append
        weight = router.weight.detach().clone()
        router.register_forward_pre_hook(
            lambda _, given, record=record, weight=weight: record(given[0].detach() @ weight.T)
        )
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    trainer.train_step(loader)
    loader.close()
    return [_of_layer(config.model, sequences) for _, sequences in sorted(seen.items())]


def _of_layer(model, sequences):
    sums, loads = dict.fromkeys(("entropy", "z_loss", "balance", "dropped"), 0.0), [0] * 6
    for logits_TE in sequences:
        counts, means = [0] * 6, [0.0] * 6
        for logits in logits_TE.tolist():
            scores = [math.exp(z) for z in logits]
            sums["z_loss"] += math.log(sum(scores)) ** 2
            if model.router_score == "sigmoid":
                scores = [1 / (1 + math.exp(-z)) for z in logits]
            shares = [score / sum(scores) for score in scores]
            sums["entropy"] -= sum(p * math.log(p) for p in shares)
            means = [m + p / len(logits_TE) for m, p in zip(means, shares, strict=True)]
            for expert in sorted(range(6), key=lambda e: -logits[e])[: model.top_k]:
                counts[expert] += 1
        copies = len(logits_TE) * model.top_k
        balance = sum(6 * n / copies * p for n, p in zip(counts, means, strict=True))
        sums["balance"] += balance * len(logits_TE)
        room = math.ceil(copies / 6 * model.capacity_factor)
        sums["dropped"] += sum(max(0, n - room) for n in counts)
        loads = [a + b for a, b in zip(loads, counts, strict=True)]
    tokens = sum(map(len, sequences))
    found = {"load_max_over_mean": max(loads) * 6 / sum(loads)}
    found |= {name: total / tokens for name, total in sums.items() if name != "dropped"}
    return found | {"dropped": sums["dropped"] / sum(loads)}


@pytest.mark.parametrize("model", [SIGMOID, SOFTMAX], ids=["biased sigmoid", "softmax"])
def test_the_figures_are_those_of_plain_arithmetic(model):
    first, _ = figures(ALONE, run_config(model, train=EXACT))
    names = {"load_max_over_mean", "entropy", "dropped", "z_loss", "sequence_aux_loss"}
    names |= {"aux_loss"} if model["aux_loss_coeff"] else set()
    assert set(first[0]) == {f"router_{name}" for name in names}
    expected = by_hand(model)
    for name in names:
        # a micro-batch is a sequence here, so both kinds of balancing loss are one number
        key = "balance" if name.endswith("aux_loss") else name
        wanted = [layer[key] for layer in expected]
        assert first[0][f"router_{name}"] == pytest.approx(wanted, rel=1e-11), name
    assert all(0.05 < x < 0.9 for x in first[0]["router_dropped"]), "some copies are dropped"


LAYOUTS = {
    2: ({"zero": 3}, {"cp": 2, "ep": 2}, {"pp": 2},
        {"tp": 2, "etp": 2}, {"pp": 2, "vpp": 1, "schedule": "zero_bubble", "recompute": "full"}),
    4: ({"tp": 2, "ep": 2, "zero": 1}, {"tp": 4, "tp_mode": "2d"}, {"pp": 2, "ep": 2}),
}  # fmt: skip


def on_layouts(runtime, configs):
    return [figures(runtime, config)[0] for config in configs]


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_has_the_figures_of_one_rank(world):
    models = [SIGMOID, SOFTMAX | {"capacity_factor": 0.0}, DENSE_FIRST]
    configs = [
        run_config(
            model | ({"aux_loss_coeff": 0.0} if parallel.get("tp_mode") else {}),
            parallel=parallel,
            batch={"micro_batch_size": 2 if parallel.get("tp_mode") else 1},
            train=EXACT,
        )
        for model in models
        for parallel in LAYOUTS[world]
    ]
    ranks = run_ranks(world, on_layouts, configs)
    for number, config in enumerate(configs):
        plain = config.model_copy(
            update={"parallel": run_config().parallel, "batch": run_config().batch}
        )
        alone, _ = figures(ALONE, plain)
        for rank in ranks:
            for step, expected in zip(rank[number], alone, strict=True):
                assert step.keys() == expected.keys() and len(expected) >= 4
                for name, values in expected.items():
                    assert step[name] == pytest.approx(values, rel=1e-10), (name, config.parallel)


def test_steps_that_are_not_logged_and_dense_models_have_none():
    done, _ = figures(ALONE, run_config(MOE, train=EXACT | {"log_every": 2}))
    assert done[0] == {} and done[1]
    assert figures(ALONE, run_config(train=EXACT))[0] == [{}, {}]


FROZEN = {
    "all of the first block": ({}, ["embedding", "blocks.0"]),
    "attention and routers": ({}, ["embedding", "blocks.*.attention*", "*_norm", "*.router"]),
    "all but a parallel block's attention": (PARALLEL, ["embedding", "*norm*", "*.mlp"]),
    "all but the norm behind experts": ({"norm_order": "sandwich"},
                                        ["embedding", "*attention*", "*.mlp", "*mlp_norm"]),
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", FROZEN)
def test_frozen_layers_count_each_copy_once_and_move_the_biases_that_are_not_frozen(
    case, recompute
):
    more, freeze = FROZEN[case]
    model = BIASED | more
    train = EXACT | {"freeze": freeze}
    config = run_config(model, parallel={"recompute": recompute}, train=train)
    done, copies = figures(ALONE, config)
    assert copies == [4 * 8 * 2] * 2
    whole, _ = figures(ALONE, run_config(model, train=EXACT))
    assert done[0] == {name: pytest.approx(v, rel=1e-12) for name, v in whole[0].items()}


def test_a_frozen_router_keeps_its_bias():
    config = run_config(BIASED, train=EXACT | {"freeze": ["blocks.1.mlp.router"]})
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    trainer.train_step(loader)
    loader.close()
    first, second = (router.bias for router in trainer.balance.routers)
    assert first.any() and not second.any()


def test_a_row_has_lists_and_trackers_get_a_number_of_each_layer():
    config = run_config(DENSE_FIRST, train=EXACT)
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    step = trainer.train_step(loader)
    loader.close()
    row = _row(config, step, StepFacts(4, None, 0, None), 1.0)
    assert row["router_entropy"] == step.routers["router_entropy"] and len(step.routers) > 2
    values = _by_layer(row, step.routers, config.model.first_dense_layers)
    assert values["router_entropy/1"] == row["router_entropy"][0]
    assert all(not isinstance(value, list) for value in values.values())
