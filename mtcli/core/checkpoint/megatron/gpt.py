"""Maps Megatron-LM's GPT models to ours: the arguments of the architecture, and the tensors.

Megatron-LM saves its arguments in common.pt; megatron-core by itself saves none.

Shapes: K key-value heads, Q query heads of each, D head_dim, H hidden, F inner width, E experts.
Rows of query, key and value are grouped by K as ours are, and gate comes before up, so each of
their tensors is one of ours with neighbouring dimensions joined.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtcli.core.checkpoint.megatron.latents import Arguments, latents, require, scaled_by_yarn
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import refused_value
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.sharding import Box, Parameter, boxes_of_range, flat_index

HINT = "say what it is: --config FILE, a TOML file with the [model] of these weights"


# Fields of ModelConfig and the arguments that may say them; the first that is there counts.
NEEDED = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "ffn_hidden_size": ("ffn_hidden_size",),
    "vocab_size": ("padded_vocab_size",),
    "max_seq_len": ("max_position_embeddings",),
    "norm_eps": ("norm_epsilon", "layernorm_epsilon"),
}
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope"}
# What we have one way of, with the values that say so; an argument that is absent says so too.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm", None),
    "position_embedding_type": (*POSITIONS, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "window_size": (None,),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "softmax_type": ("vanilla", None),
    "moe_router_topk_limited_devices": (None,),
    "moe_latent_size": (None,),
    "moe_router_score_function": ("softmax", "sigmoid", None),
}
ABSENT: tuple[str, ...] = (
    "apply_residual_connection_post_layernorm",
    "quick_geglu",
    "use_rope_scaling",
)
ABSENT += ("attention_output_gate", "moe_apply_probs_on_input", "qk_l2_norm")
REQUIRED |= dict.fromkeys((*ABSENT, "mla_down_proj_fusion"), (False, None))
FLAGS = ("apply_layernorm_1p", "squared_relu", "multi_latent_attention", "qk_layernorm")
REQUIRED |= dict.fromkeys((*FLAGS, "moe_router_enable_expert_bias"), (False, True, None))
# Sinkhorn gives the weights of all experts' softmax; the others, and lists of them, are losses.
REFUSED = {"moe_router_load_balancing_type": "sinkhorn"}

OUTER = {
    "embedding.weight": ("embedding.word_embeddings.weight",),
    "position_embedding.weight": ("embedding.position_embeddings.weight",),
    "final_norm.weight": ("decoder.final_layernorm.weight",),
    "final_norm.bias": ("decoder.final_layernorm.bias",),
    "head.weight": ("output_layer.weight",),
}
# The modules of a block. A norm is part of the linear layer after it in Transformer Engine, and in
# what others save too.
INNER = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.out": ("self_attention.linear_proj.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.q_norm": (
        "self_attention.q_layernorm.",
        "self_attention.linear_q_up_proj.layer_norm_",
    ),
    "attention.kv_norm": (
        "self_attention.kv_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_",
    ),
    "attention.q": ("self_attention.linear_q_proj.",),
    "attention.q_down": ("self_attention.linear_q_down_proj.",),
    "attention.q_up": ("self_attention.linear_q_up_proj.",),
    "attention.kv_down": ("self_attention.linear_kv_down_proj.",),
    "attention.kv_up": ("self_attention.linear_kv_up_proj.",),
    "mlp.gate_up": ("mlp.linear_fc1.",),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
    "mlp.router": ("mlp.router.",),
    "mlp.experts.gate_up": ("mlp.experts.experts.linear_fc1.",),
    "mlp.experts.up": ("mlp.experts.experts.linear_fc1.",),
    "mlp.experts.down": ("mlp.experts.experts.linear_fc2.",),
    "mlp.shared_expert.gate_up": ("mlp.shared_experts.linear_fc1.",),
    "mlp.shared_expert.up": ("mlp.shared_experts.linear_fc1.",),
    "mlp.shared_expert.down": ("mlp.shared_experts.linear_fc2.",),
    "mlp.shared_expert_gate": ("mlp.shared_experts.gate_",),
}
CHOICE = {"mlp.router.bias": "expert_bias"}  # which theirs call otherwise than a layer's bias
PADDED = ("embedding.weight", "head.weight")  # which may have more rows than the vocabulary
HEADS = (".q.weight", ".q_up.weight", ".kv_up.weight")  # whose rows are heads' columns

Factors = tuple[tuple[int, ...], ...]  # of each dimension of theirs: those of ours that it joins


def model_of(arguments: Arguments, path: Path) -> ModelConfig:
    """Converts Megatron-LM's arguments to a ModelConfig.

    Raises MtcliError with all missing arguments, and all that cannot be represented.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    said = {
        ours: next((given[name] for name in names if name in given), None)
        for ours, names in NEEDED.items()
    }
    if missing := [name for name, value in said.items() if value is None]:
        message = f"{path.parent} does not say its architecture: {', '.join(missing)}"
        raise wrong(f"{message} are not in the args of {path.name}", HINT)
    require(arguments, REQUIRED, path)
    if named := [name for name, value in REFUSED.items() if arguments.get(name) == value]:
        raise _unrepresented(named[0], arguments, path)
    attention = _attention(arguments)
    if arguments.get("multi_latent_attention"):
        attention = latents(arguments, said["norm_eps"], path)
    elif arguments.get("position_embedding_type") == "yarn":
        attention |= scaled_by_yarn(arguments, path)
    values = said | attention | _layers(arguments) | _experts(arguments, path)
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        refused = (refused_value(ModelConfig, detail) for detail in error.errors())
        raise MtcliError(
            *(Problem(f"{path}: {p.field}: {p.message}", HINT) for p in refused)
        ) from None


