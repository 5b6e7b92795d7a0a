"""Maps StableLM: Llama with layer norms, a rotated quarter of each head, and maybe one norm for
attention and MLP, which then read the same input. 2 12B also norms each query and key head, by a
weight of its own."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, RequiredValue, Table, same, stacked
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    CONSTANTS,
    LLAMA,
    MLP,
    OUTER,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope
from mtcli.core.config.model import ModelConfig

OWN = ("head_dim", "norm_eps")
OF_HEADS = "qk_layernorm"


def read_norms(theirs: Table) -> Table:
    """Reads rotary positions, how many norms a block has, and those of heads. Raises MtcliError."""
    is_parallel = theirs.get("use_parallel_residual") is True
    norms: Table = {"parallel_norms": 1 if is_parallel else 2}
    norms |= {"qk_norm": "each_head" if theirs.get(OF_HEADS) else "none"}
    return read_partial_rope(theirs) | norms


def write_norms(model: ModelConfig) -> Table:
    """Writes what `read_norms` reads, but for a block's norms, which follow from its fields."""
    return write_partial_rope(model) | {OF_HEADS: model.qk_norm == "each_head"}


STABLELM = replace(
    LLAMA,
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours not in OWN),
        Field("norm_eps", "layer_norm_eps", 1e-5),
        Field("qkv_bias", "use_qkv_bias", False),
        Field("parallel_residual", "use_parallel_residual", False),
    ),
    defaults={"vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
    | {"max_position_embeddings": 4096, "partial_rotary_factor": 0.25},
    constants=CONSTANTS | {"norm": "layernorm"},
    required=(RequiredValue(OF_HEADS, (False, None, True)),),
    outer=OUTER | {"final_norm.bias": same("model.norm.bias")},
    inner=ATTENTION
    | MLP
    | {
        f"attention.{x}_norm.weight": stacked(f"self_attn.{x}_layernorm.norms.{{head}}.weight")
        for x in "qk"
    }
    | {
        "attention_norm.bias": same("input_layernorm.bias"),
        "mlp_norm.bias": same("post_attention_layernorm.bias"),
    },
    supports=("partial_rotary_factor",),
    read_more=read_norms,
    write_more=write_norms,
)
