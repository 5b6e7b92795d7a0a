"""Maps ModernBERT (arXiv:2412.13663) with its head of masked tokens: an encoder with norms ahead of
sublayers and after the embeddings, rotary positions, GEGLU, and windows of two in three layers.
"""

from mtcli.core.checkpoint.huggingface.bert import CONSTANTS, dense
from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    RequiredValue,
    Table,
    WindowRule,
    joined,
    queries_keys_values,
    same,
)
from mtcli.core.checkpoint.huggingface.gemma import GEGLUS
from mtcli.core.checkpoint.huggingface.llama import ATTENTION_BIAS, NO_PADDING
from mtcli.core.checkpoint.huggingface.rope import read_ropes, write_rope
from mtcli.core.checkpoint.huggingface.window import after_global, read_window
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

PERIOD, GLOBAL, LOCAL = "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"


def _period(theirs: Table) -> int:
    period = theirs.get(PERIOD)
    if type(period) is not int or period < 1:
        raise wrong(f"{PERIOD}={shown(period)} is not a number of layers", "3")
    return period


WINDOW = WindowRule(
    lambda theirs: after_global(theirs, _period(theirs)), by_layer=True, doubled="local_attention"
)


def read_modernbert(theirs: Table) -> Table:
    """Reads the windows, and the rotary positions of layers with one and without. Raises
    MtcliError."""
    rope, local = read_ropes(theirs, theirs.get(GLOBAL))
    local = theirs.get(LOCAL) if local is None else local
    # a window that spans the context rotates its layers all the same
    window = read_window(theirs | {"max_position_embeddings": None}, WINDOW)
    is_apart = rope["rope_scaling"] is not None or local != rope["rope_theta"]
    return rope | window | {"rope_local_theta": local if is_apart and window["window"] else 0.0}


def write_modernbert(model: ModelConfig) -> Table:
    """Writes what `read_modernbert` reads, as transformers 5 and as those before it do."""
    local = model.rope_local_theta or model.rope_theta
    scaling = write_rope(model)["rope_scaling"] or {"rope_type": "default"}
    by_layer = {
        "full_attention": scaling | {"rope_theta": model.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    table = {"rope_parameters": by_layer, GLOBAL: model.rope_theta, LOCAL: local} | NO_PADDING
    is_global = [not model.layer_window(layer) for layer in range(model.num_layers)]
    for period in range(1, model.num_layers + 1):
        if is_global == [layer % period == 0 for layer in range(model.num_layers)]:
            return table | {PERIOD: period}
    return table


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    base="model.",
    block="model.layers.{layer}.",
    fields=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("norm_eps", "norm_eps", 1e-5),
        Field("norm_bias", "norm_bias", False, written="has_norm_bias"),
        Field("activation", "hidden_activation", "geglu", GEGLUS),
        *ATTENTION_BIAS,
        Field("mlp_bias", "mlp_bias", False, written="has_mlp_bias"),
        Field("transform_bias", "classifier_bias", False),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"num_hidden_layers": 22, "hidden_size": 768, "num_attention_heads": 12}
    | {"intermediate_size": 1152, "vocab_size": 50368, "max_position_embeddings": 8192}
    | {"local_attention": 128, PERIOD: 3, GLOBAL: 160_000.0, LOCAL: 10_000.0},
    constants=CONSTANTS
    | {
        "position": "rope",
        "bias": False,
        "qkv_bias": False,
        "norm_order": "pre",
        "embedding_norm": True,
    }
    | {"first_attention_norm": False, "head": "mlm", "sentence_order": False, "token_types": 0}
    | {"tie_embeddings": True},
    required=(
        RequiredValue("classifier_activation", ("gelu", None)),
        RequiredValue("decoder_bias", (True, None)),
        RequiredValue("tie_word_embeddings", (None, True)),
        RequiredValue("rope_scaling", (None,)),
        # they matter in training only, where ours are elsewhere
        RequiredValue("embedding_dropout", (None, 0.0)),
        RequiredValue("mlp_dropout", (None, 0.0)),
    ),
    outer={
        "embedding.weight": same("model.embeddings.tok_embeddings.weight"),
        **dense("embedding_norm", "model.embeddings.norm"),
        **dense("final_norm", "model.final_norm"),
        **dense("head.transform", "head.dense"),
        **dense("head.norm", "head.norm"),
        "head.bias": same("decoder.bias"),
    },
    inner={
        **dense("attention_norm", "attn_norm"),
        "attention.qkv.weight": queries_keys_values("attn.Wqkv.weight"),
        "attention.qkv.bias": queries_keys_values("attn.Wqkv.bias"),
        **dense("attention.out", "attn.Wo"),
        **dense("mlp_norm", "mlp_norm"),
        "mlp.gate_up.weight": joined("mlp.Wi.weight"),
        "mlp.gate_up.bias": joined("mlp.Wi.bias"),
        **dense("mlp.down", "mlp.Wo"),
    },
    ignored=(r"model\.(layers\.\d+\.attn\.)?rotary_emb\..*inv_freq",),
    read_more=read_modernbert,
    write_more=write_modernbert,
    window=WINDOW,
    tied_head="decoder.weight",
)
