"""What Megatron-LM's torch_dist checkpoints call our parameters, and how they shape them.

Shapes: K key-value heads, Q query heads of each, D head_dim, H hidden, F inner width, E experts.
Rows of query, key and value are grouped by K as ours are, and gate comes before up, so every tensor
of theirs is one of ours with neighbouring dimensions joined.

A chunk of a tensor as rectangles of the same tensor with its dimensions split into factors.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.mesh.sharding import Box, Parameter, boxes_of_range, flat_index

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


Factors = tuple[tuple[int, ...], ...]  # of each dimension


class FactoredBox(NamedTuple):
    """Consecutive elements of a chunk, from `first` on: a rectangle of the split tensor."""

    first: int
    start: tuple[int, ...]
    size: tuple[int, ...]


def factored_boxes(box: Box, lead: tuple[int, ...], inner: Factors) -> Iterator[FactoredBox]:
    """The rectangles that a chunk holds of the part of a tensor at the indices `lead`, whose other
    dimensions are products of `inner`; none where the chunk has nothing of it.

    Raises MtcliError where the chunk's elements of a rectangle are not consecutive.
    """
    first = 0
    for dim, index in enumerate(lead):
        at = index - box.start[dim]
        if not 0 <= at < box.size[dim]:
            return
        first += at * prod(box.size[dim + 1 :])
    starts, sizes = box.start[len(lead) :], box.size[len(lead) :]
    cuts = [
        list(boxes_of_range(dims, start, start + size))
        for dims, start, size in zip(inner, starts, sizes, strict=True)
    ]
    for dim, parts in enumerate(cuts):
        if len(parts) > 1 and prod(sizes[:dim]) > 1:
            raise wrong(f"a chunk of {list(box.size)} at {list(box.start)} cuts heads apart")
    for choice in product(*cuts):
        corner = [flat_index(start, dims) for (start, _), dims in zip(choice, inner, strict=True)]
        skipped = sum(
            (at - start) * prod(sizes[dim + 1 :])
            for dim, (at, start) in enumerate(zip(corner, starts, strict=True))
        )
        yield FactoredBox(
            first + skipped,
            tuple(n for start, _ in choice for n in start),
            tuple(n for _, size in choice for n in size),
        )

