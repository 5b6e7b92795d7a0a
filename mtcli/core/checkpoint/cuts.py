"""Which rectangles of which tensors each rank of a layout saves."""

from typing import NamedTuple

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.names import parameter_of
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters, stage_layers, stage_parameters
from mtcli.core.spec.model_config import ModelConfig
from mtcli.core.spec.sharding import Parameter, Rectangle


class Cut(NamedTuple):
    """A rectangle of a tensor, for one rank."""

    name: str
    box: Rectangle


def cuts_of(
    checkpoint: Checkpoint, names: list[str], config: RunConfig, world: int
) -> list[list[Cut]]:
    """For each rank, the cuts that it saves of some tensors of a checkpoint.

    Optimizer state is cut like its parameter. A tensor that belongs to no parameter is whole, on
    rank 0. Together the cuts tile every tensor once; some ranks may have none.
    """
    layout = ParallelLayout.of(config.parallel, world)
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(parameter_of(name), []).append(name)
    table = parameters(config.model)
    ranks = []
    for rank in range(world):
        owned = _owned(config.model, layout, config.parallel.stage_layers, rank)
        ranks.append(
            [Cut(n, p.rectangle(layout, rank)) for p in owned for n in wanted.get(p.name, [])]
        )
    for name in names:
        if parameter_of(name) not in table:
            shape = checkpoint.shape(name)
            ranks[0].append(Cut(name, Rectangle((0,) * len(shape), shape)))
    return ranks


def _owned(
    model: ModelConfig, layout: ParallelLayout, given: tuple[int, ...], rank: int
) -> list[Parameter]:
    """The parameters that a rank saves: those of its stages, once among its replicas."""
    layers, last = stage_layers(model, layout, given), layout.num_stages - 1
    found = []
    for stage in layout.stages(layout.place(rank)["pp"]):
        for parameter in stage_parameters(model, layers[stage], stage == 0, stage == last):
            is_copy = parameter.owner == "first" and stage != 0  # a tied embedding at the end
            if not is_copy and parameter.is_primary(layout, rank):
                found.append(parameter)
    return found
