"""G0: what the device can do, measured in the same run: every row is also given as a part of it."""

from time import perf_counter
from typing import Any

import torch
from harness import floors, milliseconds

SIDE = 8192


def ceilings(device: torch.device) -> dict[str, Any]:
    """The device's name, bytes/s of a copy, FLOP/s of products in bfloat16 and, if any, fp8."""
    if device.type == "cpu":
        return {"device": "cpu", **_small()}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), **floors(3)}
    found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    if torch.cuda.get_device_capability(device) >= (8, 9):
        try:
            found["fp8_flop_per_s"] = _fp8(device)
        except RuntimeError as error:  # a build of torch without such products
            found["fp8_failed"] = str(error).splitlines()[0]
    return found


def _fp8(device: torch.device) -> float:
    """A product of rowwise scaled e4m3, the second operand column by column as it has to be."""
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(SIDE, 1, device=device), torch.ones(1, SIDE, device=device)
    product = milliseconds(
        lambda: torch._scaled_mm(a, b.T, rows, columns, out_dtype=torch.bfloat16), 3
    )
    return 2 * SIDE**3 / product * 1e3


def _small() -> dict[str, float]:
    """The same of a CPU, roughly: the best of three."""
    x, a = torch.randn(2**22), torch.randn(512, 512)
    y = torch.empty_like(x)
    copy = min(_seconds(lambda: y.copy_(x)) for _ in range(3))
    product = min(_seconds(lambda: a @ a) for _ in range(3))
    return {"copy_bytes_per_s": 2 * x.nbytes / copy, "flop_per_s": 2 * 512**3 / product}


def _seconds(work: Any) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin
