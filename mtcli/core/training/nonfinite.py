"""Finds the first value that is not finite: its module, rank, micro-batch and samples.

The step is run once more with hooks on every module's output and its gradient. Weights
have not moved and dropout is a function of its index, so the same value comes again; a step without
fault costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtcli.core.parallel.collectives import gather_values
from mtcli.core.training.compile import uncompiled
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.step import Trainer


class Finding(NamedTuple):
    """The first value on a rank that is not finite. The least of several ranks' came first."""

    phase: int  # 0 forward, 1 backward
    order: int  # of the op on its rank
    stage: int
    rank: int
    module: str
    micro_batch: int
    samples: str

    def __str__(self) -> str:
        what = "gradient" if self.phase else "output"
        return (
            f"the {what} of {self.module} on rank {self.rank}, micro-batch {self.micro_batch}, "
            f"{self.samples}"
        )


def first_nonfinite(trainer: Trainer, loader: MicroBatchLoader) -> str:
    """Names the first module whose output or gradient is not finite. Every rank calls it, or every
    rank of an asynchronous replica."""
    own_findings: list[Finding] = []
    pipeline = trainer.pipeline

    def report(phase: int, module: str) -> None:
        op = pipeline.current
        if own_findings or op is None:
            return
        ids = loader.sample_ids(trainer.step, op.micro_batch)
        where = ", ".join(f"{i.prefix} sequence {i.spans[0][0]}+{i.spans[0][1]}" for i in ids)
        order, rank = pipeline.ops.index(op), trainer.groups.rank
        own_findings.append(Finding(phase, order, op.stage, rank, module, op.micro_batch, where))

    with uncompiled(trainer.config.train.compile), _watched(trainer.stages, report):
        trainer.forward_backward(loader, as_written=True)
    axis = trainer.groups.replica if trainer.is_asynchronous else trainer.groups.world
    everyone = gather_values(own_findings[0] if own_findings else None, axis)
    findings = sorted(Finding(*fields) for fields in everyone if fields)
    return str(findings[0]) if findings else "the sum of gradients that are finite one by one"


@contextmanager
def _watched(stages: Mapping[int, nn.Module], report: Callable[[int, str], None]) -> Iterator[None]:
    handles = []
    for stage in stages.values():
        for name, module in stage.named_modules():
            handles.append(module.register_forward_hook(_look(name or "the stage", report)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(
    name: str, report: Callable[[int, str], None]
) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        for x in output if isinstance(output, tuple) else (output,):
            if isinstance(x, Tensor) and x.is_floating_point():
                look(x)

    def look(x: Tensor) -> None:
        if not _is_finite(x):
            report(0, name)
        if x.requires_grad:
            x.register_hook(lambda grad: None if _is_finite(grad) else report(1, name))

    return hook


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
