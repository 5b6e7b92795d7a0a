"""Selects a run's core-set again, by the weights of one of its checkpoints.

The run's ranks open these weights for forward passes, in addition to the weights that they train.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import typer

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_name
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.subset import Subset
from mtcli.core.runtime.launch import Runtime
from mtcli.core.select.proxies import Proxy
from mtcli.core.select.request import SelectRequest
from mtcli.core.select.selection import Console, select

# Fields of the layout that the opened model takes over; cp ranks become data ranks.
KEPT = ("tp", "tp_mode", "tp_rows", "pp", "ep", "etp", "dispatcher")


def select_again(config: RunConfig, runtime: Runtime, subset: Subset, step: int) -> Subset:
    """Selects as many sequences as a subset has, by the run's checkpoint of a step. Collective."""
    folder = Path(config.train.output) / CHECKPOINTS / step_name(step)
    request = SelectRequest(
        data=config.data.train,
        model=str(folder),
        overrides=tuple(_overrides(config)),
        fraction=None,
        size=len(subset.indices),
        cover=None,
        method="craig",
        proxy=cast(Proxy, subset.proxy or "gradient"),
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
