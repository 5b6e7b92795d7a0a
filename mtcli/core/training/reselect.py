"""Selects the run's core-set again every data.reselect_every steps, by the weights of that step.

The weights are those of the step's checkpoint, opened for forward passes on the run's ranks beside
the run's own. The new subset goes to RUN/subsets; a run that goes on reads it there, or, where the
run ended before it was written, selects from the same checkpoint. So a resumed run has the same
subsets, and the same losses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_name
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.subset import Subset, read_subset, write_subset
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.atomic_writes import make_folder
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.outputs import require_no_link
from mtcli.core.select.request import SelectRequest
from mtcli.core.select.selection import Console, select
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.run_folder import SUBSETS

# Of the layout, what an opened model takes over. Sequences are whole there: cp ranks read others.
KEPT = ("tp", "tp_mode", "tp_rows", "pp", "ep", "etp", "dispatcher")


def is_due(config: RunConfig, step: int) -> bool:
    """Whether a run selects again after so many steps; before it is trained it has data.subset."""
    every = config.data.reselect_every
    return every > 0 and 0 < step < config.train.steps and step % every == 0


def adopt_current(loader: MicroBatchLoader, config: RunConfig, runtime: Runtime, step: int) -> None:
    """Gives the loader the subset that holds after `step`: a file's, or selected now. Collective.

    The checkpoint of the step it was due at is there, where its file is not.
    """
    every = config.data.reselect_every
    if not every or step < every:
        return
    due = step // every * every
    path = Path(config.train.output) / SUBSETS / f"{step_name(due)}.json"
    world = loader.groups.world
    known = together(world, lambda: path.is_file())
    subset = together(world, lambda: read_subset(path)) if known else None
    if subset is None:
        subset = _selected(loader, config, runtime, due)
        together(world, lambda: _write(path, subset, world))
    loader.adopt(subset, due * config.batch.global_batch_size)


def _write(path: Path, subset: Subset, world: Axis) -> None:
    if world.rank == 0:
        make_folder(path.parent)
        require_no_link(path, "train.output")
        write_subset(path, subset)


def _selected(loader: MicroBatchLoader, config: RunConfig, runtime: Runtime, step: int) -> Subset:
    before = loader.subset
    assert before is not None, "a rule asks for data.subset"
    folder = Path(config.train.output) / CHECKPOINTS / step_name(step)
    request = SelectRequest(
        data=config.data.train,
        model=str(folder),
        overrides=tuple(_overrides(config)),
        fraction=None,
        size=len(before.indices),
        cover=None,
        method="craig",
        proxy=before.proxy or "gradient",
        target=(),
    )
    say = typer.echo if runtime.rank == 0 else lambda line: None
    return select(request, runtime, Console(say, _silent))


def _overrides(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    for name in KEPT:
        if (value := getattr(parallel, name)) != type(parallel).model_fields[name].default:
            yield f"parallel.{name}={value}"
    if parallel.stage_layers and parallel.vpp == 1:
        yield f"parallel.stage_layers={list(parallel.stage_layers)}"
    precision = config.train.precision
    yield f"train.precision={'bf16' if precision == 'fp8' else precision}"
    yield f"train.timeout={config.train.timeout}"
    yield f"batch.seq_len={config.batch.seq_len}"
    yield f"seed={config.seed}"
    yield f"data.split={'1,0,0' if config.data.valid else config.data.split}"


@contextmanager
def _silent(name: str, total: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None
