"""Passes a worker's error to the user: through a file, from which the launcher reports one error of
all ranks'.

The file is that of torch's elastic launcher, which reads it once every worker has ended.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mtcli.core.config.errors import Exit, MtcliError, Problem

GoesOn = Callable[[], str]  # the hint on how to go on after a fault, by what is saved then

LAUNCHED = "MTCLI_LAUNCHED"  # set in workers that report their errors to our own launcher

WATCHED, TOLD, LOST = (
    "watched",
    "told",
    "lost",
)  # causes of an error; LOST follows from another error


class LostPeer(MtcliError):
    """Peers of this rank, or the common store, are gone: a consequence of another error."""


def again() -> str:
    """The hint to run a command again that saves nothing."""
    return "run the same command again"


@contextmanager
def telling_of_lost_peers(rank: int, goes_on: GoesOn = again) -> Iterator[None]:
    """Turns torch's errors of broken connections into LostPeer (exit 1).

    The watchdog names mtcli's collectives that break; this is for connections that it does not see:
    of ranks that are still meeting, and of FSDP2's collectives.
    """
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        broken = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if not broken and "/gloo/" not in str(error):
            raise
        where, _, what = str(error).splitlines()[0].partition(".cc:")
        what = what.partition("] ")[2].partition(". This is typically")[0] or where
        from mtcli.core.runtime.rendezvous import endpoint

        store = "{}, port {}".format(*endpoint(os.environ))
        message = f"rank {rank} does not reach another rank, or the run's store at {store}"
        hint = f"look for the rank that failed first; {goes_on()}"
        raise LostPeer(Problem(f"{message}: {what}", hint), code=Exit.FAILED) from error


def first_failure(error: Any, goes_on: GoesOn = again) -> MtcliError | KeyboardInterrupt:
    """The error that caused the failures of a ChildFailedError, in its own words."""
    codes = {failure.exitcode for failure in error.failures.values()}
    if Exit.INTERRUPTED in codes:
        return KeyboardInterrupt()
    rank, failure = min(error.failures.items(), key=lambda item: _consequence(item[1]))
    report = failure.message if isinstance(failure.message, dict) else {}
    if "problems" in report.get("extraInfo", {}):
        return MtcliError.load(report["extraInfo"])
    cause = report.get("message") or f"it ended with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        cause = f"it was killed by {signal.Signals(-failure.exitcode).name}"
    return MtcliError(Problem(f"rank {rank} failed: {cause}", goes_on()), code=Exit.FAILED)


def _consequence(failure: Any) -> tuple[int, int, bool]:
    """A sort key that puts causes first: a killed rank ahead of its peers, which only lost it.

    A watchdog's error comes first of all, as it may have killed a rank that did not answer. SIGTERM
    is sent by the launcher to the peers of a failed rank, so the earliest of those counts.
    """
    extra = failure.message.get("extraInfo", {}) if isinstance(failure.message, dict) else {}
    cause, terminated = extra.get("cause"), failure.exitcode == -signal.SIGTERM
    has_problems = "problems" in extra
    order = (
        cause == WATCHED,
        failure.exitcode < 0 and not terminated,
        has_problems and cause != LOST,
        cause != LOST and not terminated,
        has_problems or terminated,
        True,
    )
    return order.index(True), failure.timestamp, not has_problems


def hand_over(error: BaseException) -> NoReturn:
    """Writes the error to the launcher's file, and ends this worker without output."""
    if isinstance(error, KeyboardInterrupt):
        os._exit(Exit.INTERRUPTED)
    if isinstance(error, MtcliError):
        cause = LOST if isinstance(error, LostPeer) else TOLD
        _leave(str(error), error.dump() | {"cause": cause})
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        cause = f"{type(error).__name__}: {error} ({where})"
        _leave(cause, {"code": int(Exit.FAILED), "cause": TOLD})
    if os.environ.get("MTCLI_TRACEBACK"):
        traceback.print_exception(error)
    os._exit(error.code if isinstance(error, MtcliError) else Exit.FAILED)


def end_rank(
    error: MtcliError | None, silent: list[int], lost: bool, goes_on: GoesOn = again
) -> NoReturn:
    """Ends this rank from another thread, with the watchdog's error or silently.

    `lost` means that it follows from another rank's error, if that rank left one. Otherwise kills
    the launcher's workers that do not answer (`silent`, process ids), for which it would wait half
    a minute.
    """
    cause = LOST if lost else WATCHED
    if error is None:
        _leave("", {"code": int(Exit.FAILED), "cause": cause})
    else:
        (problem,) = error.problems
        hint = "; ".join(filter(None, [goes_on(), problem.hint]))
        error = MtcliError(problem._replace(hint=hint), code=error.code)
        sys.stderr.write("\n")  # the progress line is not at its end
        if LAUNCHED not in os.environ:
            sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        _leave(str(error), error.dump() | {"cause": cause})
        if LAUNCHED in os.environ and not lost:
            for pid in filter(_is_sibling, silent):
                os.kill(pid, signal.SIGKILL)
    os._exit(Exit.FAILED)


def _leave(text: str, extra: dict[str, Any]) -> None:
    extra = {"timestamp": str(int(time.time()))} | extra
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _is_sibling(pid: int) -> bool:
    """Whether a process is alive and a child of this process's launcher, by /proc; False
    elsewhere."""
    table = Path(f"/proc/{pid}/stat")
    if not table.exists():
        return False
    parent = table.read_text().rpartition(")")[2].split()[1]
    return int(parent) == os.getppid()
