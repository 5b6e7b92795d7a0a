"""The table of parameters: names, stages and floating-point operations.

Counts are held to published ones in tests/test_presets.py.
"""

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from tiny import LLAMA, MOE, run_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from mtcli.core.config.loading import load_config
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import (
    count_active,
    count_active_adapters,
    count_adapters,
    count_parameters,
    forward_flops,
    parameters,
    stage_layers,
    stage_parameters,
    training_flops,
)

GPT = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, vocab_size=300, max_seq_len=16)
UNTIED = GPT.model_copy(update={"tie_embeddings": False})


def test_names_follow_the_token():
    names = list(parameters(GPT))
    assert names[:3] == [
        "embedding.weight",
        "position_embedding.weight",
        "blocks.0.attention_norm.weight",
    ]
    assert names[-2:] == ["final_norm.weight", "final_norm.bias"]
    assert list(parameters(UNTIED))[-1] == "head.weight"


def test_names_are_the_same_for_every_block_and_shapes_too():
    by_block = [
        {
            p.name.removeprefix(f"blocks.{layer}."): p.shape
            for p in parameters(GPT).values()
            if p.layer == layer
        }
        for layer in range(4)
    ]
    assert len(by_block[0]) == 12
    assert all(block == by_block[0] for block in by_block)


@pytest.mark.parametrize("model", [GPT, UNTIED])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_hold_every_parameter_once_and_a_tied_embedding_at_both_ends(model, pp):
    layout = ParallelLayout(pp, pp=pp)
    stages = stage_layers(model, layout, ())
    held = [
        p.name
        for i, layers in enumerate(stages)
        for p in stage_parameters(parameters(model), layers, first=i == 0, last=i == pp - 1)
    ]
    copies = ["embedding.weight"] if model.tie_embeddings and pp > 1 else []
    assert sorted(held) == sorted([*parameters(model), *copies])


def test_layers_are_shared_out_evenly_or_as_given():
    layout = ParallelLayout(2, pp=2, vpp=2)
    assert stage_layers(GPT, layout, ()) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    assert stage_layers(GPT, layout, (0, 2, 1, 1)) == [
        range(0, 0), range(0, 2), range(2, 3), range(3, 4),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2-124m", "narayanan-1.7b", "gpt3-175b", "mt-nlg-530b"])
def test_forward_flops_are_a_third_of_narayanan_s_without_recompute(name):
    # 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for a step (arXiv:2104.04473, appendix)
    m = load_config(name).model
    s, h, layers = m.max_seq_len, m.hidden_size, m.num_layers
    step = 72 * s * layers * h**2 * (1 + s / (6 * h) + m.vocab_size / (12 * layers * h))
    assert 3 * s * forward_flops(m, s) == pytest.approx(step, rel=1e-12)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("targets", "whole"),
    [(ALL, []), (["q_proj", "v_proj", "down_proj"], []), (ALL, ["embed_tokens", "lm_head"])],
)
def test_training_adapters_takes_the_operations_that_torch_counts_of_peft(targets, whole):
    """All but what nothing needs: gradients of the first block's inputs unless the embedding is
    trained whole, and of its keys where no adapter is behind them."""
    m, s, rank = run_config(LLAMA).model, 16, 4
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=m.hidden_size,
            num_hidden_layers=m.num_layers,
            intermediate_size=m.ffn_hidden_size,
            num_attention_heads=m.num_heads,
            num_key_value_heads=m.num_kv_heads,
            vocab_size=m.vocab_size,
            attn_implementation="eager",
        )
    )
    theirs = get_peft_model(
        theirs, PeftConfig(r=rank, target_modules=targets, modules_to_save=whole)
    )
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(s)[None]
        theirs(ids, labels=ids).loss.backward()
    fused = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    adapters = sum(name in targets for name in ("q_proj", "k_proj", "v_proj"))
    unneeded = 2 * s * m.hidden_size * (fused + rank * adapters) * (not whole)
    unneeded += 2 * s * s * m.hidden_size * ("k_proj" not in targets)
    lora = LoraConfig(rank=rank, targets=targets, modules_to_save=whole)
    assert s * training_flops(m, s, lora) - unneeded == counter.get_total_flops()
    assert 3 * forward_flops(m, s) == training_flops(m, s, LoraConfig())


def test_a_causal_mask_halves_the_attention_part():
    full, half = forward_flops(GPT, 16), forward_flops(GPT, 16, causal=True)
    assert full - half == 2 * 16 * 32 * 4  # 2 s h per layer, of 4 s h