def _attention(arguments: Arguments) -> Arguments:
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    bias = bool(arguments.get("add_bias_linear", True))
    return {
        "num_kv_heads": groups or arguments["num_attention_heads"],
        "qkv_bias": bias or bool(arguments.get("add_qkv_bias")),
        "position": POSITIONS[arguments.get("position_embedding_type") or "learned_absolute"],
        "rope_theta": arguments.get("rotary_base") or 10000.0,
        "rope_interleaved": bool(arguments.get("rotary_interleaved")),
        "rotary_fraction": arguments.get("rotary_percent") or 1.0,
        "qk_norm": "head" if arguments.get("qk_layernorm") else "none",
    } | ({"head_dim": arguments["kv_channels"]} if arguments.get("kv_channels") else {})


def _layers(arguments: Arguments) -> Arguments:
    gated = bool(arguments.get("swiglu"))
    # Megatron's fused bias and GELU computes the tanh form, whatever --openai-gelu says.
    tanh = arguments.get("openai_gelu") or (
        arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True)
    )
    plain = "relu2" if arguments.get("squared_relu") else "gelu_tanh" if tanh else "gelu"
    return {
        "architecture": "llama" if gated else "gpt",
        "activation": "swiglu" if gated else plain,
        "norm": NORMS[arguments.get("normalization") or "LayerNorm"],
        "norm_offset": float(bool(arguments.get("apply_layernorm_1p"))),
        "bias": bool(arguments.get("add_bias_linear", True)),
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
    }


def _experts(arguments: Arguments, path: Path) -> Arguments:
    if not arguments.get("num_experts"):
        return {}
    score = arguments.get("moe_router_score_function") or "softmax"
    top_k = arguments.get("moe_router_topk", 2)
    # A softmax over the chosen logits is the softmax over all of them, rescaled to sum to 1.
    # Megatron rescales no single sigmoid.
    normalize = top_k != 1 if score == "sigmoid" else not arguments.get("moe_router_pre_softmax")
    return {
        "num_experts": arguments["num_experts"],
        "top_k": top_k,
        "moe_ffn_hidden_size": arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
        "shared_expert_ffn_hidden_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "shared_expert_gate": bool(arguments.get("moe_shared_expert_gate")),
        "router_score": score,
        "normalize_top_k": normalize,
        "router_biases": bool(arguments.get("moe_router_enable_expert_bias")),
        "routed_scale": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "first_dense_layers": _dense_layers(arguments, path),
    } | _groups(arguments, score, path)


