"""`mtcli calibrate`: what does this device reach? Writes a file that `plan --calibration` reads."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import ComputeDevice, JsonOut, Nproc
from mtcli.commands.output import answer, answering, echo, print_facts, say_wrote
from mtcli.commands.ranks import num_ranks, run_ranks

if TYPE_CHECKING:
    from mtcli.core.runtime.launch import Runtime

Output = Annotated[
    str, typer.Option("--output", metavar="FILE", help="the file for `plan --calibration`")
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option("--precision", help="of the GEMMs", show_default="bf16 on a GPU, fp32 on a CPU"),
]


@answering
def calibrate(
    output: Output,
    device: ComputeDevice = "auto",
    precision: Dtype = None,
    nproc: Nproc = 1,
    json_out: JsonOut = None,
) -> None:
    """Measure a device for plans: GEMMs, copy, attention, links of several ranks; host time."""
    from mtcli.core.config.schema import TrainConfig
    from mtcli.core.runtime.outputs import require_writable

    require_writable(output, "--output")
    num_ranks(nproc)

    def work(runtime: "Runtime") -> None:
        from mtcli.core.profile.device_rates import measure_device
        from mtcli.core.runtime.atomic_writes import aside

        kind = runtime.device.type
        chosen = precision or ("fp32" if kind == "cpu" else "bf16")
        if runtime.rank == 0:
            ranks = f"{runtime.world} rank{'s' * (runtime.world > 1)}"
            echo(f"measuring this {kind} with {ranks} in {chosen}: up to a minute", err=True)
        found = measure_device(runtime, chosen)
        if runtime.rank > 0:
            return
        with aside(output) as path:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if answer(found, json_out):
            print_facts(_facts(found))
        say_wrote(output)

    run_ranks(nproc, TrainConfig(device=device), work)


def _facts(found: dict[str, Any]) -> dict[str, str]:
    """The figures of a table, by name."""
    rates = [2e-12 * m * n * k / seconds for m, n, k, seconds in found["gemms"]]
    facts = {
        "device": found["device"] or "a GPU that plan does not list",
        "GEMMs": f"{min(rates):.4g} to {max(rates):.4g} TFLOP/s in {found['precision']}",
        "copy": f"{found['copy'] / 1e9:.4g} GB/s read and written",
        "attention": f"{found['attention'] / 1e12:.4g} TFLOP/s, forward and backward",
        "a_call": f"{found['call'] * 1e6:.3g} us, and {found['launch'] * 1e6:.3g} us for a launch",
    }
    for kind, moved, seconds in found["collectives"]:
        facts[f"{kind}_of_{moved:,}"] = f"{seconds * 1e6:,.0f} us"
    return facts
