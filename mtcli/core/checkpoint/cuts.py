"""Which rectangles of which tensors each rank of a layout saves."""

from typing import NamedTuple

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.names import is_optimizer, parameter_of
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import parameters, stage_layers, stage_parameters
from mtcli.core.spec.owning import answers_for, owner_axes, rows_on
from mtcli.core.spec.sharding import Parameter, Rectangle


class Cut(NamedTuple):
    """A rectangle of a tensor, for one rank."""

    name: str
    box: Rectangle


def cuts_of(
    checkpoint: Checkpoint, names: list[str], config: RunConfig, world: int
) -> list[list[Cut]]:
    """For each rank, the cuts that it saves of some tensors of a checkpoint.

    Optimizer state is cut like its parameter, with zero = 1 over data ranks too, and with zero = 3
    so are weights. A tensor that belongs to no parameter is whole, on rank 0. Together the cuts
    tile every tensor once; some ranks may have none.
    """
    layout = ParallelLayout.of(config.parallel, world)
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(parameter_of(name), []).append(name)
    table = parameters(config.model)
    ranks: list[list[Cut]] = []
    for rank in range(world):
        ranks.append([])
        for parameter in _held(config, layout, rank):
            whole, rows = _boxes(parameter, config, layout, rank)
            for name in wanted.get(parameter.name, []):
                is_cut = is_optimizer(name) or config.parallel.zero == 3
                ranks[-1] += [Cut(name, box) for box in (rows if is_cut else whole)]
    for name in names:
        if parameter_of(name) not in table:
            shape = checkpoint.shape(name)
            ranks[0].append(Cut(name, Rectangle((0,) * len(shape), shape)))
    return ranks


def _boxes(
    parameter: Parameter, config: RunConfig, layout: ParallelLayout, rank: int
) -> tuple[list[Rectangle], list[Rectangle]]:
    """What a rank saves of a parameter, and of what the optimizer's owners cut like it."""
    whole = [parameter.rectangle(layout, rank)] if parameter.is_primary(layout, rank) else []
    if not config.parallel.zero:
        return whole, whole
    owners = owner_axes(parameter, layout, config.parallel.sequence_parallel)
    if not answers_for(parameter, layout, rank, owners):
        return whole, []
    rows = rows_on(parameter, layout, rank, owners)
    return whole, [block.box for block in parameter.blocks(layout, rank, rows)]


def _held(config: RunConfig, layout: ParallelLayout, rank: int) -> list[Parameter]:
    """The parameters of a rank's stages that it may save: a tied embedding on the first alone."""
    layers = stage_layers(config.model, layout, config.parallel.stage_layers)
    last = layout.num_stages - 1
    return [
        parameter
        for stage in layout.stages(layout.place(rank)["pp"])
        for parameter in stage_parameters(config.model, layers[stage], stage == 0, stage == last)
        if parameter.owner != "first" or stage == 0
    ]
