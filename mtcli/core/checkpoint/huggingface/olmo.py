"""Maps OLMo 2: Llama with norms of outputs, not of inputs, and of the whole query and key."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import flattened, same
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    CONSTANTS,
    LLAMA,
    MLP,
    SIZES,
)

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
