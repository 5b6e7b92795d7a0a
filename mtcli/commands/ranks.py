"""Starts the ranks of commands that compute, under any launcher."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mtcli.core.config.errors import wrong

if TYPE_CHECKING:
    from mtcli.core.config.model import ModelConfig
    from mtcli.core.config.schema import TrainConfig
    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.runtime.worker_errors import GoesOn

Result = TypeVar("Result")


def num_ranks(nproc: int) -> int:
    """The world size: that of the launcher, else --nproc.

    Raises MtcliError where another launcher has set one and --nproc differs.
    """
    from mtcli.core.runtime.launch import environment_world
    from mtcli.core.runtime.worker_errors import LAUNCHED

    world = environment_world()
    if world is None:
        return nproc
    if nproc > 1 and LAUNCHED not in os.environ:
        message = f"{nproc} workers are asked for in one of {world} ranks that a launcher started"
        raise wrong(
            message, "leave --nproc out: torchrun, srun and others start the ranks", "--nproc"
        )
    return world


def run_ranks(
    nproc: int,
    train: "TrainConfig",
    work: "Callable[[Runtime], Result]",
    max_restarts: int = 0,
    goes_on: "GoesOn | None" = None,
) -> Result | None:
    """Runs `work(runtime)` and returns this rank's result. In a process without a launcher, and
    with several ranks or restarts, runs the same command line in `nproc` workers and returns None
    when they are done.

    `goes_on` returns the hint after a rank's fault; by default to run the command again.
    """
    from mtcli.core.runtime.launch import bring_up, environment_world, keep_freed_blocks, launch
    from mtcli.core.runtime.worker_errors import again

    goes_on = goes_on or again
    if environment_world() is None:
        if nproc > 1 or max_restarts:
            launch(nproc, sys.argv[1:], max_restarts, goes_on)
            return None
        keep_freed_blocks()
    settings = train.matmul, train.debug_collectives, train.cuda_graphs, goes_on
    with bring_up(train.device, train.timeout, *settings) as runtime:
        return work(runtime)


def require_model(
    checkpoint: str,
    overrides: list[str],
    world: int,
    encoders: bool = False,
    base: str | None = None,
    weights: str | None = None,
) -> "ModelConfig | None":
    """A checkpoint's model, if the path tells it. `base` is the new folder of weights under
    adapters, `weights` the dtype that weights are kept in.

    Raises MtcliError, before torch is imported, where a path has no checkpoint, or one whose model
    `world` ranks cannot open with these overrides; for a model that predicts no next token, unless
    `encoders`; and for config sections that no forward pass reads.
    """
    from mtcli.core.checkpoint.folder import find_checkpoints, model_of
    from mtcli.core.config.rules import (
        forward_config,
        require_causal,
        require_forward,
        require_stored,
    )

    model = model_of(find_checkpoints([checkpoint], base)[0])
    if model is None:
        return None
    if not (encoders and model.head != "lm"):
        require_causal(checkpoint, model)
    require_stored(weights, forward_config(model, overrides, world), "cpu")
    require_forward(overrides)
    return model
