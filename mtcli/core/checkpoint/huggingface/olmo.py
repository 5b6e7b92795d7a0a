"""Maps OLMo 2 and 3: Llama with norms of outputs, not of inputs, and of the whole query and key.

OLMo 3 has a window in three of four layers, whose rotary positions are not scaled.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Table, WindowRule, flattened, same
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    CONSTANTS,
    LLAMA,
    MLP,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.rope import read_ropes, write_rope
from mtcli.core.checkpoint.huggingface.window import alternating, read_window
from mtcli.core.config.model import ModelConfig

THETA = 500_000.0
THREE_OF_FOUR = WindowRule(lambda theirs: alternating(theirs, 4), by_layer=True)
NORMS = {
    "attention.q_norm.weight": flattened("self_attn.q_norm.weight"),
    "attention.k_norm.weight": flattened("self_attn.k_norm.weight"),
    "attention_post_norm.weight": same("post_attention_layernorm.weight"),
    "mlp_post_norm.weight": same("post_feedforward_layernorm.weight"),
}
LAYER = {name: rule for name, rule in (ATTENTION | MLP).items() if "_norm." not in name} | NORMS

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=(*SIZES, *ATTENTION_BIAS),
    defaults={**LLAMA.defaults, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    constants=CONSTANTS | {"norm_order": "after", "qk_norm": "projection"},
    inner=LAYER,
)


def read_olmo3(theirs: Table) -> Table:
    """Reads the rotary positions of layers with a window and without. Raises MtcliError."""
    rope, local = read_ropes(theirs, theirs.get("rope_theta", THETA))
    local = local or theirs.get("rope_theta", THETA)
    is_apart = rope["rope_scaling"] is not None or local != rope["rope_theta"]
    has_window = read_window(theirs, THREE_OF_FOUR)["window"] > 0
    return rope | {"rope_local_theta": local if is_apart and has_window else 0.0}


def write_olmo3(model: ModelConfig) -> Table:
    """Writes what `read_olmo3` reads, as transformers 5 and as those before it do."""
    flat = write_rope(model)
    scaling = flat["rope_scaling"] or {"rope_type": "default"}
    local = model.rope_local_theta or model.rope_theta
    by_layer = {
        "full_attention": scaling | {"rope_theta": model.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return flat | {"rope_parameters": by_layer}


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    window=THREE_OF_FOUR,
    read_more=read_olmo3,
    write_more=write_olmo3,
)
