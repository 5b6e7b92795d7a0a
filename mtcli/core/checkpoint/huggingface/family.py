"""Describes a Hugging Face family as data: the names of its config's fields and of its tensors.

A family has `Field`s that are read and written, constants, required values of fields that we cannot
represent otherwise, and for each of our parameters a rule that maps Hugging Face tensors to boxes
of the parameter: a part, a reshape, a permutation and a start. Reading and writing use the same
rules.

Shapes: K key-value heads, Q query heads per key-value head, D head_dim, H hidden, F inner width, E
experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import Parameter

Table = dict[str, Any]
TensorRule = Callable[[Parameter, ModelConfig], list[StoredBox]]


class Field(NamedTuple):
    """A field of ModelConfig and its name in config.json.

    `default` replaces a value that is null or missing, also in the family's `defaults`; None stands
    for ModelConfig's own default. `values` translates their values to ours; of several with one
    translation, the first is written.
    """

    ours: str
    theirs: str
    default: Any = None
    values: Mapping[str, str] | None = None
    written: str = ""  # a property of ModelConfig, where `ours` may be None


class RequiredValue(NamedTuple):
    """A field of config.json and its supported values; others have no counterpart here.

    The first value is written, unless it is absent (None).
    """

    theirs: str
    values: tuple[Any, ...]


class WindowRule(NamedTuple):
    """Which layers have the window of a family's config.json (`window.py`)."""

    pattern: Callable[[Table], str]
    """their letters, L or G each, where it has no `layer_types`"""
    switched: bool = False
    """only where `use_sliding_window` is true"""
    by_layer: bool = False
    """`layer_types` may say which layers; else all have the window, or none"""
    doubled: str = ""
    """the field that has, in place of `sliding_window`, twice the tokens on either side"""


@dataclass(frozen=True)
class Family:
    """A Hugging Face model type, with one of its heads."""

    model_type: str
    architecture: str
    """the class that transformers loads"""
    base: str
    """the prefix of all tensors but the head, which some published folders leave out"""
    block: str
    """the prefix of a layer's tensors, with {layer}"""
    fields: tuple[Field, ...]
    defaults: Mapping[str, Any]
    """fields of config.json that have these values where it leaves them out, as in transformers"""
    constants: Mapping[str, Any]
    """fields of ModelConfig that have one value in this family"""
    required: tuple[RequiredValue, ...]
    outer: Mapping[str, TensorRule]
    """rules of parameters outside the blocks"""
    inner: Mapping[str, TensorRule]
    """rules of parameters inside a block"""
    ignored: tuple[str, ...]
    """regular expressions of buffers that carry nothing, and of layers, after {num_layers}, that
    training and evaluation do not use"""
    read_more: Callable[[Table], Table]
    """more fields of ModelConfig from config.json"""
    write_more: Callable[[ModelConfig], Table]
    """more fields of config.json"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """fields of config.json by the other name that transformers has for them (attribute_map)"""
    window: WindowRule | None = None
    """how it says which layers have a window; None: it has none"""
    supports: tuple[str, ...] = ()
    """fields that `read_more` reads, and the other families refuse"""
    tied_head: str = "lm_head.weight"
    """what some folders call a copy of the embedding that the head shares"""
    told_by: str = ""
    """a tensor that says it is this head, where published folders name another class"""
    older_names: tuple[tuple[str, str], ...] = ()
    """endings of tensors' names in old folders, and what they are now"""
    packed: Mapping[str, TensorRule] = field(default_factory=dict)
    """rules of parameters inside a block whose tensors may be MXFP4 (`mxfp4.py`), of the decoded
    tensors"""

    def boxes(self, parameter: Parameter, model: ModelConfig) -> list[StoredBox]:
        """Returns the Hugging Face tensors of a parameter, without their files."""
        if not parameter.name.startswith("blocks."):
            return self.outer[parameter.name](parameter, model)
        return self._of_layer(self.inner, parameter, model)

    def packed_boxes(self, parameter: Parameter, model: ModelConfig) -> list[StoredBox]:
        """Returns the decoded tensors of a parameter that may be MXFP4, or none."""
        _, _, name = (*parameter.name.split(".", 2), "", "")[:3]
        return self._of_layer(self.packed, parameter, model) if name in self.packed else []

    def _of_layer(
        self, rules: Mapping[str, TensorRule], parameter: Parameter, model: ModelConfig
    ) -> list[StoredBox]:
        _, layer, name = parameter.name.split(".", 2)
        prefix = self.block.format(layer=layer)
        return [box._replace(key=prefix + box.key) for box in rules[name](parameter, model)]


