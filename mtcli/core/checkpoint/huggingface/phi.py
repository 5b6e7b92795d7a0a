"""Maps Phi-1, Phi-1.5 and Phi-2: one norm for attention and MLP, which read the same input, a
rotated part of each head, and biases of every linear layer, the head's too."""

from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    RequiredValue,
    same,
    separate_qkv,
)
from mtcli.core.checkpoint.huggingface.gpt2 import GELUS
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope

KINDS = ("weight", "bias")
LINEAR = {
    "attention.out": "self_attn.dense",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "attention_norm": "input_layernorm",
}

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    base="model.",
    block="model.layers.{layer}.",
    fields=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("num_kv_heads", "num_key_value_heads"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("activation", "hidden_act", "gelu_tanh", GELUS),
        Field("norm_eps", "layer_norm_eps", 1e-5),
        Field("dropout", "resid_pdrop", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32}
    | {"intermediate_size": 8192, "vocab_size": 51200, "max_position_embeddings": 2048}
    | {"partial_rotary_factor": 0.5},
    constants={"architecture": "gpt", "norm": "layernorm", "position": "rope", "bias": True}
    | {"parallel_residual": True, "parallel_norms": 1}
    | {"tie_embeddings": False, "head_bias": True},
    required=(
        RequiredValue("qk_layernorm", (None, False)),
        RequiredValue("tie_word_embeddings", (None, False)),
    ),
    outer={
        "embedding.weight": same("model.embed_tokens.weight"),
        **{f"final_norm.{kind}": same(f"model.final_layernorm.{kind}") for kind in KINDS},
        **{f"head.{kind}": same(f"lm_head.{kind}") for kind in KINDS},
    },
    inner={f"attention.qkv.{kind}": separate_qkv(f"self_attn.{{}}_proj.{kind}") for kind in KINDS}
    | {f"{o}.{kind}": same(f"{theirs}.{kind}") for o, theirs in LINEAR.items() for kind in KINDS},
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    read_more=read_partial_rope,
    write_more=write_partial_rope,
    supports=("partial_rotary_factor",),
)
