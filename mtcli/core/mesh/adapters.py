"""The low-rank adapters of a model's linear layers (LoRA, arXiv:2106.09685), as parameters.

A linear layer y = W x gets scale * B A x for each of its targets: a fused projection to query, key
and value has three, GPT-2's c_attn one. A is [rank, in]; B has the shape of its target's part of W
with `rank` in place of the inputs. They are sharded as W is, and replicated where W is.

Targets are named as in peft, by the modules of Hugging Face's model.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from mtcli.core.config.lora import layer_targets
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.sharding import Parameter


class LoraTarget(NamedTuple):
    """A target inside a linear layer: its name, and its slots of the weight, as in a Matrix."""

    name: str
    dim: int | None = None
    first: int = 0
    num_slots: int = 1

    @property
    def short(self) -> str:
        """The last part of the name, without modules such as that of shared experts."""
        return self.name.rpartition(".")[2]


def targets_of(weight: Parameter, model: ModelConfig) -> tuple[LoraTarget, ...]:
    """The targets in a weight; none for a weight that takes no adapter."""
    if not weight.matrices or weight.is_expert:
        return ()
    prefix = "shared_expert." if ".shared_expert." in weight.name else ""
    layer = weight.name.split(".")[-2]
    names = [prefix + name for name in layer_targets(model).get(layer, ())]
    if not names:
        return ()
    if len(names) < len(weight.matrices):  # peft adapts GPT-2's c_attn as one
        return (LoraTarget(names[0]),)
    matrices = zip(names, weight.matrices, strict=True)
    return tuple(LoraTarget(name, m.dim, m.first, m.num_slots) for name, m in matrices)


def adapter_name(weight: str, side: str, target: LoraTarget) -> str:
    """The canonical name of A or B (`side` "a" or "b") of a target of a weight."""
    return f"{weight.removesuffix('.weight')}.adapter.{side}.{target.short}"


def chosen_targets(
    weight: Parameter, model: ModelConfig, lora: LoraConfig
) -> tuple[LoraTarget, ...]:
    """The targets in a weight that a config adapts."""
    available = targets_of(weight, model)
    if not lora.targets:
        return available
    return tuple(target for target in available if {target.name, target.short} & {*lora.targets})


def adapter_parameters(
    weight: Parameter, model: ModelConfig, lora: LoraConfig
) -> Iterator[Parameter]:
    """Yields A and B of each target in a weight."""
    *outer, inputs = weight.shape
    *outer_axes, input_axis = weight.shard_axes
    for target in chosen_targets(weight, model, lora):
        shape, axes = list(outer), list(outer_axes)
        if target.dim is not None:
            shape[target.dim] = target.num_slots
        a, b = (adapter_name(weight.name, side, target) for side in "ab")
        sizes = (lora.rank, inputs), (*shape, lora.rank)
        adapter = partial(Parameter, layer=weight.layer, of_adapter=True, partial_over_tp=True)
        yield adapter(a, sizes[0], (None, input_axis), "adapter")
        yield adapter(b, sizes[1], (*axes, None), "zeros")
