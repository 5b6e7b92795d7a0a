"""Maps Mistral, which is Llama with a sliding window, and Mixtral: Mistral with experts."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Field,
    RequiredValue,
    WindowRule,
    gated_mlp,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, SIZES
from mtcli.core.checkpoint.huggingface.window import all_local

SHARED = {"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=SIZES,
    defaults={**LLAMA.defaults, **SHARED, "sliding_window": 4096},
    window=WindowRule(all_local),
)

MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={**LLAMA.defaults, **SHARED, "rope_theta": 1e6}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    required=(RequiredValue("norm_topk_prob", (None, True)),),
    aliases={"num_experts": "num_local_experts"},
    fields=(
        *(field for field in SIZES if field.ours != "norm_eps"),
        Field("norm_eps", "rms_norm_eps", 1e-5),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
    ),
    constants=CONSTANTS | {"architecture": "mixtral", "normalize_top_k": True},
    inner=ATTENTION
    | {"mlp.router.weight": same("block_sparse_moe.gate.weight")}
    | gated_mlp("mlp.experts", "block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
)
