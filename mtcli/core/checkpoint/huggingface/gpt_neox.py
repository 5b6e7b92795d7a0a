"""Maps GPT-NeoX, as Pythia and GPT-NeoX-20B: attention and MLP read the same residual stream, a
quarter of each head rotates, and query, key and value are one tensor, head by head as ours."""

from mtcli.core.checkpoint.huggingface.family import Family, Field, Table, joined, same
from mtcli.core.checkpoint.huggingface.gpt2 import GELUS
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope
from mtcli.core.config.model import ModelConfig

ALIASES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
LINEAR = {
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
KINDS = ("weight", "bias")


def write_older(model: ModelConfig) -> Table:
    """Writes rotary positions by the names that every version of transformers reads."""
    table = write_partial_rope(model)
    older = {older: table.pop(name) for older, name in ALIASES.items()}
    return table | older


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox.",
    block="gpt_neox.layers.{layer}.",
    fields=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("activation", "hidden_act", "gelu", {**GELUS, "gelu_fast": "gelu_tanh"}),
        Field("norm_eps", "layer_norm_eps", 1e-5),
        Field("tie_embeddings", "tie_word_embeddings", False),
        Field("parallel_residual", "use_parallel_residual", True),
        Field("qkv_bias", "attention_bias", True),
        Field("out_bias", "attention_bias", True, written="has_out_bias"),
        Field("dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64}
    | {"intermediate_size": 24576, "vocab_size": 50432, "max_position_embeddings": 2048}
    | {"partial_rotary_factor": 0.25},
    constants={"architecture": "gpt", "norm": "layernorm", "position": "rope", "bias": True},
    required=(),
    outer={
        "embedding.weight": same("gpt_neox.embed_in.weight"),
        "head.weight": same("embed_out.weight"),
        **{f"final_norm.{kind}": same(f"gpt_neox.final_layer_norm.{kind}") for kind in KINDS},
    },
    inner={f"attention.qkv.{kind}": joined(f"attention.query_key_value.{kind}") for kind in KINDS}
    | {f"{o}.{kind}": same(f"{theirs}.{kind}") for o, theirs in LINEAR.items() for kind in KINDS},
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    read_more=read_partial_rope,
    write_more=write_older,
    aliases=ALIASES,
    supports=("partial_rotary_factor",),
    tied_head="embed_out.weight",
)
