"""Maps peft's modules of adapters to the targets of a weight.

peft has one A [rank, in] and one B [out, rank] for each module of a family's model. A module may
stand for several targets, which have adapters of their own here: Phi-3's qkv_proj, or experts'
gate_up_proj. Their As, one below the other, and a B of their blocks, zero elsewhere, are the same
adapters of that module, of as many times the rank. The other way round, each target takes the
module's A, and the module's B at its rows.

transformers 5 has the matrices of a layer's experts as one array, whose adapters peft flattens: A
[experts * rank, in] and B [out, rank * experts]. Before, each expert's matrix was a module.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.adapters import LoraTarget, targets_of
from mtcli.core.mesh.sharding import Box, Parameter

PREFIX = "base_model.model."
RankOf = Callable[[str, tuple[LoraTarget, ...]], int]  # the rank of a module, by name and targets
# Families in which peft 0.21 takes the names of dense layers' and shared experts' modules for those
# of routed experts, so that it has to find them as parameters.
MISREAD = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_moe")
OF_EXPERTS = {"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj"}


class PeftModule(NamedTuple):
    """A module of peft, or one of each expert: the boxes of its A and B.

    The boxes tile A [rank, in], or [experts, rank, in], and B in the shape of the weight with
    `rank` in the place of its inputs, of which it may have the rows of some targets alone.
    """

    name: str
    """in the family's model"""
    weight: Parameter
    targets: tuple[LoraTarget, ...]
    """whose rows it has"""
    rank: int
    a: tuple[StoredBox, ...]
    b: tuple[StoredBox, ...]
    is_array: bool = False
    """whether it is one array that holds all experts' matrices"""

    @property
    def shape_of_a(self) -> tuple[int, ...]:
        """The shape of A."""
        return (*self.weight.shape[: self.weight.is_expert], self.rank, self.weight.shape[-1])

    @property
    def shape_of_b(self) -> tuple[int, ...]:
        """The shape of B."""
        return (*self.weight.shape[:-1], self.rank)

    @property
    def suffix(self) -> str:
        """The name of its kind in every layer, with that of a shared or a routed expert."""
        *_, parent, name = self.name.split(".")
        if self.is_array:
            return ".".join(self.name.split(".")[-3:])
        return f"{parent}.{name}" if parent.startswith("shared_expert") else name


def as_parameter(family: Family, module: PeftModule) -> str:
    """Returns the name by which peft's `target_parameters` has a module; empty for one that
    `target_modules` has."""
    if module.is_array:
        return module.suffix
    parts = module.name.split(".")
    is_misread = family.model_type in MISREAD and parts[-1] in ("gate_proj", "up_proj", "down_proj")
    parent = "." + parts[-2] if parts[-2] != "mlp" else ""
    return f"mlp{parent}.{parts[-1]}.weight" if is_misread else ""


def box_of_target(target: LoraTarget, box: Box, first_column: int = 0) -> Box:
    """Moves a box of a target's B to its module's B, in which its columns start at
    `first_column`."""
    by = [0] * len(box.start)
    if target.dim is not None:
        by[target.dim] = target.first
    by[-1] += first_column
    return box.moved(tuple(by))


def modules_of(
    model: ModelConfig, family: Family, weight: Parameter, rank_of: RankOf, both: bool = True
) -> list[PeftModule]:
    """Returns the modules of a weight; none for one without targets. `both` says that both matrices
    of experts have adapters, whose tensors' names tell."""
    targets = targets_of(weight, model)
    if not targets:
        return []
    if weight.is_expert:
        return [_array(model, family, weight, rank_of, both)]
    boxes = family.boxes(weight, model)
    keys = list(dict.fromkeys(box.key for box in boxes))
    if len(keys) == 1:
        return [_module(weight, targets, boxes, rank_of)]
    if len(targets) != len(boxes):  # an encoder's with learned positions
        names = ", ".join(target.name for target in targets)
        message = f"{family.model_type} has {len(keys)} modules for {names}, whose adapters are one"
        raise wrong(message, "--merge-lora adds them to its weights")
    pairs = zip(targets, boxes, strict=True)
    return [_module(weight, (target,), [box], rank_of) for target, box in pairs]