def _dense_layers(arguments: Arguments, path: Path) -> int:
    """Returns how many of the first layers have no experts. Raises MtcliError where later ones have
    none either."""
    name = "moe_layer_freq"
    pattern = arguments.get(name)
    if pattern in (None, 1, "1"):
        return 0
    layers = arguments["num_layers"]
    if not isinstance(pattern, list) or len(pattern) != layers or 1 not in pattern:
        raise _unrepresented(name, arguments, path)
    count = pattern.index(1)
    if pattern != [0] * count + [1] * (layers - count):
        raise _unrepresented(name, arguments, path)
    return count


def _groups(arguments: Arguments, score: str, path: Path) -> Arguments:
    """Returns the groups of experts that a choice is limited to. Raises MtcliError where groups are
    compared by another number of their best experts than here: two of a sigmoid, one of a softmax.
    """
    count, chosen = (arguments.get(f"moe_router_{name}") for name in ("num_groups", "group_topk"))
    if not chosen or count in (None, 1):
        return {}
    best = 1 if score == "softmax" else 2
    top_k = arguments.get("moe_router_topk", 2)
    if type(chosen) is not int or type(top_k) is not int or top_k // chosen != best:
        raise _unrepresented("moe_router_group_topk", arguments, path)
    return {"router_groups": count, "router_top_groups": chosen}


def _unrepresented(name: str, arguments: Arguments, path: Path) -> MtcliError:
    return wrong(f"{path}: {name}={shown(arguments[name])} cannot be represented", HINT)


def alternatives(name: str) -> Iterator[tuple[str, int | None]]:
    """Yields the names that a parameter may have, each with its layer where layers are stacked."""
    if not name.startswith("blocks."):
        yield from ((theirs, None) for theirs in OUTER[name])
        return
    _, layer, ours = name.split(".", 2)
    module, _, kind = ours.rpartition(".")
    kind = CHOICE.get(ours, kind)
    for theirs in INNER.get(module, (f"{module}.",)):
        yield f"decoder.layers.{theirs}{kind}", int(layer)
        yield f"decoder.layers.{layer}.{theirs}{kind}", None


def factors(parameter: Parameter, shape: tuple[int, ...]) -> Factors:
    """Finds, for each dimension of their tensor, the dimensions of ours that it joins."""
    ours = parameter.shape
    if parameter.name in PADDED and shape:
        return ((shape[0],), *((size,) for size in ours[1:]))
    if ".qkv." in parameter.name:
        return (ours[:3], *((size,) for size in ours[3:]))
    if parameter.name.endswith(HEADS):
        return (ours[:2], *((size,) for size in ours[2:]))
    if ".gate_up." in parameter.name:
        num_leading = len(ours) - (3 if parameter.name.endswith("weight") else 2)
        joined = ours[num_leading : num_leading + 2]
        return (
            *((n,) for n in ours[:num_leading]),
            joined,
            *((n,) for n in ours[num_leading + 2 :]),
        )
    return tuple((size,) for size in ours)


def factored_boxes(box: Box, lead: tuple[int, ...], inner: Factors) -> Iterator[tuple[int, Box]]:
    """Maps a chunk of Megatron's tensor to boxes of ours, each with its first element in the chunk.

    `lead` is an index into the tensor's leading dimensions; the other dimensions are products of
    `inner`. Yields nothing where the chunk does not contain that index. Raises MtcliError where
    the chunk's elements of a box are not consecutive.
    """
    first = 0
    for dim, index in enumerate(lead):
        at = index - box.start[dim]
        if not 0 <= at < box.size[dim]:
            return
        first += at * prod(box.size[dim + 1 :])
    starts, sizes = box.start[len(lead) :], box.size[len(lead) :]
    choices = [
        list(boxes_of_range(dims, start, start + size))
        for dims, start, size in zip(inner, starts, sizes, strict=True)
    ]
    for dim, boxes in enumerate(choices):
        if len(boxes) > 1 and prod(sizes[:dim]) > 1:
            raise wrong(f"a chunk of {list(box.size)} at {list(box.start)} cuts heads apart")
    for choice in product(*choices):
        corner = [flat_index(start, dims) for (start, _), dims in zip(choice, inner, strict=True)]
        skipped = sum(
            (at - start) * prod(sizes[dim + 1 :])
            for dim, (at, start) in enumerate(zip(corner, starts, strict=True))
        )
        joined = (tuple(n for part in parts for n in part) for parts in zip(*choice, strict=True))
        yield first + skipped, Box(*joined)