def nothing_written(_: ModelConfig) -> Table:
    """Returns no further fields of config.json."""
    return {}


def same(name: str) -> TensorRule:
    """Maps a tensor to one with another name."""
    return stacked(name)


def flattened(name: str) -> TensorRule:
    """Maps a tensor that is stored as a vector, such as a norm of all heads [K, Q, D]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        return [_in_order(name, (parameter.numel,), parameter.shape)]

    return rule


def transposed(name: str) -> TensorRule:
    """Maps GPT-2's Conv1D: ours [out, in] is stored as [in, out]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        out, into = parameter.shape
        return [StoredBox(name, (into, out), (into, out), (1, 0), (0, 0))]

    return rule


def joined_qkv(name: str) -> TensorRule:
    """Maps GPT-2's c_attn: ours [K, 3, D, H] is stored as [H, 3 * K * D], its bias as [3 * K * D].

    Without grouped queries Q is 1, so ours holds query, key and value of each head in turn.
    """

    def rule(parameter: Parameter, model: ModelConfig) -> list[StoredBox]:
        heads, _, dim, *hidden = parameter.shape
        view = (*hidden, 3, heads, dim)
        axes = (2, 1, 3, 0) if hidden else (1, 0, 2)
        shape = (*hidden, 3 * heads * dim)
        return [StoredBox(name, shape, view, axes, (0,) * len(view))]

    return rule


def separate_qkv(template: str, names: Sequence[str] = "qkv") -> TensorRule:
    """Maps Llama's q_proj, k_proj and v_proj: ours [K, Q + 2, D, H] is stored as three of [heads *
    D, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        groups, slots, dim, *hidden = parameter.shape
        boxes = []
        firsts, counts = (0, slots - 2, slots - 1), (slots - 2, 1, 1)
        for name, first, count in zip(names, firsts, counts, strict=True):
            view = (groups, count, dim, *hidden)
            shape = (groups * count * dim, *hidden)
            boxes.append(_in_order(template.format(name), shape, view, (0, first)))
        return boxes

    return rule


def joined(name: str) -> TensorRule:
    """Maps a tensor whose rows are ours in our order: GPT-NeoX's query_key_value [K * (Q + 2) * D,
    H], its bias, and Phi-3's gate_up_proj [2 * F, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        inner = () if parameter.name.endswith(".bias") else parameter.shape[-1:]
        rows = prod(parameter.shape) // prod(inner)
        return [_in_order(name, (rows, *inner), parameter.shape)]

    return rule


def queries_keys_values(name: str) -> TensorRule:
    """Maps Phi-3's qkv_proj, whose rows are all queries, all keys and all values."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        groups, slots, dim, *hidden = parameter.shape
        shape, boxes, first = (groups * slots * dim, *hidden), [], 0
        for slot, count in ((0, slots - 2), (slots - 2, 1), (slots - 1, 1)):
            view = (groups, count, dim, *hidden)
            boxes.append(_in_order(name, shape, view, (0, slot))._replace(first=first))
            first += prod(view)
        return boxes

    return rule


def stacked(*names: str) -> TensorRule:
    """Maps one tensor per name, and per {expert} or {head}, that ours stacks.

    Llama's gate_proj and up_proj [F, H] are our [2, F, H], and those of experts our [E, 2, F, H].
    """
    numbered, several = any(x in names[0] for x in ("{expert}", "{head}")), len(names) > 1

    def rule(parameter: Parameter, _: ModelConfig) -> list[StoredBox]:
        dims = numbered + several
        shape, boxes = parameter.shape[dims:], []
        for index in product(*map(range, parameter.shape[:dims])):
            name = names[index[-1] if several else 0]
            key = name.format(expert=index[0], head=index[0]) if numbered else name
            boxes.append(_in_order(key, shape, (1,) * dims + shape, index))
        return boxes

    return rule


def gated_mlp(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, TensorRule]:
    """Maps the three weights of a gated MLP, or of each {expert}."""
    return {
        f"{ours}.gate_up.weight": stacked(f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"),
        f"{ours}.down.weight": stacked(f"{theirs}.{down}.weight"),
    }


def _in_order(
    key: str, shape: tuple[int, ...], view: tuple[int, ...], first: tuple[int, ...] = ()
) -> StoredBox:
    """Maps a tensor whose dimensions are in our order; the box starts at `first`, and at 0 in
    further dimensions."""
    start = first + (0,) * (len(view) - len(first))
    return StoredBox(key, shape, view, tuple(range(len(view))), start)
