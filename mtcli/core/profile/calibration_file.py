"""Reads what `mtcli calibrate` measured of a device, and puts it in the place of the datasheet's
rates and the fitted shares."""

import json
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.calibration import Calibration, Rate
from mtcli.core.plan.gpu_time import BLOCK_CALLS, BLOCK_KERNELS, attention_rate, gemm_seconds
from mtcli.core.plan.hardware import Device, Link
from mtcli.core.plan.physics import Physics
from mtcli.core.plan.workload import Workload

Count = Annotated[int, Field(gt=0)]
SENDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times round a ring


class TimedGemm(NamedTuple):
    """Seconds of a product [m, k] @ [k, n]."""

    m: Count
    n: Count
    k: Count
    seconds: Rate


class TimedCollective(NamedTuple):
    """Seconds of a collective whose global tensor has some bytes."""

    kind: str
    moved: Count
    seconds: Rate


@dataclass(frozen=True)
class DeviceRates:
    """What `mtcli calibrate` measured: of one rank, and of collectives of all."""

    device: str  # a name of `plan --device`; empty for a GPU that has none
    precision: str
    gemms: list[TimedGemm]
    copy: Rate  # bytes/s that a copy reads and writes
    attention: Rate  # FLOP/s of causal attention, forward and backward, masked scores left out
    call: Rate  # seconds of the host for an operation on a CPU's tensor
    launch: Annotated[float, Field(ge=0.0)]  # more of them for one on a GPU's
    ranks: Count
    nodes: Count
    collectives: list[TimedCollective]
    element: Rate = 1e-9  # of a CPU; see Calibration
    socket: Rate = 1e9
    widens: bool = False


_MEASURED = TypeAdapter(DeviceRates)


def measured_device(device: Device, path: str) -> Device:
    """The device with the rates in a file of `mtcli calibrate`.

    Raises MtcliError where the file holds none, or those of another device.
    """
    try:
        found = _MEASURED.validate_python(json.loads(read_untrusted(path)))
    except (OSError, ValueError):
        hint = "a file that `mtcli calibrate --output FILE` wrote"
        raise wrong(f"{path} holds no calibration", hint, "--calibration") from None
    if found.device not in ("", device.name.partition(",")[0]):
        said = f"{path} was measured on {found.device}, and the plan is for {device.name}"
        raise wrong(said, f"--device {found.device}", "--calibration")
    if device.name == "cpu":
        flops = max(2.0 * one.m * one.n * one.k / one.seconds for one in found.gemms)
        more = found.element, found.call, found.socket, found.widens
        return replace(device, measured=Calibration(flops, found.copy, *more))
    return replace(_linked(device, found), physics=_shares(device, found), rates="calibration")


def _shares(device: Device, found: DeviceRates) -> Physics:
    """The shares of a GPU's rates and the host's seconds that were measured."""
    sizes = dict.fromkeys(
        ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len"), 1
    )
    model = ModelConfig.model_validate(sizes)  # any: GEMMs ask for the precision alone
    work = Workload(model, ParallelLayout(1), 1, 1, 1, precision=found.precision)
    memory = found.copy / device.memory_bandwidth
    full = replace(
        device, physics=replace(device.physics, gemm=1.0, narrow_gemm=1.0, memory=memory)
    )
    shares = [gemm_seconds((g.m, g.n, g.k), work, full) / g.seconds for g in found.gemms]
    launches = found.launch * BLOCK_KERNELS / BLOCK_CALLS
    return replace(
        device.physics,
        gemm=median(shares),
        memory=memory,
        attention=found.attention / attention_rate(work, device),
        call=found.call + launches,
    )


def _linked(device: Device, found: DeviceRates) -> Device:
    """The device with the link that the collectives crossed: between the two largest of a kind
    time grows with bytes, and the smallest is latency."""
    rates, latencies = [], []
    for kind, rounds in SENDS.items():
        sizes = sorted(one for one in found.collectives if one.kind == kind)
        if len(sizes) < 2 or sizes[-1].seconds <= sizes[-2].seconds:
            continue
        sent = rounds * (sizes[-1].moved - sizes[-2].moved) * (found.ranks - 1) / found.ranks
        rates.append(sent / (sizes[-1].seconds - sizes[-2].seconds))
        latencies.append(sizes[0].seconds / (rounds * (found.ranks - 1)))
    if not rates:
        return device
    inside = found.ranks // found.nodes
    if found.nodes == 1:
        return replace(device, link=Link(median(rates) / device.physics.link, min(latencies)))
    rate = median(rates) / inside / device.physics.network
    return replace(device, network=Link(rate, min(latencies)))