def test_sinks_are_no_matrices():
    with_sinks = GPT.model_copy(update={"attention_sinks": True})
    assert count_parameters(with_sinks) == count_parameters(GPT) + 4 * 4
    assert forward_flops(with_sinks, 16) == forward_flops(GPT, 16)


def test_biases_of_experts_and_routers_cost_no_operations():
    moe = load_config("mixtral-8x7b").model
    biased = moe.model_copy(update={"expert_bias": True, "router_bias": True})
    added = 32 * (8 + 8 * (2 * 14336 + 4096))
    assert count_parameters(biased) == count_parameters(moe) + added
    assert count_active(biased) == count_active(moe) + 32 * (8 + 2 * (2 * 14336 + 4096))
    assert forward_flops(biased, 4096) == forward_flops(moe, 4096)


def test_idle_experts_cost_no_operations():
    moe = load_config("mixtral-8x7b").model
    # a dense model whose MLP is two experts wide, plus the router's 4096 x 8 in each layer
    dense = load_config("llama-2-7b").model.model_copy(
        update={"ffn_hidden_size": 2 * 14336, "num_kv_heads": 8, "vocab_size": 32000}
    )
    assert count_active(moe) == count_parameters(dense) + 32 * 8 * 4096
    more = forward_flops(moe, 4096) - forward_flops(dense, 4096)
    assert more == pytest.approx(2 * 32 * 8 * 4096)


def test_every_parameter_of_a_dense_model_is_active():
    assert count_active(GPT) == count_parameters(GPT)


def matrices_of(parameter):
    """Each matrix's role, how many there are of it, and their global shape."""
    elements = np.arange(parameter.numel).reshape(parameter.shape)
    every = []
    for role, dim, first, slots in parameter.matrices:
        part = elements if dim is None else elements.take(range(first, first + slots), axis=dim)
        every.append(part.ravel())
        count = parameter.shape[0] if parameter.is_expert else 1
        yield role, count, (part.size // count // part.shape[-1], part.shape[-1])
    assert np.array_equal(np.sort(np.concatenate(every)), elements.ravel()), "each is in one matrix"


def test_the_matrices_of_linear_layers_have_their_logical_shapes():
    model = ModelConfig(
        architecture="qwen2-moe", num_layers=1, hidden_size=16, num_heads=8, num_kv_heads=2,
        head_dim=4, ffn_hidden_size=8, moe_ffn_hidden_size=6, num_experts=3, top_k=2,
        shared_expert_ffn_hidden_size=10, vocab_size=260, max_seq_len=8,
    )  # fmt: skip
    table = parameters(model)
    found = {name: list(matrices_of(p)) for name, p in table.items() if p.matrices}
    assert found == {
        "blocks.0.attention.qkv.weight": [
            ("query", 1, (32, 16)), ("key", 1, (8, 16)), ("value", 1, (8, 16)),
        ],
        "blocks.0.attention.out.weight": [("output", 1, (16, 32))],
        "blocks.0.mlp.experts.gate_up.weight": [("gate", 3, (6, 16)), ("up", 3, (6, 16))],
        "blocks.0.mlp.experts.down.weight": [("down", 3, (16, 6))],
        "blocks.0.mlp.shared_expert.gate_up.weight": [("gate", 1, (10, 16)), ("up", 1, (10, 16))],
        "blocks.0.mlp.shared_expert.down.weight": [("down", 1, (16, 10))],
    }  # fmt: skip


def test_norms_begin_at_a_gain_of_1_and_may_have_no_bias():
    plain, offset, bare = (
        parameters(run_config(tiny.GPT | more).model)
        for more in ({}, {"norm_offset": 1.0}, {"norm_bias": False})
    )
    assert plain["final_norm.weight"].init == "ones"
    assert {p.init for name, p in offset.items() if "norm" in name} == {"zeros"}
    norms = {name for name in plain if "norm.bias" in name}
    assert plain.keys() - bare.keys() == norms and len(norms) > 2


def test_a_token_uses_the_adapters_of_the_experts_that_it_visits():
    m = run_config(MOE | {"num_experts": 4, "top_k": 2}).model
    names = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
    lora = LoraConfig(rank=2, targets=tuple(names))
    each = 2 * 3 * (m.hidden_size + m.moe_ffn_hidden_size)
    assert count_adapters(m, lora) == m.num_layers * 4 * each
    assert count_active_adapters(m, lora) == m.num_layers * 2 * each
    assert count_adapters(m, LoraConfig(rank=2)) == count_active_adapters(m, LoraConfig(rank=2))
    everything = LoraConfig(rank=2, targets=("all-linear",))
    attention = count_adapters(m, LoraConfig(rank=2))
    assert count_adapters(m, everything) == count_adapters(m, lora) + attention