def modules_of_experts(
    model: ModelConfig, family: Family, weight: Parameter, rank_of: RankOf
) -> list[PeftModule]:
    """Returns what a weight of experts has in adapters of transformers 4: for each target the
    modules of all experts; none where the family has no such modules."""
    targets, boxes = targets_of(weight, model), family.boxes(weight, model)
    if len(boxes) != len(targets) * weight.shape[0]:
        return []
    found = []
    for number, target in enumerate(targets):
        of_experts = boxes[number :: len(targets)]
        module = _module(weight, (target,), of_experts, rank_of)
        shape = (module.rank, weight.shape[-1])
        a = tuple(
            StoredBox(_key_of(box, "A").key, shape, (1, *shape), (0, 1, 2), (expert, 0, 0))
            for expert, box in enumerate(of_experts)
        )
        found.append(module._replace(a=a))
    return found


def _module(
    weight: Parameter,
    targets: tuple[LoraTarget, ...],
    boxes: Sequence[StoredBox],
    rank_of: RankOf,
) -> PeftModule:
    """A module whose weight is stored in some boxes, of one key unless they are experts'."""
    name = boxes[0].key.removesuffix(".weight")
    rank = rank_of(name, targets)
    shape = (rank, weight.shape[-1])
    a = StoredBox(_key_of(boxes[0], "A").key, shape, shape, (0, 1), (0, 0))
    b = tuple(_of_b(box, rank) for box in boxes)
    return PeftModule(name, weight, targets, rank, (a,), b)


def _key_of(box: StoredBox, side: str) -> StoredBox:
    return box._replace(key=f"{PREFIX}{box.key.removesuffix('.weight')}.lora_{side}.weight")


def _of_b(box: StoredBox, rank: int) -> StoredBox:
    """Maps B as a weight's box is mapped, with `rank` columns in the place of its inputs, and last:
    GPT-2's weights have their inputs first."""
    *axes, inputs = box.axes
    width = box.view[inputs]
    view = (*(size for dim, size in enumerate(box.view) if dim != inputs), rank)
    moved = (*(axis - (axis > inputs) for axis in axes), len(view) - 1)
    shape, first = (prod(box.shape) // width, rank), box.first // width * rank
    return _key_of(box, "B")._replace(
        shape=shape, view=view, axes=moved, start=(*box.start[:-1], 0), first=first
    )


def _array(
    model: ModelConfig, family: Family, weight: Parameter, rank_of: RankOf, both: bool
) -> PeftModule:
    """The module of an array of experts' matrices. Where both have adapters, peft wraps the first
    one's module in the second one's."""
    _, layer, _, module, matrix, _ = weight.name.split(".")
    name = f"{family.block.format(layer=layer)}mlp.{module}"
    key = PREFIX + name + (".base_layer" if both and matrix != "down" else "")
    targets, (experts, *outer, inputs) = targets_of(weight, model), weight.shape
    rank = rank_of(f"{name}.{OF_EXPERTS[matrix]}", targets)
    boxes = family.boxes(weight, model)
    order = list(range(len(outer)))  # our dimensions of an output, in the order of theirs
    if len(boxes) == 1:
        order = [axis - 1 for axis in boxes[0].order if 0 < axis <= len(outer)]
    view = tuple(outer[dim] for dim in order)
    a = StoredBox(
        f"{key}.lora_A.weight",
        (experts * rank, inputs),
        (experts, rank, inputs),
        (0, 1, 2),
        (0,) * 3,
    )
    ours = (len(view) + 1, *(order.index(dim) for dim in range(len(outer))), len(view))
    shape = (prod(outer), rank * experts)
    start = (0,) * len(weight.shape)
    b = StoredBox(f"{key}.lora_B.weight", shape, (*view, rank, experts), ours, start)
    return PeftModule(f"{name}.{OF_EXPERTS[matrix]}", weight, targets, rank, (a,), (b,), True)
