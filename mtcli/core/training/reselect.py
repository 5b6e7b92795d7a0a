"""Selects the run's core-set again every data.reselect_every steps, by the weights of that step.

The weights are those of the step's checkpoint; the command passes the function that selects. The
new subset goes to RUN/subsets, where a resumed run reads it; without the file, a resumed run
selects by the same checkpoint. So it has the same subsets, and the same losses.
"""

from collections.abc import Callable
from pathlib import Path

from mtcli.core.checkpoint.folder import step_name
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.subset import Subset, read_subset, write_subset
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.atomic_writes import make_folder
from mtcli.core.runtime.outputs import require_no_link
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.run_folder import SUBSETS

# Selects as many sequences as a subset has, by the checkpoint of a step. Collective.
Reselect = Callable[[Subset, int], Subset]


def is_due(config: RunConfig, step: int) -> bool:
    """Whether a run selects again after `step` steps; its first subset is data.subset."""
    period = config.data.reselect_every
    return period > 0 and 0 < step < config.train.steps and step % period == 0


def adopt_current(
    loader: MicroBatchLoader, config: RunConfig, reselect: Reselect | None, step: int
) -> None:
    """Gives the loader the subset in force after `step`: a file's, or selected now. Collective.

    Where the file is missing, the checkpoint of the step at which it was due exists.
    """
    period = config.data.reselect_every
    if not period or step < period:
        return
    due = step // period * period
    path = Path(config.train.output) / SUBSETS / f"{step_name(due)}.json"
    world = loader.groups.world
    is_written = together(world, lambda: path.is_file())
    subset = together(world, lambda: read_subset(path)) if is_written else None
    if subset is None:
        assert reselect and loader.subset, "the command and a rule of the config see to these"
        subset = reselect(loader.subset, due)
        together(world, lambda: _write(path, subset, world))
    loader.adopt(subset, due * config.batch.global_batch_size)


def _write(path: Path, subset: Subset, world: Axis) -> None:
    if world.rank == 0:
        make_folder(path.parent)
        require_no_link(path, "train.output")
        write_subset(path, subset)
