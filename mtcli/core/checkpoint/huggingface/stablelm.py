"""Maps StableLM: Llama with layer norms, a rotated quarter of each head, and maybe one norm for
attention and MLP, which then read the same input."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, RequiredValue, Table, same
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    CONSTANTS,
    LLAMA,
    MLP,
    OUTER,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope

OWN = ("head_dim", "norm_eps")


def read_parallel(theirs: Table) -> Table:
    """Reads rotary positions, and how many norms a block has. Raises MtcliError."""
    is_parallel = theirs.get("use_parallel_residual") is True
    return read_partial_rope(theirs) | {"parallel_norms": 1 if is_parallel else 2}


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
    required=(RequiredValue("qk_layernorm", (None, False)),),
    outer=OUTER | {"final_norm.bias": same("model.norm.bias")},
    inner=ATTENTION
    | MLP
    | {
        "attention_norm.bias": same("input_layernorm.bias"),
        "mlp_norm.bias": same("post_attention_layernorm.bias"),
    },
    supports=("partial_rotary_factor",),
    read_more=read_parallel,
    write_more=write_partial_rope,
)
