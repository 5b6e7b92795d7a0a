"""What a Hugging Face family says: how its config's fields and its tensors are named.

A family is data: `Field`s that are read and written, constants, demands on what cannot be
represented, and for each of our parameters a rule that gives its Hugging Face tensors as rectangles
of it (`Part`). Reading and writing use the same rules in both directions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import Box, Parameter

Table = dict[str, Any]


class Part(NamedTuple):
    """A Hugging Face tensor as a rectangle of one of our parameters.

    The tensor `name` of `shape`, seen as shape `view`, has its dimensions reordered so that
    dimension d of the rectangle is dimension axes[d] of the view. The rectangle starts at `start`.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The rectangle of our parameter."""
        return self.box_of(Box((0,) * len(self.view), self.view))

    def box_of(self, part: Box) -> Box:
        """The rectangle of our parameter that is a rectangle of the view."""
        size = tuple(part.size[axis] for axis in self.axes)
        return Box(tuple(part.start[axis] for axis in self.axes), size).moved(self.start)


TensorRule = Callable[[Parameter, ModelConfig], list[Part]]


class Field(NamedTuple):
    """A field of ModelConfig and its name in config.json.

    Where config.json leaves it out it is `default`, or ModelConfig's own where that is None.
    `values` translates names, theirs to ours; the first of equal ones is written.
    """

    ours: str
    theirs: str
    default: Any = None
    values: Mapping[str, str] | None = None


class RequiredValue(NamedTuple):
    """A field of config.json that must have one of some values, since we have no other.

    The first value is written, unless it is absent (None).
    """

    theirs: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Family:
    """A Hugging Face model type."""

    model_type: str
    architecture: str
    """the class that transformers loads"""
    base: str
    """the prefix of all tensors but the head, which some published folders leave out"""
    block: str
    """the prefix of a layer's tensors, with {layer}"""
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    """fields of ModelConfig that have one value in this family"""
    demands: tuple[RequiredValue, ...]
    outer: Mapping[str, TensorRule]
    """rules of parameters outside the blocks"""
    inner: Mapping[str, TensorRule]
    """rules of parameters inside a block"""
    ignored: tuple[str, ...]
    """regular expressions of buffers that carry nothing"""
    read_more: Callable[[Table], Table]
    """more fields of ModelConfig from config.json"""
    write_more: Callable[[ModelConfig], Table]
    """more fields of config.json"""

    def parts(self, parameter: Parameter, model: ModelConfig) -> list[Part]:
        """The Hugging Face tensors of a parameter."""
        if not parameter.name.startswith("blocks."):
            return self.outer[parameter.name](parameter, model)
        _, layer, name = parameter.name.split(".", 2)
        prefix = self.block.format(layer=layer)
        found = self.inner[name](parameter, model)
        return [part._replace(name=prefix + part.name) for part in found]


def nothing_written(_: ModelConfig) -> Table:
    """No more fields than the table's."""
    return {}
