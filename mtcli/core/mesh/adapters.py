"""The low-rank adapters of a model's linear layers (LoRA, arXiv:2106.09685), as parameters.

A linear layer y = W x gets scale * B A x for each of its targets: a fused projection to query, key
and value has three of them, GPT-2's c_attn one. A is [rank, in] and B is what its target has of W,
with `rank` in the place of the inputs. They are sharded as W is, and replicated where it is not.

Targets have the names that peft gives them: those of the modules in Hugging Face's model.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.sharding import Parameter


class LoraTarget(NamedTuple):
    """A target inside a linear layer: its name, and its slots of a dimension of the weight,
    `num_slots` from `first` on; all of the weight where dim is None."""

    name: str
    dim: int | None = None
    first: int = 0
    num_slots: int = 1

    @property
    def short(self) -> str:
        """The name without the module that it is in, such as that of shared experts."""
        return self.name.rpartition(".")[2]


def targets_of(weight: str, model: ModelConfig) -> tuple[LoraTarget, ...]:
    """The targets in a weight, by its canonical name; none where it takes no adapter."""
    *_, layer, kind = ("", "", *weight.split("."))[-3:]
    if kind != "weight" or ".experts." in weight or not weight.startswith("blocks."):
        return ()
    is_gpt, gated = model.position == "learned", model.is_gated
    queries = model.num_heads // model.num_kv_heads
    slots = ("q_proj", 0, queries), ("k_proj", queries, 1), ("v_proj", queries + 1, 1)
    prefix = "shared_expert." if ".shared_expert." in weight else ""
    named = {
        "qkv": (LoraTarget("c_attn"),)
        if is_gpt
        else tuple(LoraTarget(n, 1, at, c) for n, at, c in slots),
        "out": (LoraTarget("c_proj" if is_gpt else "o_proj"),),
        "gate_up": (LoraTarget("gate_proj", 0, 0), LoraTarget("up_proj", 0, 1)),
        "up": (LoraTarget("c_fc" if is_gpt else "up_proj"),),
        "down": (LoraTarget("c_proj" if is_gpt and not gated else "down_proj"),),
    }
    return tuple(one._replace(name=prefix + one.name) for one in named.get(layer, ()))


def adapter_name(weight: str, side: str, target: LoraTarget) -> str:
    """The canonical name of A or B (`side` "a" or "b") of a target of a weight."""
    return f"{weight.removesuffix('.weight')}.adapter.{side}.{target.short}"


def chosen_targets(weight: str, model: ModelConfig, lora: LoraConfig) -> tuple[LoraTarget, ...]:
    """The targets in a weight that a config adapts."""
    every = targets_of(weight, model)
    if not lora.targets:
        return every
    return tuple(one for one in every if {one.name, one.short} & {*lora.targets})


def adapter_parameters(
    weight: Parameter, model: ModelConfig, lora: LoraConfig
) -> Iterator[Parameter]:
    """Yields A and B of each target in a weight."""
    *outer, inputs = weight.shape
    *outer_axes, input_axis = weight.shard_axes
    for target in chosen_targets(weight.name, model, lora):
        shape, axes = list(outer), list(outer_axes)
        if target.dim is not None:
            shape[target.dim] = target.num_slots
        a, b = (adapter_name(weight.name, side, target) for side in "ab")
        sizes = (lora.rank, inputs), (*shape, lora.rank)
        yield Parameter(a, sizes[0], (None, input_axis), "adapter", weight.owner, of_adapter=True)
        yield Parameter(b, sizes[1], (*axes, None), "zeros", weight.owner, of_adapter=True)
