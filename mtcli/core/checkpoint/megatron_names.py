"""What Megatron-LM's torch_dist checkpoints call our parameters, and how they shape them.

Shapes: K key-value heads, Q query heads of each, D head_dim, H hidden, F inner width, E experts.
Rows of query, key and value are grouped by K as ours are, and gate comes before up, so every tensor
of theirs is one of ours with neighbouring dimensions joined.
"""

from collections.abc import Iterator

from mtcli.core.spec.sharding import Parameter

OUTER = {
    "embedding.weight": ("embedding.word_embeddings.weight",),
    "position_embedding.weight": ("embedding.position_embeddings.weight",),
    "final_norm.weight": ("decoder.final_layernorm.weight",),
    "final_norm.bias": ("decoder.final_layernorm.bias",),
    "head.weight": ("output_layer.weight",),
}
# A norm is part of the linear layer after it in Transformer Engine, and in what others save too.
BEFORE_QKV = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
BEFORE_MLP = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
INNER = {
    **{f"attention_norm.{k}": tuple(n + k for n in BEFORE_QKV) for k in ("weight", "bias")},
    **{f"mlp_norm.{k}": tuple(n + k for n in BEFORE_MLP) for k in ("weight", "bias")},
    "attention.qkv.weight": ("self_attention.linear_qkv.weight",),
    "attention.qkv.bias": ("self_attention.linear_qkv.bias",),
    "attention.out.weight": ("self_attention.linear_proj.weight",),
    "attention.out.bias": ("self_attention.linear_proj.bias",),
    "mlp.gate_up.weight": ("mlp.linear_fc1.weight",),
    "mlp.gate_up.bias": ("mlp.linear_fc1.bias",),
    "mlp.up.weight": ("mlp.linear_fc1.weight",),
    "mlp.up.bias": ("mlp.linear_fc1.bias",),
    "mlp.down.weight": ("mlp.linear_fc2.weight",),
    "mlp.down.bias": ("mlp.linear_fc2.bias",),
    "mlp.router.weight": ("mlp.router.weight",),
    "mlp.experts.gate_up.weight": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.up.weight": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.down.weight": ("mlp.experts.experts.linear_fc2.weight",),
    "mlp.shared_expert.gate_up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared_expert.up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared_expert.down.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "mlp.shared_expert_gate.weight": ("mlp.shared_experts.gate_weight",),
}
PADDED = ("embedding.weight", "head.weight")  # on the rows of the vocabulary


def alternatives(name: str) -> Iterator[tuple[str, int | None]]:
    """The names that a parameter may have, each with its place in a stack of layers, or None."""
    if not name.startswith("blocks."):
        yield from ((theirs, None) for theirs in OUTER[name])
        return
    _, layer, ours = name.split(".", 2)
    for theirs in INNER.get(ours, (ours,)):
        yield f"decoder.layers.{theirs}", int(layer)
        yield f"decoder.layers.{layer}.{theirs}", None


def is_padded(name: str) -> bool:
    """Whether the tensor may have more rows than the vocabulary."""
    return name in PADDED


def factors(parameter: Parameter, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each dimension of their tensor, the dimensions of ours that it joins."""
    ours = parameter.shape
    if is_padded(parameter.name) and shape:
        return ((shape[0],), *((size,) for size in ours[1:]))
    if ".qkv." in parameter.name:
        return (ours[:3], *((size,) for size in ours[3:]))
    if ".gate_up." in parameter.name:
        before = len(ours) - (3 if parameter.name.endswith("weight") else 2)
        joined = ours[before : before + 2]
        return (*((n,) for n in ours[:before]), joined, *((n,) for n in ours[before + 2 :]))
    return tuple((size,) for size in ours)
