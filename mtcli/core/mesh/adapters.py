"""The low-rank adapters of a model's linear layers (LoRA, arXiv:2106.09685), as parameters.

A linear layer y = W x gets scale * B A x for each of its targets: a fused projection to query, key
and value has three, GPT-2's c_attn one. A is [rank, in]; B has the shape of its target's part of W
with `rank` in place of the inputs. Each routed expert has its own, so that A is [experts, rank,
in]. They are sharded as W is, and replicated where W is.

Targets are named as in peft, by the modules of Hugging Face's model.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from mtcli.core.config.lora import EXPERTS, is_chosen, layer_targets
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
    if not weight.matrices:
        return ()
    prefix = "shared_expert." if ".shared_expert." in weight.name else ""
    prefix = EXPERTS if weight.is_expert else prefix
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
    return tuple(target for target in available if is_chosen(target.name, lora.targets))


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
        experts = slice(int(weight.is_expert))
        adapter = partial(Parameter, layer=weight.layer, of_adapter=True, partial_over_tp=True)
        size, of_inputs = (*outer[experts], lora.rank, inputs), (None, input_axis)
        yield adapter(a, size, (*outer_axes[experts], *of_inputs), "adapter")
        yield adapter(b, (*shape, lora.rank), (*axes, None), "zeros")
