"""Maps GLM-4.5: half of each head rotates, some models norm heads, and experts are DeepSeek-V3's.

Its layer for predicting two tokens ahead, which follows the last one, is left out.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.deepseek import (
    AHEAD,
    BIASED_CHOICE,
    CORRECTION,
    EXPERTS,
    GROUPS,
    NEXT_LAYER,
    SHARED,
    SUPPORTS,
    read_shared_experts,
    require_blocks,
    write_shared_experts,
)
from mtcli.core.checkpoint.huggingface.family import Field, Table
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, MLP, SIZES
from mtcli.core.checkpoint.huggingface.qwen3 import QK_NORM
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope
from mtcli.core.config.model import ModelConfig


def read_glm(theirs: Table) -> Table:
    """Reads rotary positions, the norm of heads and the shared experts. Raises MtcliError."""
    require_blocks(theirs)
    qk_norm = {"qk_norm": "head" if theirs.get("use_qk_norm") else "none"}
    return read_partial_rope(theirs) | read_shared_experts(theirs) | qk_norm


def write_glm(model: ModelConfig) -> Table:
    """Writes what `read_glm` reads."""
    norms = {"use_qk_norm": model.qk_norm == "head"}
    return write_partial_rope(model) | write_shared_experts(model) | norms


GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=(*SIZES, Field("qkv_bias", "attention_bias", False), *EXPERTS, *GROUPS),
    defaults={"num_hidden_layers": 46, "hidden_size": 4096, "num_attention_heads": 96}
    | {"num_key_value_heads": 8, "intermediate_size": 10944, "moe_intermediate_size": 1408}
    | {"vocab_size": 151552, "max_position_embeddings": 131072, "n_shared_experts": 1}
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    constants=CONSTANTS
    | {"architecture": "mixtral", "router_score": "sigmoid", "router_biases": True},
    required=BIASED_CHOICE[:1],
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": AHEAD},
    inner=ATTENTION | QK_NORM | MLP | SHARED | CORRECTION,
    ignored=(*LLAMA.ignored, NEXT_LAYER),
    supports=(*SUPPORTS, "partial_rotary_factor", "use_qk_norm"),
    read_more=read_glm,
    write_more=write_glm,
)
