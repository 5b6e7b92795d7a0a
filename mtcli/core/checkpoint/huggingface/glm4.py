"""Maps GLM-4: Llama with norms before and after each sublayer, neighbours of a rotated half of each
head as pairs, biases of query, key and value, and one tensor of gate and up."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, joined, same
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, NO_PADDING, SIZES
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope

NORMS = {
    "attention_post_norm.weight": same("post_self_attn_layernorm.weight"),
    "mlp_norm.weight": same("post_attention_layernorm.weight"),
    "mlp_post_norm.weight": same("post_mlp_layernorm.weight"),
}
JOINED_MLP = {
    "mlp.gate_up.weight": joined("mlp.gate_up_proj.weight"),
    "mlp.down.weight": same("mlp.down_proj.weight"),
}

GLM4 = replace(
    LLAMA,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours != "norm_eps"),
        Field("norm_eps", "rms_norm_eps", 1.5625e-7),
        Field("qkv_bias", "attention_bias", False),
    ),
    defaults={"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32}
    | {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 13696}
    | {"vocab_size": 151552, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5}
    | {"attention_bias": True},
    constants=CONSTANTS | {"norm_order": "sandwich", "rope_interleaved": True},
    inner=ATTENTION | NORMS | JOINED_MLP,
    supports=("partial_rotary_factor",),
    read_more=read_partial_rope,
    write_more=lambda model: write_partial_rope(model) | NO_PADDING,
)
