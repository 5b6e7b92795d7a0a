"""The architecture of a Megatron-LM checkpoint, by the arguments that it was trained with.

Megatron-LM keeps them in common.pt; megatron-core by itself keeps none.
"""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mtcli.core.checkpoint.huggingface.family import RequiredValue
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import refused_value
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

Arguments = dict[str, Any]
HINT = "say what it is: --config FILE, a TOML file with the [model] of these weights"


class Needed(NamedTuple):
    """A field of ModelConfig and the arguments that may say it; the first that is there counts."""

    ours: str
    theirs: tuple[str, ...]


NEEDED = (
    Needed("num_layers", ("num_layers",)),
    Needed("hidden_size", ("hidden_size",)),
    Needed("num_heads", ("num_attention_heads",)),
    Needed("ffn_hidden_size", ("ffn_hidden_size",)),
    Needed("vocab_size", ("padded_vocab_size",)),
    Needed("max_seq_len", ("max_position_embeddings",)),
    Needed("norm_eps", ("norm_epsilon", "layernorm_epsilon")),
)
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope"}
# What we have one way of, with the values that say so; an argument that is absent says so too.
DEMANDS = (
    RequiredValue("normalization", ("LayerNorm", "RMSNorm", None)),
    RequiredValue("position_embedding_type", ("learned_absolute", "rope", None)),
    RequiredValue("apply_layernorm_1p", (False, None)),
    RequiredValue("apply_residual_connection_post_layernorm", (False, None)),
    RequiredValue("squared_relu", (False, None)),
    RequiredValue("quick_geglu", (False, None)),
    RequiredValue("rotary_percent", (1.0, None)),
    RequiredValue("rotary_interleaved", (False, None)),
    RequiredValue("rotary_seq_len_interpolation_factor", (None, 1)),
    RequiredValue("use_rope_scaling", (False, None)),
    RequiredValue("multi_latent_attention", (False, None)),
    RequiredValue("qk_layernorm", (False, None)),
    RequiredValue("window_size", (None,)),
    RequiredValue("softmax_type", ("vanilla", None)),
    RequiredValue("mtp_num_layers", (None, 0)),
    RequiredValue("moe_layer_freq", (1, None, "1")),
    RequiredValue("moe_router_topk_scaling_factor", (None, 1.0)),
    RequiredValue("moe_router_num_groups", (None, 1)),
    RequiredValue("moe_router_enable_expert_bias", (False, None)),
    RequiredValue("moe_router_score_function", ("softmax", "sigmoid", None)),
)


def model_of(arguments: Arguments, path: Path) -> ModelConfig:
    """The model of Megatron-LM's arguments.

    Raises MtcliError with all that they do not say, and all that cannot be represented.
    """
    said = {n.ours: _first(arguments, n.theirs) for n in NEEDED}
    if missing := [name for name, value in said.items() if value is None]:
        message = f"{path.parent} does not say its architecture: {', '.join(missing)}"
        raise wrong(f"{message} are not in the args of {path.name}", HINT)
    problems = [
        Problem(f"{path}: {d.theirs}={shown(arguments[d.theirs])} cannot be represented")
        for d in DEMANDS
        if arguments.get(d.theirs) not in d.values
    ]
    if problems:
        raise MtcliError(*problems)
    values = said | _attention(arguments) | _layers(arguments) | _experts(arguments)
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        found = (refused_value(ModelConfig, detail) for detail in error.errors())
        raise MtcliError(
            *(Problem(f"{path}: {p.field}: {p.message}", HINT) for p in found)
        ) from None


def _first(arguments: Arguments, names: tuple[str, ...]) -> Any:
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _attention(arguments: Arguments) -> Arguments:
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    bias = bool(arguments.get("add_bias_linear", True))
    return {
        "num_kv_heads": groups or arguments["num_attention_heads"],
        "qkv_bias": bias or bool(arguments.get("add_qkv_bias")),
        "position": POSITIONS[arguments.get("position_embedding_type") or "learned_absolute"],
        "rope_theta": arguments.get("rotary_base") or 10000.0,
    } | ({"head_dim": arguments["kv_channels"]} if arguments.get("kv_channels") else {})


def _layers(arguments: Arguments) -> Arguments:
    gated = bool(arguments.get("swiglu"))
    # Megatron's fused bias and GELU computes the tanh form, whatever --openai-gelu says.
    tanh = arguments.get("openai_gelu") or (
        arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True)
    )
    return {
        "architecture": "llama" if gated else "gpt",
        "activation": "swiglu" if gated else "gelu_tanh" if tanh else "gelu",
        "norm": NORMS[arguments.get("normalization") or "LayerNorm"],
        "bias": bool(arguments.get("add_bias_linear", True)),
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
    }


def _experts(arguments: Arguments) -> Arguments:
    if not arguments.get("num_experts"):
        return {}
    score = arguments.get("moe_router_score_function") or "softmax"
    return {
        "num_experts": arguments["num_experts"],
        "top_k": arguments.get("moe_router_topk", 2),
        "moe_ffn_hidden_size": arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
        "shared_expert_ffn_hidden_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "shared_expert_gate": bool(arguments.get("moe_shared_expert_gate")),
        "router_score": score,
        # A softmax over the chosen logits is the softmax over all of them, rescaled to sum to 1.
        "normalize_top_k": score == "sigmoid" or not arguments.get("moe_router_pre_softmax"),
    }
