"""`mtcli doctor`: what does this machine lack, and which command mends it?"""

from typing import TYPE_CHECKING, Annotated

import typer

from mtcli.commands.options import ComputeDevice, JsonOut, Nproc
from mtcli.commands.output import answer, answering, echo
from mtcli.commands.ranks import run_ranks
from mtcli.core.config.errors import Exit, MtcliError, Problem

if TYPE_CHECKING:
    from mtcli.core.doctor.diagnosis import Diagnosis
    from mtcli.core.runtime.launch import Runtime

Only = Annotated[
    list[str],
    typer.Option(
        "--only",
        metavar="CHECK",
        default_factory=list,
        show_default=False,
        help="this check alone; may be given any number of times",
    ),
]


@answering
def doctor(
    only: Only, nproc: Nproc = 2, device: ComputeDevice = "auto", json_out: JsonOut = None
) -> None:
    """Examine machine, devices, installation; exchange and GEMM; name what mends each fault."""
    from mtcli.core.config.schema import TrainConfig
    from mtcli.core.doctor.checks import checks
    from mtcli.core.doctor.diagnosis import examine
    from mtcli.core.doctor.rank_exchange import NAME, TIMEOUT, exchange_among
    from mtcli.core.runtime.launch import environment_world

    every_check = checks(nproc, device)
    _require_known(only, list(every_check))

    def work(runtime: "Runtime") -> None:
        found = exchange_among(runtime)
        if runtime.rank == 0:
            _show({NAME: found}, json_out)

    # Ranks of a launcher's, of other machines too, check how they reach each other.
    if only == [NAME] or (environment_world() or 1) > 1:
        run_ranks(nproc, TrainConfig(device=device, timeout=TIMEOUT), work)
        return
    chosen = {name: check for name, check in every_check.items() if name in only or not only}
    echo(f"{len(chosen)} checks: up to a minute", err=True)
    found = examine(chosen)
    _show(found, json_out)
    if any(one.state == "broken" for one in found.values()):
        raise typer.Exit(Exit.FAILED)


def _require_known(only: list[str], names: list[str]) -> None:
    from mtcli.core.config.synonyms import closest

    if unknown := [name for name in only if name not in names]:
        hint = ", ".join(names)
        problems = (
            Problem(f"there is no check {name!r}", hint + closest(name, names), "--only")
            for name in unknown
        )
        raise MtcliError(*problems)


def _show(found: "dict[str, Diagnosis]", json_out: str | None) -> None:
    """Prints a table with a line for each check, and below it what mends it."""
    from mtcli.core.runtime.console import print_line, print_table

    faults = {name: one for name, one in found.items() if one.state == "broken"}
    data = {
        "ok": not faults,
        "problems": [
            {"field": name, "message": one.found, "hint": one.fix} for name, one in faults.items()
        ],
        "checks": [{"name": name, **one._asdict()} for name, one in found.items()],
    }
    if not answer(data, json_out):
        return
    rows = []
    for name, one in found.items():
        rows.append([one.state, name, one.found])
        if one.fix:
            rows.append(["", "", f"-> {one.fix}"])
    print_table("", ("", "", ""), rows)
    counts = [[one.state for one in found.values()].count(s) for s in ("ok", "warn", "broken")]
    print_line("{} ok, {} warn, {} broken".format(*counts))
