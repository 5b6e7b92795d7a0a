"""Gives the range of a predicted step time: measured / predicted times of 8 of 10 further runs.

Runs are grouped by what most separates their errors: the narrowest format that the GPU multiplies
(its generation), whether it is used, and whether the model is a mixture of experts. Each run in a
range was predicted with constants fitted on other sources (`benchmarks/fit_physics.py --ranges`).
"""

from typing import NamedTuple

from mtcli.core.plan.hardware import Device
from mtcli.core.plan.predict import Prediction
from mtcli.core.plan.workload import Workload

SHARE = 0.8  # of the runs, inside of a range


class Spread(NamedTuple):
    """The lowest and highest of seconds, or of measured / predicted, over `runs` runs."""

    low: float
    high: float
    runs: int


RANGES = {
    "dense models on GPUs without fp8": Spread(0.804, 1.091, 939),
    "dense models on GPUs that have fp8, used or not": Spread(0.796, 1.663, 58),
    "dense models in fp8 or nvfp4 on GPUs that have both": Spread(0.843, 1.210, 42),
    "mixtures on GPUs that have fp8, used or not": Spread(0.748, 1.193, 51),
    "mixtures in fp8 or nvfp4 on GPUs that have both": Spread(0.605, 1.461, 47),
    "models in 16 bits on GPUs that have fp8 and nvfp4": Spread(0.681, 1.343, 25),
}


def kind_of(work: Workload, device: Device) -> str:
    """The kind of a run: a key of RANGES, unless few or no published runs are of that kind."""
    model = "mixtures" if work.model.num_experts else "dense models"
    if "nvfp4" not in device.flops:
        generation = "that have fp8, used or not" if "fp8" in device.flops else "without fp8"
        return f"{model} on GPUs {generation}"
    if work.precision in ("bf16", "fp16"):
        return "models in 16 bits on GPUs that have fp8 and nvfp4"
    return f"{model} in fp8 or nvfp4 on GPUs that have both"


def step_range(p: Prediction) -> Spread | None:
    """The seconds between which a predicted step lies, and the number of runs behind it. None for
    this machine's CPU, and for a kind without published runs."""
    spread = None if p.device.name == "cpu" else RANGES.get(kind_of(p.work, p.device))
    if spread is None:
        return None
    return spread._replace(low=p.step_seconds * spread.low, high=p.step_seconds * spread.high)
