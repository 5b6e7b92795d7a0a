"""[[optimizer.group]]: learning rates and weight decay by pattern, against torch's own groups; the
parity table has its layouts."""

import pytest
import torch
from tiny import GPT, LLAMA, Samples, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.update_rules import update_of
from mtcli.core.mesh.update_table import update_table
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.run_config import planned_config
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
EXACT = {"precision": "fp64", "matmul": "strict", "steps": 4}
GROUPS = [
    {"match": ["embedding", "blocks.0-1.attention.*"], "lr_scale": 0.1},
    {"match": ["*attention*", "head"], "lr_scale": 2.0, "weight_decay": 0.0},
    {"match": ["blocks.3"], "weight_decay": 0.4},
]
OPTIMIZERS = {
    "adamw": {"name": "adamw", "lr": 0.01},
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "lamb": {"name": "lamb", "lr": 0.05},
    "muon": {"name": "muon", "lr": 0.02, "other": {"lr": 0.003, "weight_decay": 0.3}},
}


def trained(optimizer, model=LLAMA, steps=3, **train):
    """(weights by name after some steps, the rate of each step, the trainer)."""
    more = {"warmup_steps": 2, "weight_decay": 0.2, "clip": 0.0}
    config = run_config(model, optimizer=more | optimizer, train=EXACT | train)
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    rates = [trainer.train_step(loader).lr for _ in range(steps)]
    loader.close()
    return dict(trainer.stages[0].named_parameters()), rates, trainer


def by_name(name):
    """(times the rate, the decay or None) of a parameter, written out."""
    if name == "embedding.weight" or name.startswith(
        ("blocks.0.attention.", "blocks.1.attention.")
    ):
        return 0.1, None
    if "attention" in name or name == "head.weight":
        return 2.0, 0.0
    return 1.0, 0.4 if name.startswith("blocks.3.") else None


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_groups_step_as_torch_s_param_groups(kind):
    ours, rates, _ = trained(OPTIMIZERS[kind] | {"group": GROUPS})
    plain = run_config(LLAMA, optimizer=OPTIMIZERS[kind], train=EXACT)
    theirs = Trainer(plain, ALONE)
    initialise(theirs)
    named = dict(theirs.stages[0].named_parameters())
    groups = []
    for name, parameter in named.items():
        scale, decay = by_name(name)
        decay = (0.2 if decay is None else decay) * ("norm" not in name)
        groups.append({"params": [parameter], "weight_decay": decay, "scale": scale})
    make = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    }
    optimizer = make[kind]()
    loader = MicroBatchLoader(Samples(plain), plain, theirs.groups)
    for step, lr in enumerate(rates):
        theirs.step = step
        theirs.forward_backward(loader)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        for name, parameter in named.items():
            parameter.grad = theirs.strategy.gradients[name].view_as(parameter).clone()
        optimizer.step()
        for parameter in named.values():
            parameter.grad = None
    loader.close()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, named[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_step_of_a_group_is_that_of_a_run_with_its_rate_and_decay(kind):
    """A first step depends on no other parameter's update, so three plain runs have them all."""
    grouped, _, _ = trained(OPTIMIZERS[kind] | {"group": GROUPS}, steps=1)
    runs = {}
    for name, weight in grouped.items():
        scale, decay = by_name(name)
        if (scale, decay) not in runs:
            more = {"lr": OPTIMIZERS[kind]["lr"] * scale}
            more |= {} if decay is None else {"weight_decay": decay}
            other = dict(OPTIMIZERS[kind].get("other", {}))
            if other:
                other["lr"] *= scale
                other |= {} if decay is None else {"weight_decay": decay}
                more["other"] = other
            runs[scale, decay], _, _ = trained(OPTIMIZERS[kind] | more, steps=1)
        expected = runs[scale, decay][name]
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-15, msg=name)
    assert len(runs) == 4


def test_a_group_is_one_update_of_its_rule_and_a_rate_of_0_stays():
    still = [{"match": ["blocks.0"], "lr_scale": 0.0}]
    weights, _, trainer = trained(OPTIMIZERS["muon"] | {"group": still}, model=GPT)
    # of matrices and of all else, once for the group and once for the others
    assert sorted(len(rule.names) for rule in trainer.optimizer.rules) == [4, 8, 12, 28]
    before = Trainer(trainer.config, ALONE)
    initialise(before)
    for name, weight in before.stages[0].named_parameters():
        assert torch.equal(weight, weights[name]) == name.startswith("blocks.0."), name


def test_the_first_group_that_matches_has_a_parameter_and_the_table_shows_it():
    config = run_config(LLAMA, optimizer=OPTIMIZERS["adamw"] | {"group": GROUPS})
    table = parameters(config.model)
    found = {
        name: update_of(parameter, config.optimizer).group for name, parameter in table.items()
    }
    assert (
        found["blocks.0.attention.qkv.weight"] == 0 and found["blocks.3.attention.out.weight"] == 1
    )
    assert found["blocks.3.mlp.down.weight"] == 2 and found["final_norm.weight"] is None
    rows = update_table(config.model, config.lora, config.optimizer)
    assert {tuple(row[:3]) for row in rows} >= {("adamw", "0.001", "0.1"), ("adamw", "0.02", "0")}
    assert update_table(config.model, config.lora, run_config(LLAMA).optimizer) == []


def test_the_table_has_the_matrices_of_a_rule_of_matrices_first():
    config = run_config(LLAMA, optimizer=OPTIMIZERS["muon"])
    rows = update_table(config.model, config.lora, config.optimizer)
    assert [row[0] for row in rows] == ["muon"] * 4 + ["adamw"] * 2
    assert rows[0][-1] == "query 16 x 16, key 8 x 16, value 8 x 16" and rows[-1][-1] == ""


def test_a_group_that_matches_nothing_trained_is_an_error():
    group = '[{match=["blocks.9", "*.bias"]}, {match=["embed"]}, {match=["embedding"]}]'
    words = [f"optimizer.group={group}", "train.freeze=['embedding']"]
    with pytest.raises(MtcliError) as raised:
        planned_config("tiny", words, 1)
    fields = [problem.field for problem in raised.value.problems]
    assert fields == [f"optimizer.group.{number}.match" for number in range(3)]
    assert "'blocks.9'" in raised.value.problems[0].message
