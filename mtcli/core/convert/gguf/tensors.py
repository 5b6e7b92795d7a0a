"""Maps a model's parameters to the tensors of GGUF, in the layouts of llama.cpp's architectures.

A tensor is the concatenation of boxes of parameters. Fused projections are divided, or kept where
the architecture fuses them: GPT-2's and Phi-3's query, key and value, and Phi-3's gate and up.
Experts are stacked. llama.cpp rotates neighbours in its architecture `llama`, and halves in the
others, as we do; so there the rows of each query and key head are reordered: row i of the first
half, then row i of the second. It adds no offset to the weights of norms.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter
from mtcli.core.model.rope import frequencies

# HF's model_type -> the architecture of llama.cpp that computes it.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
}
FUSED_QKV, FUSED_GATE = ("gpt2", "phi3"), ("phi3",)
ROTATES_NEIGHBOURS = ("llama",)
OUTER = {
    "embedding": "token_embd",
    "position_embedding": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
}
INNER = {
    "attention_norm": "attn_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.out": "attn_output",
    "attention.sinks": "attn_sinks",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down": "ffn_down_exps",
    "mlp.shared_expert.down": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GATED = {"mlp": "", "mlp.experts": "_exps", "mlp.shared_expert": "_shexp"}


class GgufTensor(NamedTuple):
    """A tensor: its shape, rows last; the boxes of parameters that it is made of, in order; the
    dimensions of a head whose halves become neighbours; what is added to each element; or else
    `values`, that follow from the model."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[str, Box], ...] = ()
    turned: int = 0
    offset: float = 0.0
    values: tuple[float, ...] = ()


def gguf_tensors(model: ModelConfig, architecture: str) -> Iterator[GgufTensor]:
    """Yields the tensors of a model, in the order of a forward pass."""
    yield from _factors(model, architecture)
    for parameter in parameters(model).values():
        if parameter.name.startswith("blocks."):
            _, layer, inner = parameter.name.split(".", 2)
            yield from _of_block(parameter, inner, f"blk.{layer}.", model, architecture)
        else:
            stem, _, kind = parameter.name.rpartition(".")
            yield _plain(parameter, f"{OUTER[stem]}.{kind}", model)


def _of_block(
    parameter: Parameter, inner: str, prefix: str, model: ModelConfig, architecture: str
) -> Iterator[GgufTensor]:
    stem, _, kind = inner.rpartition(".")
    if inner == "attention.sinks":
        stem, kind = inner, "weight"
    if kind == "linear_bias":  # of a router
        kind = "bias"
    if stem == "attention.qkv":
        yield from _queries_keys_values(parameter, prefix, kind, architecture)
    elif stem.endswith(".gate_up"):
        suffix = GATED[stem.removesuffix(".gate_up")]
        yield from _gate_and_up(parameter, prefix, suffix, kind, architecture in FUSED_GATE)
    else:
        name = INNER[stem]
        if architecture == "gpt-oss" and stem == "mlp_norm":
            name = "post_attention_norm"
        yield _plain(parameter, f"{prefix}{name}.{kind}", model)


def _plain(parameter: Parameter, name: str, model: ModelConfig) -> GgufTensor:
    """Maps a tensor as it is; vectors that we have by heads, or as one row, are flat."""
    shape = parameter.shape
    if "sinks" in name or "_norm." in name or "gate_inp_shexp" in name:
        shape = (prod(shape),)
    offset = model.norm_offset if name.endswith("_norm.weight") else 0.0
    all_of_it = ((parameter.name, Box.of(parameter.shape)),)
    return GgufTensor(name, shape, all_of_it, offset=offset)


def _queries_keys_values(
    parameter: Parameter, prefix: str, kind: str, architecture: str
) -> Iterator[GgufTensor]:
    """Divides [K, Q + 2, D, H], or its bias, into queries [K * Q * D, H], keys and values
    [K * D, H]."""
    groups, slots, dim, *hidden = parameter.shape
    parts, turned = [], dim if architecture in ROTATES_NEIGHBOURS else 0
    for first, count in ((0, slots - 2), (slots - 2, 1), (slots - 1, 1)):
        size = (1, count, dim, *hidden)
        starts = ((group, first, 0, *(0 for _ in hidden)) for group in range(groups))
        parts.append(tuple((parameter.name, Box(start, size)) for start in starts))
    if architecture in FUSED_QKV:
        shape = (groups * slots * dim, *hidden)
        yield GgufTensor(f"{prefix}attn_qkv.{kind}", shape, sum(parts, ()))
        return
    for letter, boxes in zip("qkv", parts, strict=True):
        rows = sum(prod(box.size[:3]) for _, box in boxes)
        halves = 0 if letter == "v" else turned
        yield GgufTensor(f"{prefix}attn_{letter}.{kind}", (rows, *hidden), boxes, halves)


def _gate_and_up(
    parameter: Parameter, prefix: str, suffix: str, kind: str, fused: bool
) -> Iterator[GgufTensor]:
    """Divides [2, F, H], or of experts [E, 2, F, H], or their biases, into gates and ups."""
    if fused:
        rows = (prod(parameter.shape[:2]), *parameter.shape[2:])
        all_of_it = ((parameter.name, Box.of(parameter.shape)),)
        yield GgufTensor(f"{prefix}ffn_up.{kind}", rows, all_of_it)
        return
    lead = 1 if suffix == "_exps" else 0
    experts, inner = parameter.shape[:lead], parameter.shape[lead + 1 :]
    zeros = (0,) * len(inner)
    for slot, name in enumerate(("gate", "up")):
        starts: Sequence[tuple[int, ...]] = [(slot, *zeros)]
        if experts:
            starts = [(expert, slot, *zeros) for expert in range(experts[0])]
        size = (*(1 for _ in experts), 1, *inner)
        boxes = tuple((parameter.name, Box(start, size)) for start in starts)
        yield GgufTensor(f"{prefix}ffn_{name}{suffix}.{kind}", (*experts, *inner), boxes)


def _factors(model: ModelConfig, architecture: str) -> Iterator[GgufTensor]:
    """Yields what divides the rotary frequencies of each pair: Llama 3's and LongRoPE's."""
    scaling = model.rope_scaling
    if scaling is None:
        return
    size = model.rotary_dim // 2
    if scaling.kind == "llama3":
        bases = (
            frequencies(model.rotary_dim, model.rope_theta, kind, 0, torch.device("cpu"))
            for kind in (None, scaling)
        )
        plain, scaled = bases
        yield GgufTensor("rope_freqs.weight", (size,), values=tuple((plain / scaled).tolist()))
    elif scaling.kind == "longrope":
        for name in ("long", "short"):
            values = getattr(scaling, f"{name}_factors")
            yield GgufTensor(f"rope_factors_{name}.weight", (size,), values=values)
