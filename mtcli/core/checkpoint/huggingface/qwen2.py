"""Maps Qwen2 and Qwen2.5, which are Llama with biases on query, key and value, and Qwen2-MoE.

Qwen2-MoE has small experts, and a shared one behind a sigmoid gate, in every layer or all but the
first ones.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Field,
    RequiredValue,
    Table,
    WindowRule,
    gated_mlp,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, MLP, SIZES
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.checkpoint.huggingface.window import alternating_local, last_local, layer_count
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

EXPERTS = (
    Field("moe_ffn_hidden_size", "moe_intermediate_size"),
    Field("num_experts", "num_experts"),
    Field("top_k", "num_experts_per_tok"),
    Field("normalize_top_k", "norm_topk_prob", False),
)
STEP, DENSE = "decoder_sparse_step", "mlp_only_layers"
ROUTED = {"mlp.router.weight": same("mlp.gate.weight")}
ROUTED |= gated_mlp("mlp.experts", "mlp.experts.{expert}")


def read_dense(theirs: Table) -> Table:
    """Reads rotary positions, and how many of the first layers have no experts. Raises MtcliError
    where later ones have none either."""
    step, listed = theirs.get(STEP), theirs.get(DENSE)
    step, listed = 1 if step is None else step, [] if listed is None else listed
    if type(step) is not int or step < 1:
        raise wrong(f"{STEP}={shown(step)} cannot be represented", "a number of layers")
    layers = range(layer_count(theirs))
    if not isinstance(listed, list) or not all(type(n) is int for n in listed):
        raise wrong(f"{DENSE}={shown(listed)} cannot be represented", "a list of layers")
    named = set(listed)
    dense = [layer for layer in layers if layer in named or (layer + 1) % step]
    if dense and (dense[-1] != len(dense) - 1 or len(dense) == len(layers)):
        name, value = (STEP, step) if step > 1 else (DENSE, listed)
        hint = "only a model whose first layers alone have no experts can"
        raise wrong(f"{name}={shown(value)} cannot be represented", hint)
    return read_rope(theirs) | {"first_dense_layers": len(dense)}


def write_dense(model: ModelConfig) -> Table:
    """Writes what `read_dense` reads."""
    return write_rope(model) | {STEP: 1, DENSE: list(range(model.first_dense_layers))}


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=SIZES,
    defaults={**LLAMA.defaults, "num_key_value_heads": 32, "intermediate_size": 22016}
    | {"vocab_size": 151936, "max_position_embeddings": 32768}
    | {"sliding_window": 4096, "max_window_layers": 28},
    constants=CONSTANTS | {"qkv_bias": True},
    window=WindowRule(last_local, switched=True, by_layer=True),
    inner=ATTENTION | MLP,
)

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *SIZES,
        *EXPERTS,
        Field("shared_expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    ),
    defaults={**QWEN2.defaults, "num_hidden_layers": 24, "hidden_size": 2048}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"num_experts": 60, "num_experts_per_tok": 4},
    constants=CONSTANTS
    | {"architecture": "qwen2-moe", "qkv_bias": True, "shared_expert_gate": True},
    required=(RequiredValue("qkv_bias", (True, None)),),
    read_more=read_dense,
    write_more=write_dense,
    window=WindowRule(alternating_local, switched=True, by_layer=True),
    inner=ATTENTION
    | MLP
    | ROUTED
    | {"mlp.shared_expert_gate.weight": same("mlp.shared_expert_gate.weight")}
    | gated_mlp("mlp.shared_expert", "mlp.shared_expert"),
)
