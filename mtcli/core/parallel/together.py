"""Raises one rank's error on all ranks, and checks that a fact is the same on all."""

import json
import socket
from collections.abc import Callable
from typing import TypeVar

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.parallel.collectives import first_value
from mtcli.core.parallel.groups import Axis

Result = TypeVar("Result")
SHARED = "put it where all machines see the same files, or wait until their caches are up to date"


def together(axis: Axis, work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank and returns this rank's result. Collective.

    Where ranks raise MtcliError, every rank raises that of the first of them.
    """
    fault, value = None, []
    try:
        value.append(work())
    except MtcliError as error:
        fault = error.dump()
    if first := first_value(fault, axis):
        raise MtcliError.load(first)
    return value[0]


def require_alike(axis: Axis, fact: object, what: str, field: str = "") -> None:
    """Raises MtcliError on every rank where `fact` differs between ranks; `what` names it in the
    error. Collective."""
    report = (json.loads(json.dumps(fact)), f"{what} {fact}", socket.gethostname())
    expected, words, host = first_value(report if axis.rank == 0 else None, axis)
    message = None
    if report[0] != expected:
        message = f"rank {axis.rank} on {report[2]} {report[1]}, and rank 0 on {host} {words}"
    if first := first_value(message, axis):
        raise wrong(first, SHARED, field)
