"""Maps GPT-2: learned positions, a joint QKV, linear layers stored transposed (Conv1D)."""

from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    RequiredValue,
    Table,
    joined_qkv,
    nothing_written,
    same,
    transposed,
)
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import shown

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _require_one_dropout(theirs: Table) -> Table:
    """Returns no further fields. Raises MtcliError where two fields that are one in ours differ."""
    after, embedded = theirs.get("resid_pdrop", 0.1), theirs.get("embd_pdrop", 0.1)
    if after != embedded:
        message = f"resid_pdrop={shown(after)} and embd_pdrop={shown(embedded)} differ"
        raise wrong(
            f"{message}, and dropout is one number",
            "make them equal in config.json: they matter in training only",
        )
    return {}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    block="transformer.h.{layer}.",
    fields=(
        Field("num_layers", "n_layer"),
        Field("hidden_size", "n_embd"),
        Field("num_heads", "n_head"),
        Field("ffn_hidden_size", "n_inner"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "n_positions"),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("activation", "activation_function", "gelu_tanh", GELUS),
        Field("tie_embeddings", "tie_word_embeddings", True),
        Field("dropout", "resid_pdrop", 0.1),
        Field("dropout", "embd_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    constants={"architecture": "gpt", "norm": "layernorm", "position": "learned"}
    | {"bias": True, "qkv_bias": True},
    required=(
        RequiredValue("scale_attn_weights", (None, True)),
        RequiredValue("scale_attn_by_inverse_layer_idx", (None, False)),
        RequiredValue("add_cross_attention", (None, False)),
    ),
    outer={
        "embedding.weight": same("transformer.wte.weight"),
        "position_embedding.weight": same("transformer.wpe.weight"),
        "final_norm.weight": same("transformer.ln_f.weight"),
        "final_norm.bias": same("transformer.ln_f.bias"),
        "head.weight": same("lm_head.weight"),
    },
    inner={
        "attention_norm.weight": same("ln_1.weight"),
        "attention_norm.bias": same("ln_1.bias"),
        "attention.qkv.weight": joined_qkv("attn.c_attn.weight"),
        "attention.qkv.bias": joined_qkv("attn.c_attn.bias"),
        "attention.out.weight": transposed("attn.c_proj.weight"),
        "attention.out.bias": same("attn.c_proj.bias"),
        "mlp_norm.weight": same("ln_2.weight"),
        "mlp_norm.bias": same("ln_2.bias"),
        "mlp.up.weight": transposed("mlp.c_fc.weight"),
        "mlp.up.bias": same("mlp.c_fc.bias"),
        "mlp.down.weight": transposed("mlp.c_proj.weight"),
        "mlp.down.bias": same("mlp.c_proj.bias"),
    },
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    read_more=_require_one_dropout,
    aliases=ALIASES,
    write_more=nothing_written,
)
