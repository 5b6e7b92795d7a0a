"""Mixtral: Mistral with experts in place of its MLP."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, RequiredValue
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, SIZES
from mtcli.core.checkpoint.huggingface.mistral import MISTRAL
from mtcli.core.checkpoint.huggingface.rope import read_windowed
from mtcli.core.checkpoint.huggingface.rules import expert, expert_gate_and_up, same

THETA = 1e6  # where config.json does not say

MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    demands=(RequiredValue("norm_topk_prob", (None, True)),),
    read_more=lambda theirs: read_windowed({"rope_theta": THETA} | theirs),
    fields=(
        *(field for field in SIZES if field.ours != "norm_eps"),
        Field("norm_eps", "rms_norm_eps", 1e-5),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
    ),
    constants=CONSTANTS | {"architecture": "mixtral", "normalize_top_k": True},
    inner=ATTENTION
    | {
        "mlp.router.weight": same("block_sparse_moe.gate.weight"),
        "mlp.experts.gate_up.weight": expert_gate_and_up(
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        "mlp.experts.down.weight": expert("block_sparse_moe.experts.{expert}.w2.weight"),
    },
)
