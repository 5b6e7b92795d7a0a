"""How many models an array takes, by the memory that this rank has left."""

from dataclasses import replace

import torch

from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import GPUS, HERE, Device
from mtcli.core.plan.memory import frozen_bytes, memory
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime
from mtcli.core.sweep.rules import trains_in_turn


def capacity(config: RunConfig, runtime: Runtime) -> int:
    """Counts the models that an array takes: as many as fit in this rank's memory, by estimates.

    It is at least 1, and 1 where `trains_in_turn`. All adapters of an array share one base.
    """
    if trains_in_turn(config, runtime.device.type):
        return 1
    device, work = _device(runtime), Workload.of(config, runtime.world)
    shared_bytes = device.reserved_bytes + frozen_bytes(work)
    model_bytes = memory(work, device).total - shared_bytes
    return max(1, int((device.usable_bytes - shared_bytes) / model_bytes))


def _device(runtime: Runtime) -> Device:
    """This rank's device as plans know it, with the memory that it has left."""
    if runtime.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(runtime.device)
        return replace(GPUS["h100"], memory_bytes=float(total), reserved_bytes=float(total - free))
    import psutil

    device = replace(HERE, memory_bytes=HERE.memory_bytes / runtime.local_world)
    left = psutil.virtual_memory().available / runtime.local_world
    return replace(device, memory_bytes=min(device.memory_bytes, left))
