"""Maps Qwen2 and Qwen2.5, which are Llama with biases on query, key and value, and Qwen2-MoE.

Qwen2-MoE has small experts, and a shared one behind a sigmoid gate, in every layer.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Field,
    RequiredValue,
    WindowRule,
    gated_mlp,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, MLP, SIZES
from mtcli.core.checkpoint.huggingface.window import alternating_local, last_local

EXPERTS = (
    Field("moe_ffn_hidden_size", "moe_intermediate_size"),
    Field("num_experts", "num_experts"),
    Field("top_k", "num_experts_per_tok"),
    Field("normalize_top_k", "norm_topk_prob", False),
)
IN_EVERY_LAYER = (
    RequiredValue("decoder_sparse_step", (1, None)),
    RequiredValue("mlp_only_layers", ([], None)),
)
ROUTED = {"mlp.router.weight": same("mlp.gate.weight")}
ROUTED |= gated_mlp("mlp.experts", "mlp.experts.{expert}")

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
    required=(RequiredValue("qkv_bias", (True, None)), *IN_EVERY_LAYER),
    window=WindowRule(alternating_local, switched=True, by_layer=True),
    inner=ATTENTION
    | ROUTED
    | {"mlp.shared_expert_gate.weight": same("mlp.shared_expert_gate.weight")}
    | gated_mlp("mlp.shared_expert", "mlp.shared_expert"),
)
