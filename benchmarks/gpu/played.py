"""A GPU that is played by a CPU, to rehearse the benchmark of kernels from end to end.

Kernels are interpreted, a pass is timed once by the clock, and choices are of the device "cpu": of
a kernel's configurations the one of the largest tile, which is the quickest to interpret.
What it writes shows that the scripts run, and nothing of any device.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from time import perf_counter
from typing import Any
from unittest.mock import patch

import harness
import torch
from ceilings import ceilings

from mtcli.kernels import autotune
from mtcli.kernels.triton_launch import interpreted


@contextmanager
def played_gpu() -> Iterator[None]:
    """Inside, this CPU answers what the benchmark of kernels asks a GPU for."""
    cpu = torch.device("cpu")
    floors = {name: value for name, value in ceilings(cpu).items() if name != "device"}
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "get_device_name", lambda device=None: "cpu"),
        (torch.cuda, "Stream", lambda: None),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch, "compile", lambda function: function),
        (harness, "floors", lambda repeats: floors),
        (harness, "milliseconds", lambda step, repeats: _milliseconds(step)),
        (autotune, "_milliseconds", lambda launch, config: 1.0 / prod(config.values())),
    ]
    with ExitStack() as stack:
        stack.enter_context(interpreted())
        for module, name, answer in answers:
            stack.enter_context(patch.object(module, name, answer))
        yield


def _milliseconds(step: Callable[[], Any]) -> float:
    begin = perf_counter()
    step()
    return (perf_counter() - begin) * 1e3
