"""Maps Qwen3, which is Llama with a norm of each query and key head, and its mixtures."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import WindowRule, same
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    CONSTANTS,
    MLP,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.qwen2 import (
    EXPERTS,
    QWEN2,
    ROUTED,
    read_dense,
    write_dense,
)
from mtcli.core.checkpoint.huggingface.window import all_local

QK_NORM = {f"attention.{x}_norm.weight": same(f"self_attn.{x}_norm.weight") for x in "qk"}

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(*SIZES, *ATTENTION_BIAS),
    defaults={**QWEN2.defaults, "head_dim": 128},
    constants=CONSTANTS | {"qk_norm": "head"},
    inner=ATTENTION | QK_NORM | MLP,
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(*SIZES, *ATTENTION_BIAS, *EXPERTS),
    defaults={**QWEN2.defaults, "num_hidden_layers": 24, "hidden_size": 2048}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    constants=CONSTANTS | {"architecture": "mixtral", "qk_norm": "head"},
    read_more=read_dense,
    write_more=write_dense,
    aliases={"num_local_experts": "num_experts"},
    window=WindowRule(all_local, switched=True),
    inner=ATTENTION | QK_NORM | MLP | ROUTED,
)
