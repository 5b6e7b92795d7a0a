"""What a published result says of the seconds of a step, by the record's own FLOP convention.

The first of these that is printed counts: a time, tokens or samples per second, a rate in FLOP/s.
"""

import re
from collections.abc import Callable
from typing import Any

from mtcli.core.cost.conventions import convention_of
from mtcli.core.cost.hardware import Device
from mtcli.core.cost.predict import recomputed_share
from mtcli.core.cost.workload import Workload

Table = dict[str, Any]

STEPS_PER_EPOCH = 68507  # of arXiv:1909.08053, section 5.2, which prints days


def measured_seconds(row: Table, work: Workload, device: Device) -> float | None:
    """Seconds of a step, or of one block's passes where a record is of those; None where none are
    said.

    Raises ValueError for what is no positive number.
    """
    tokens, samples = work.global_batch_size * work.seq_len, work.global_batch_size
    world, result = work.layout.world, {k: v for k, v in row["result"].items() if v is not None}
    forms: dict[str, Callable[[float], float]] = {
        "iter_time_s": lambda seconds: seconds,
        "iter_time_ms": lambda milliseconds: milliseconds / 1e3,
        "fwd_bwd_ms": lambda milliseconds: milliseconds / 1e3,
        "days_per_epoch": lambda days: days * 86400 / STEPS_PER_EPOCH,
        "tokens_per_s_per_gpu": lambda rate: tokens / rate / world,
        "tokens_per_s": lambda rate: tokens / rate,
        "samples_s": lambda rate: samples / rate,
    }
    for name, seconds in forms.items():
        if name in result:
            return seconds(_positive(name, result[name]))
    token = _token_seconds(row, result, work, device)
    return tokens * token / world if token else None


def _token_seconds(row: Table, result: Table, work: Workload, device: Device) -> float | None:
    """Seconds of a token on one GPU, from a rate per GPU."""
    words = row.get("flop_convention") or ""
    convention = convention_of(words, work.recompute == "full")
    flops = convention.token_flops(work.model, work.seq_len)
    baseline = re.search(r"(\d+) TFLOP/s baseline", words)
    peak = float(result.get("mfu_peak_tflops") or device.peak(work.sizes.gemm) / 1e12)
    units = {
        "tflops_per_gpu": 1.0,
        "pflops_total": 1e3 / work.layout.world,
        "scaling_efficiency": float(baseline[1]) if baseline else None,
        "mfu": peak,
        "hfu": peak * 3 / (3 + recomputed_share(work)),
    }
    for name in {"mfu", "hfu"} & set(result):
        if _positive(name, result[name]) > 1:
            raise ValueError(f"{name}={result[name]} is more than the peak: give a share of 1")
    for name, tera in units.items():
        if name in result and tera:
            return flops / (_positive(name, result[name]) * tera * 1e12)
    return None


def _positive(name: str, printed: object) -> float:
    number = float(str(printed))
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}={printed} is no positive number")
    return number
