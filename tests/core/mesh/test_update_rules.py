"""How each parameter is updated, by its kind."""

import pytest

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, OptimizerConfig
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.update_rules import moments_of, update_of

GPT = ModelConfig(num_layers=1, hidden_size=32, num_heads=4, vocab_size=301, max_seq_len=8)
ADAMW, LAMB, SGD = (OptimizerConfig(name=name) for name in ("adamw", "lamb", "sgd"))
MOMENTUM = OptimizerConfig(name="sgd", momentum=0.9)


def test_weight_decay_spares_biases_and_norms():
    table = run_parameters(GPT, LoraConfig())
    spared = {name for name, p in table.items() if not update_of(p, ADAMW).decays}
    assert spared == {name for name in table if name.endswith("bias") or "norm" in name}


def test_weight_decay_spares_sinks_though_they_begin_as_matrices_do():
    table = run_parameters(GPT.model_copy(update={"attention_sinks": True}), LoraConfig())
    sinks = table["blocks.0.attention.sinks"]
    assert sinks.shape == (4, 1) and not update_of(sinks, ADAMW).decays


def test_adapters_decay_though_b_begins_at_zero():
    table = run_parameters(GPT, LoraConfig(rank=2))
    adapters = [parameter for name, parameter in table.items() if ".adapter." in name]
    assert adapters and all(update_of(parameter, LAMB).decays for parameter in adapters)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)])
def test_what_is_trained_has_the_moments_of_its_rule(lora):
    table = run_parameters(GPT, lora)
    trained = {name for name, parameter in table.items() if parameter.trained}
    for optimizer in (ADAMW, LAMB):
        assert moments_of(table, optimizer) == {"exp_avg": trained, "exp_avg_sq": trained}
    assert moments_of(table, MOMENTUM) == {"momentum": trained}
    assert moments_of(table, SGD) == {}
