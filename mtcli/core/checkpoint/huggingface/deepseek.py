"""Maps DeepSeek-V2, V3 and R1: latent attention, and experts beside a shared one behind the first
layers. Moonlight is a V3, and so is Kimi K2.

V3's layer for predicting two tokens ahead, which follows the last one, is left out.
"""

from dataclasses import replace
from typing import Any

from mtcli.core.checkpoint.huggingface.family import (
    Field,
    RequiredValue,
    Table,
    gated_mlp,
    joined,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import CONSTANTS, LLAMA, MLP, OUTER, SIZES
from mtcli.core.checkpoint.huggingface.qwen2 import ROUTED
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

LATENTS = {  # of config.json, by field of [model.mla]
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
EXPERTS = (
    Field("num_experts", "n_routed_experts"),
    Field("top_k", "num_experts_per_tok"),
    Field("moe_ffn_hidden_size", "moe_intermediate_size"),
    Field("first_dense_layers", "first_k_dense_replace", 0),
    Field("routed_scale", "routed_scaling_factor", 1.0),
)
GROUPS = (
    Field("router_groups", "n_group", 1),
    Field("router_top_groups", "topk_group", 1),
    Field("normalize_top_k", "norm_topk_prob", True),
)
ATTENTION = {
    "attention_norm.weight": same("input_layernorm.weight"),
    "attention.q.weight": joined("self_attn.q_proj.weight"),
    "attention.q_down.weight": same("self_attn.q_a_proj.weight"),
    "attention.q_down.bias": same("self_attn.q_a_proj.bias"),
    "attention.q_norm.weight": same("self_attn.q_a_layernorm.weight"),
    "attention.q_up.weight": joined("self_attn.q_b_proj.weight"),
    "attention.kv_down.weight": same("self_attn.kv_a_proj_with_mqa.weight"),
    "attention.kv_down.bias": same("self_attn.kv_a_proj_with_mqa.bias"),
    "attention.kv_norm.weight": same("self_attn.kv_a_layernorm.weight"),
    "attention.kv_up.weight": joined("self_attn.kv_b_proj.weight"),
    "attention.out.weight": same("self_attn.o_proj.weight"),
    "attention.out.bias": same("self_attn.o_proj.bias"),
    "mlp_norm.weight": same("post_attention_layernorm.weight"),
}
SHARED = ROUTED | gated_mlp("mlp.shared_expert", "mlp.shared_experts")
CORRECTION = {"mlp.router.bias": same("mlp.gate.e_score_correction_bias")}
BIASED_CHOICE = (
    RequiredValue("scoring_func", ("sigmoid", None)),
    RequiredValue("topk_method", ("noaux_tc", None)),
)
QUANTISATION, BLOCK = "quantization_config", 128  # rows and columns of a float8 weight's block
# The layer that predicts two tokens ahead is number num_hidden_layers.
AHEAD, NEXT_LAYER = "num_nextn_predict_layers", r"model\.layers\.{num_layers}\..*"


def read_shared_experts(theirs: Table) -> Table:
    """Reads n_shared_experts, which are one MLP of as many experts' width. Raises MtcliError."""
    count, width = theirs.get("n_shared_experts") or 0, theirs.get("moe_intermediate_size")
    if type(count) is not int or count < 0:
        raise wrong(f"n_shared_experts={shown(count)} is not a whole number", "0, 1 or more")
    return {"shared_expert_ffn_hidden_size": count * width if type(width) is int else 0}


def write_shared_experts(model: ModelConfig) -> Table:
    """Writes n_shared_experts, and that no layer predicts further ahead."""
    width = model.moe_ffn_hidden_size or 1
    return {"n_shared_experts": model.shared_expert_ffn_hidden_size // width, AHEAD: 0}


def require_blocks(theirs: Table) -> None:
    """Raises MtcliError for quantised weights other than float8 in blocks, which are decoded."""
    given = theirs.get(QUANTISATION)
    if given is None:
        return
    names = ("quant_method", "fmt", "weight_block_size")
    found = [given.get(name) for name in names] if isinstance(given, dict) else given
    if found not in (["fp8", "e4m3", [BLOCK, BLOCK]], ["fp8", None, [BLOCK, BLOCK]]):
        message = f"{QUANTISATION} with {', '.join(names)} of {shown(found)} cannot be represented"
        raise wrong(message, f"only fp8, e4m3, [{BLOCK}, {BLOCK}] or a model without it can")


def read_latents(theirs: Table) -> Table:
    """Reads the widths of latents and heads, rotary positions and the shared experts. Raises
    MtcliError."""
    require_blocks(theirs)
    mla = {ours: theirs.get(name) for ours, name in LATENTS.items()}
    heads = {"num_kv_heads": theirs.get("num_attention_heads")}
    latents = {"mla": mla | {"q_rank": mla["q_rank"] or 0}}
    return read_rope(theirs) | read_shared_experts(theirs) | heads | latents


def write_latents(model: ModelConfig) -> Table:
    """Writes what `read_latents` reads."""
    mla = {} if model.mla is None else model.mla.model_dump()
    widths = {name: mla.get(ours) for ours, name in LATENTS.items()}
    return (
        write_rope(model)
        | write_shared_experts(model)
        | widths
        | {"q_lora_rank": mla.get("q_rank") or None, "head_dim": mla.get("rope_dim")}
        | {"num_key_value_heads": model.num_heads}
    )


def read_choice(theirs: Table) -> Table:
    """Reads V2's groups of experts, which greedy choices do not have. Raises MtcliError."""
    method: Any = theirs.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise wrong(f"topk_method={shown(method)} is not supported", "greedy, group_limited_greedy")
    names = {"router_groups": "n_group", "router_top_groups": "topk_group"}
    grouped = method != "greedy"
    groups = {ours: (theirs.get(name) if grouped else 1) or 1 for ours, name in names.items()}
    return read_latents(theirs) | groups


def write_choice(model: ModelConfig) -> Table:
    """Writes what `read_choice` reads."""
    method = "greedy" if model.router_groups == 1 else "group_limited_greedy"
    groups = {"n_group": model.router_groups, "topk_group": model.router_top_groups}
    return write_latents(model) | groups | {"topk_method": method}


FIELDS = (
    *(field for field in SIZES if field.ours not in ("num_kv_heads", "head_dim")),
    Field("qkv_bias", "attention_bias", False),
    Field("out_bias", "attention_bias", False, written="has_out_bias"),
    *EXPERTS,
)
SUPPORTS = ("n_shared_experts", AHEAD, QUANTISATION)

DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(*FIELDS, *GROUPS, Field("rope_interleaved", "rope_interleave", True)),
    defaults={"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128}
    | {"intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280}
    | {"max_position_embeddings": 4096, "n_shared_experts": 1, "n_routed_experts": 256}
    | {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    | {"qk_rope_head_dim": 64, "n_group": 8, "topk_group": 4},
    constants=CONSTANTS
    | {"architecture": "mixtral", "router_score": "sigmoid", "router_biases": True},
    required=BIASED_CHOICE,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": AHEAD},
    outer=OUTER,
    inner=ATTENTION | MLP | SHARED | CORRECTION,
    ignored=(*LLAMA.ignored, NEXT_LAYER),
    supports=SUPPORTS,
    read_more=read_latents,
    write_more=write_latents,
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields=FIELDS,
    defaults={"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    | {"intermediate_size": 11008, "moe_intermediate_size": 1407, "vocab_size": 102400}
    | {"max_position_embeddings": 2048, "n_shared_experts": 2, "n_routed_experts": 64}
    | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    | {"qk_rope_head_dim": 64},
    constants=CONSTANTS
    | {"architecture": "mixtral", "normalize_top_k": False, "rope_interleaved": True},
    required=(),
    aliases={"num_experts": "n_routed_experts"},
    inner=ATTENTION | MLP | SHARED,
    ignored=LLAMA.ignored,
    supports=("n_shared_experts",),
    read_more=read_choice,
    write_more=write_choice,
)
