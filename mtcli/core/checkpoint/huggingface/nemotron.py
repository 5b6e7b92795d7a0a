"""Maps Nemotron and Minitron: layernorm of gain 1 + weight, squared ReLU, half a head rotated."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, same
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, ATTENTION_BIAS, LLAMA, SIZES
from mtcli.core.checkpoint.huggingface.rope import read_partial_rope, write_partial_rope
from mtcli.core.checkpoint.huggingface.starcoder2 import BIASES, CONSTANTS, GELUS, STARCODER2

NEMOTRON = replace(
    LLAMA,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours not in ("activation", "norm_eps")),
        Field("activation", "hidden_act", "relu2", {"relu2": "relu2", **GELUS}),
        Field("norm_eps", "norm_eps", 1e-5),
        *ATTENTION_BIAS,
        Field("mlp_bias", "mlp_bias", False, written="has_mlp_bias"),
    ),
    defaults={"num_hidden_layers": 32, "hidden_size": 6144, "num_attention_heads": 48}
    | {"intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 4096}
    | {"initializer_range": 0.0134, "partial_rotary_factor": 0.5},
    constants=CONSTANTS | {"bias": False, "norm_offset": 1.0},
    outer=STARCODER2.outer,
    inner=ATTENTION
    | BIASES
    | {
        f"mlp.{name}.{kind}": same(f"mlp.{name}_proj.{kind}")
        for name in ("up", "down")
        for kind in ("weight", "bias")
    },
    supports=("partial_rotary_factor",),
    read_more=read_partial_rope,
    write_more=write_partial_rope,
)
