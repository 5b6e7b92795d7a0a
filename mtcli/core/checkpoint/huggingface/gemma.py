"""Maps Gemma 2 and 3: Llama with norms around each sublayer, of gain 1 + weight, and GEGLU.

Embeddings are multiplied by sqrt(H). Gemma 2 caps scores and logits; Gemma 3 norms each head and
rotates its local layers by a base of their own.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, Table, WindowRule, same
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    CONSTANTS,
    LLAMA,
    MLP,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.qwen3 import QK_NORM
from mtcli.core.checkpoint.huggingface.rope import read_rope, read_ropes, write_rope
from mtcli.core.checkpoint.huggingface.window import alternating, read_window
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import is_number, shown

SCALAR, CAPS = "query_pre_attn_scalar", ("attn_logit_softcapping", "final_logit_softcapping")
OURS = dict(zip(CAPS, ("attention_softcap", "logit_softcap"), strict=True))
GEGLUS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
NORMS = {
    "attention_post_norm.weight": same("post_attention_layernorm.weight"),
    "mlp_norm.weight": same("pre_feedforward_layernorm.weight"),
    "mlp_post_norm.weight": same("post_feedforward_layernorm.weight"),
}
EVERY_SIXTH = WindowRule(lambda theirs: alternating(theirs, _period(theirs)), by_layer=True)


def read_scales(theirs: Table) -> Table:
    """Reads the scales of embeddings and scores and the soft caps, of which null is none. Raises
    MtcliError."""
    scalar, hidden = theirs.get(SCALAR), theirs.get("hidden_size")
    if not is_number(scalar) or scalar <= 0:
        raise wrong(f"{SCALAR}={shown(scalar)} is not above 0", "head_dim, as a rule")
    read: Table = {"attention_scale": scalar**-0.5}
    if is_number(hidden) and hidden > 0:
        read["embedding_scale"] = hidden**0.5
    return read | {ours: theirs.get(name) or 0.0 for name, ours in OURS.items()}


def write_scales(model: ModelConfig) -> Table:
    """Writes what `read_scales` reads, and a window that spans the context where none is
    shorter."""
    scale = model.attention_scale or model.head_dim**-0.5
    scalar = scale**-2
    nearest = round(scalar)
    table = {name: getattr(model, ours) or None for name, ours in OURS.items()}
    is_exact = nearest > 0 and nearest**-0.5 == scale
    table[SCALAR] = nearest if is_exact else scalar
    return table | {"sliding_window": model.window or model.max_seq_len}


def read_gemma2(theirs: Table) -> Table:
    """Reads scales and rotary positions. Raises MtcliError."""
    return read_rope(theirs) | read_scales(theirs)


def write_gemma2(model: ModelConfig) -> Table:
    """Writes what `read_gemma2` reads."""
    return write_rope(model) | write_scales(model)


def read_gemma3(theirs: Table) -> Table:
    """Reads scales and the rotary positions of layers with a window and without. Raises
    MtcliError."""
    rope, of_local = read_ropes(theirs, theirs.get("rope_theta", 1e6))
    of_local = of_local or theirs.get("rope_local_base_freq", 1e4)
    # a window that spans the context rotates its layers all the same
    window = read_window(theirs | {"max_position_embeddings": None}, EVERY_SIXTH)
    local_theta = {"rope_local_theta": of_local if window["window"] else 0.0}
    return rope | read_scales(theirs) | window | local_theta


def write_gemma3(model: ModelConfig) -> Table:
    """Writes what `read_gemma3` reads, but for the cap of scores, which no Gemma 3 has."""
    table = write_gemma2(model) | {"rope_local_base_freq": model.rope_local_theta or 1e4}
    return {name: value for name, value in table.items() if name != CAPS[0]}


def _period(theirs: Table) -> int:
    period = theirs.get("sliding_window_pattern")
    if type(period) is not int or period < 1:
        raise wrong(f"sliding_window_pattern={shown(period)} is not a number of layers", "6")
    return period


GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours != "activation"),
        Field("activation", "hidden_activation", "geglu_tanh", GEGLUS),
        *ATTENTION_BIAS,
    ),
    defaults={"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000}
    | {"max_position_embeddings": 8192, "tie_word_embeddings": True, "sliding_window": 4096}
    | {SCALAR: 256, CAPS[0]: 50.0, CAPS[1]: 30.0},
    constants=CONSTANTS | {"norm_order": "sandwich", "norm_offset": 1.0},
    inner=ATTENTION | MLP | NORMS,
    window=WindowRule(lambda theirs: alternating(theirs, 2), by_layer=True),
    supports=(SCALAR, *CAPS),
    read_more=read_gemma2,
    write_more=write_gemma2,
)

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={**GEMMA2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072}
    | {"sliding_window_pattern": 6, CAPS[0]: None, CAPS[1]: None},
    constants={**GEMMA2.constants, "qk_norm": "head"},
    inner={**GEMMA2.inner, **QK_NORM},
    window=EVERY_SIXTH,
    supports=(SCALAR, CAPS[1]),  # transformers ignores the cap of scores
    read_more=read_gemma3,
    write_more=write_gemma3,
)
