"""Maps gpt-oss: experts with biases and a clamped gate, attention with sinks, and a window of every
other layer.

The two matrices of experts are stored with inputs first, and gate and up are neighbouring columns.
Published folders have them in MXFP4, with outputs first.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Field,
    RequiredValue,
    Table,
    TensorRule,
    WindowRule,
    flattened,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    CONSTANTS,
    LLAMA,
    SIZES,
)
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import MAX_LAYERS, ModelConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.sharding import Parameter

QUANTISATION, METHOD = "quantization_config", "mxfp4"
OWN = ("activation", "norm_eps", "ffn_hidden_size")
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 4096}


def read_unpacked(theirs: Table) -> Table:
    """Reads rotary positions. Raises MtcliError for quantised weights other than MXFP4, which are
    decoded."""
    given = theirs.get(QUANTISATION)
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method not in (None, METHOD):
        message = f"{QUANTISATION} with quant_method={shown(method)} cannot be represented"
        raise wrong(message, f"only {METHOD} or a model without it can")
    return read_rope(theirs)


def first_local(theirs: Table) -> str:
    """Gives the window to the first layer and every other one."""
    layers = theirs.get("num_hidden_layers")
    return ("LG" * MAX_LAYERS)[:layers] if type(layers) is int and layers > 0 else ""


def write_scaling(model: ModelConfig) -> Table:
    """Writes rotary positions; without a scaling, that there is none, as transformers' default is
    one."""
    table = write_rope(model)
    return table | {"rope_scaling": table["rope_scaling"] or {"rope_type": "default"}}


def neighbours(name: str) -> TensorRule:
    """Maps gate and up of experts: ours [E, 2, F, H] is stored as [E, H, 2 * F], and a bias
    [E, 2, F] as [E, 2 * F], gate at even columns and up at odd ones."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        experts, slots, inner, *hidden = parameter.shape
        shape, view = (experts, *hidden, slots * inner), (experts, *hidden, inner, slots)
        axes = (0, 3, 2, 1) if hidden else (0, 2, 1)
        return [StoredBox(name, shape, view, axes, (0,) * len(view))]

    return rule


def paired_rows(name: str) -> TensorRule:
    """Maps gate and up of experts in decoded MXFP4, whose rows are outputs: [E, 2 * F, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        experts, slots, inner, hidden = parameter.shape
        shape, view = (experts, slots * inner, hidden), (experts, inner, slots, hidden)
        return [StoredBox(name, shape, view, (0, 2, 1, 3), (0,) * 4)]

    return rule


def inputs_first(name: str) -> TensorRule:
    """Maps the second matrix of experts: ours [E, H, F] is stored as [E, F, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        experts, hidden, inner = parameter.shape
        view = (experts, inner, hidden)
        return [StoredBox(name, view, view, (0, 2, 1), (0, 0, 0))]

    return rule


GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *(field for field in SIZES if field.ours not in OWN),
        *ATTENTION_BIAS,
        Field("norm_eps", "rms_norm_eps", 1e-5),
        Field("moe_ffn_hidden_size", "intermediate_size"),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
        Field("activation_limit", "swiglu_limit", 7.0),
        Field("activation_alpha", "swiglu_alpha", 1.702),
    ),
    defaults={"num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088}
    | {"max_position_embeddings": 131072, "sliding_window": 128, "attention_bias": True}
    | {"rope_theta": 150000.0, "rope_parameters": YARN, "hidden_act": "silu"},
    constants=CONSTANTS
    | {"architecture": "mixtral", "activation": "swiglu_clamped", "attention_sinks": True}
    | {"expert_bias": True, "router_bias": True},
    required=(RequiredValue("hidden_act", ("silu", "swish")),),
    inner=ATTENTION
    | {
        "attention.sinks": flattened("self_attn.sinks"),
        "mlp.router.weight": same("mlp.router.weight"),
        "mlp.router.linear_bias": same("mlp.router.bias"),
        "mlp.experts.gate_up.weight": neighbours("mlp.experts.gate_up_proj"),
        "mlp.experts.gate_up.bias": neighbours("mlp.experts.gate_up_proj_bias"),
        "mlp.experts.down.weight": inputs_first("mlp.experts.down_proj"),
        "mlp.experts.down.bias": same("mlp.experts.down_proj_bias"),
    },
    packed={
        "mlp.experts.gate_up.weight": paired_rows("mlp.experts.gate_up_proj"),
        "mlp.experts.down.weight": same("mlp.experts.down_proj"),
    },
    supports=(QUANTISATION,),
    aliases={"num_experts": "num_local_experts"},
    window=WindowRule(first_local, by_layer=True),
    read_more=read_unpacked,
    write_more=write_scaling,
)
