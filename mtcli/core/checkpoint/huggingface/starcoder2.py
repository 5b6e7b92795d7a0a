"""Maps StarCoder 2: GPT's layers and biases with rotary positions, grouped queries and a window."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, Table, WindowRule, same
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, LLAMA, OUTER, SIZES
from mtcli.core.checkpoint.huggingface.rope import read_rope
from mtcli.core.checkpoint.huggingface.window import all_local
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import shown

GELUS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
BIASES = {
    "attention_norm.bias": same("input_layernorm.bias"),
    "mlp_norm.bias": same("post_attention_layernorm.bias"),
}
CONSTANTS = {"architecture": "gpt", "norm": "layernorm", "position": "rope"}


def read_rope_and_dropout(theirs: Table) -> Table:
    """Reads rotary positions. Raises MtcliError where two dropouts that are one in ours differ."""
    after, embedded = (theirs.get(f"{name}_dropout", 0.0) for name in ("residual", "embedding"))
    if after != embedded:
        message = f"residual_dropout={shown(after)} and embedding_dropout={shown(embedded)} differ"
        hint = "make them equal in config.json: they matter in training only"
        raise wrong(f"{message}, and dropout is one number", hint)
    return read_rope(theirs)


STARCODER2 = replace(
    LLAMA,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours not in ("activation", "norm_eps")),
        Field("activation", "hidden_act", "gelu_tanh", GELUS),
        Field("norm_eps", "norm_epsilon", 1e-5),
        Field("bias", "use_bias", True),
        Field("qkv_bias", "use_bias", True),
        Field("dropout", "residual_dropout", 0.0),
        Field("dropout", "embedding_dropout", 0.0),
    ),
    defaults={"num_hidden_layers": 30, "hidden_size": 3072, "num_attention_heads": 24}
    | {"num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152}
    | {"max_position_embeddings": 4096, "initializer_range": 0.018042}
    | {"tie_word_embeddings": True},
    constants=CONSTANTS,
    outer=OUTER | {"final_norm.bias": same("model.norm.bias")},
    inner=ATTENTION
    | BIASES
    | {
        f"mlp.{ours}.{kind}": same(f"mlp.{theirs}.{kind}")
        for ours, theirs in (("up", "c_fc"), ("down", "c_proj"))
        for kind in ("weight", "bias")
    },
    window=WindowRule(all_local),
    read_more=read_rope_and_dropout,
)
