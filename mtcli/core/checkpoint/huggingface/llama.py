"""Maps Llama 1, 2 and 3: rotary positions, RMSNorm, SwiGLU, grouped queries; few have biases.

Both formats have rotary pairs as halves (dimension i turns with i + head_dim / 2), so the rows of
q_proj and k_proj need no reordering.
"""

from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    gated_mlp,
    same,
    separate_qkv,
    stacked,
)
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope

SILU = {"silu": "swiglu", "swish": "swiglu"}
SIZES = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_heads", "num_attention_heads"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("head_dim", "head_dim"),
    Field("ffn_hidden_size", "intermediate_size"),
    Field("vocab_size", "vocab_size"),
    Field("max_seq_len", "max_position_embeddings"),
    Field("activation", "hidden_act", "swiglu", SILU),
    Field("norm_eps", "rms_norm_eps", 1e-6),
    Field("tie_embeddings", "tie_word_embeddings", False),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("init_std", "initializer_range", 0.02),
)
DEFAULTS = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
DEFAULTS |= {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048}
CONSTANTS = {"architecture": "llama", "norm": "rmsnorm", "position": "rope", "dropout": 0.0}
CONSTANTS |= {"bias": False, "qkv_bias": False}
ATTENTION_BIAS = (
    Field("qkv_bias", "attention_bias", False),
    Field("out_bias", "attention_bias", False, written="has_out_bias"),
)
# transformers' default is an id that a smaller vocabulary lacks
NO_PADDING = {"pad_token_id": None}
ROTARY = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

OUTER = {
    "embedding.weight": same("model.embed_tokens.weight"),
    "final_norm.weight": same("model.norm.weight"),
    "head.weight": same("lm_head.weight"),
}
ATTENTION = {
    "attention_norm.weight": same("input_layernorm.weight"),
    "attention.qkv.weight": separate_qkv("self_attn.{}_proj.weight"),
    "attention.qkv.bias": separate_qkv("self_attn.{}_proj.bias"),
    "attention.out.weight": same("self_attn.o_proj.weight"),
    "attention.out.bias": same("self_attn.o_proj.bias"),
    "mlp_norm.weight": same("post_attention_layernorm.weight"),
}
MLP = gated_mlp("mlp", "mlp") | {
    "mlp.gate_up.bias": stacked("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.bias": same("mlp.down_proj.bias"),
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    block="model.layers.{layer}.",
    fields=(*SIZES, *ATTENTION_BIAS, Field("mlp_bias", "mlp_bias", False, written="has_mlp_bias")),
    defaults=DEFAULTS,
    constants=CONSTANTS,
    required=(),
    outer=OUTER,
    inner=ATTENTION | MLP,
    ignored=ROTARY,
    read_more=read_rope,
    write_more=write_rope,
)
