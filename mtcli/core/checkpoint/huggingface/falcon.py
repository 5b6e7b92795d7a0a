"""Maps Falcon: a norm of both attention and MLP and one key-value head in 7B; two norms and grouped
queries in 40B and 180B. Query, key and value are one tensor, group by group as ours."""

from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    RequiredValue,
    Table,
    TensorRule,
    joined,
    same,
)
from mtcli.core.checkpoint.huggingface.gpt2 import GELUS
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.sharding import Parameter

KINDS = ("weight", "bias")
LINEAR = {
    "attention.out": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def read_blocks(theirs: Table) -> Table:
    """Reads key-value heads, norms and rotary positions. Raises MtcliError for other numbers of
    norms."""
    is_new, is_parallel = theirs.get("new_decoder_architecture"), theirs.get("parallel_attn", True)
    norms = theirs.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if norms not in (1, 2) or (is_new and not is_parallel) or (norms == 2 and not is_new):
        message = f"num_ln_in_parallel_attn={shown(norms)} with parallel_attn={shown(is_parallel)}"
        hint = "2 with new_decoder_architecture, else 1; parallel_attn true with it"
        raise wrong(f"{message} cannot be represented", hint)
    heads = theirs.get("num_kv_heads") if is_new else None
    if not is_new and theirs.get("multi_query", True):
        heads = 1
    values = read_rope(theirs) | ({} if heads is None else {"num_kv_heads": heads})
    parallel = bool(is_parallel)
    return values | {"parallel_residual": parallel, "parallel_norms": norms if parallel else 2}


def write_blocks(model: ModelConfig) -> Table:
    """Writes what `read_blocks` reads."""
    is_parallel, norms = model.parallel_residual, model.parallel_norms
    plain = model.num_kv_heads in (1, model.num_heads)
    is_new = is_parallel and (norms == 2 or not plain)
    return write_rope(model) | {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "parallel_attn": is_parallel,
        "multi_query": model.num_kv_heads == 1,
        "num_kv_heads": model.num_kv_heads,
        "bias": model.bias,
        "alibi": False,
    }


def norm(two: str, one: str, kind: str) -> TensorRule:
    """Maps a norm, which has another name in blocks that are parallel and have two."""

    def rule(parameter: Parameter, model: ModelConfig) -> list[StoredBox]:
        is_two = model.parallel_residual and model.parallel_norms == 2
        return same(f"{two if is_two else one}.{kind}")(parameter, model)

    return rule


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    base="transformer.",
    block="transformer.h.{layer}.",
    fields=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("ffn_hidden_size", "ffn_hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("activation", "activation", "gelu", GELUS),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("tie_embeddings", "tie_word_embeddings", True),
        Field("bias", "bias", False),
        Field("qkv_bias", "bias", False),
        Field("dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71}
    | {"vocab_size": 65024, "max_position_embeddings": 2048},
    constants={"architecture": "gpt", "norm": "layernorm", "position": "rope"},
    required=(RequiredValue("alibi", (None, False)),),
    outer={
        "embedding.weight": same("transformer.word_embeddings.weight"),
        "head.weight": same("lm_head.weight"),
        **{f"final_norm.{kind}": same(f"transformer.ln_f.{kind}") for kind in KINDS},
    },
    inner={
        f"attention.qkv.{kind}": joined(f"self_attention.query_key_value.{kind}") for kind in KINDS
    }
    | {f"{o}.{kind}": same(f"{theirs}.{kind}") for o, theirs in LINEAR.items() for kind in KINDS}
    | {f"attention_norm.{kind}": norm("ln_attn", "input_layernorm", kind) for kind in KINDS}
    | {f"mlp_norm.{kind}": norm("ln_mlp", "post_attention_layernorm", kind) for kind in KINDS},
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    read_more=read_blocks,
    write_more=write_blocks,
    aliases={"n_embed": "hidden_size"},
)
