"""A Ray cluster for `mtcli curate --engine ray`: started on this machine, or joined by its address.

Tasks run again wherever a node died, as often as it takes; what its object store held is made anew
by the tasks that made it (Ray's lineage). Objects that do not fit in memory are spilled by Ray.
"""

import io
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.curate.cluster import Ref
from mtcli.core.curate.extras import require

CONNECT_SECONDS = 5.0
SAME = "inputs, task files, models and the output must have one path on all nodes"


class RayRef:
    """A value in the object stores of a cluster."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __call__(self) -> Any:
        """Fetches the value; where its node died, it is made anew."""
        import ray

        return ray.get(self.ref)


class Held(NamedTuple):
    """A value that came to a task with its arguments."""

    value: Any

    def __call__(self) -> Any:
        """The value."""
        return self.value


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._call = ray.remote(_call)

    @property
    def cores(self) -> int:
        """The CPUs of all nodes that are there now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def run(
        self, function: Callable[[Any], tuple], items: Sequence[Any], what: str, returns: int = 1
    ) -> list[tuple[Ref, ...]]:
        """Runs a task for each item. A task returns None first: waiting for it fetches no data.

        All that an item refers to are arguments of its task, which Ray waits for, and makes anew,
        before it gives the task a core. A task that fetched them itself could hold the very core
        on which they would be made.
        """
        function_ref = self._ray.put(function)
        task = self._call.options(num_returns=returns + 1, max_retries=-1)
        rows = []
        for item in items:
            data, refs = _without_refs(item)
            rows.append(task.remote(function_ref, data, *refs))
        with tqdm(total=len(rows), desc=what, file=sys.stderr, leave=False, delay=0.5) as bar:
            for row in rows:
                self._wait(row[0])
                bar.update()
        return [tuple(map(RayRef, row[1:])) for row in rows]

    def _wait(self, ref: Any) -> None:
        errors = self._ray.exceptions
        try:
            self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MtcliError):
                raise cause from None
            raise failed(f"{type(cause).__name__} in a task: {cause}", SAME) from error
        except errors.RayError as error:
            said = f"the cluster failed: {str(error).splitlines()[0]}"
            raise failed(said, "is its head up, and memory left on its nodes?") from error


def _call(function: Callable[[Any], tuple], data: bytes, *values: Any) -> tuple:
    unpickler = pickle.Unpickler(io.BytesIO(data))  # of our own driver, never read from a file
    unpickler.persistent_load = lambda index: Held(values[index])  # type: ignore[method-assign]
    return (None, *function(unpickler.load()))


def _without_refs(item: Any) -> tuple[bytes, list[Any]]:
    """An item pickled, with places where it referred to values, and those."""
    refs: list[Any] = []

    def place(value: Any) -> int | None:
        if not isinstance(value, RayRef):
            return None
        refs.append(value.ref)
        return len(refs) - 1

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.persistent_id = place  # type: ignore[method-assign]
    pickler.dump(item)
    return file.getvalue(), refs


@contextmanager
def ray_cluster(address: str | None, cores: int) -> Iterator[RayCluster]:
    """Joins the cluster at an address, or starts one of so many cores here, and leaves it.

    `RAY_ADDRESS` is as an address. Raises MtcliError where Ray is not installed or not there.
    """
    ray = require("ray", "--engine ray", "ray")
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address:
        _require_there(address)
    where: dict[str, Any] = {"address": address} if address else {"address": "local"}
    if not address:
        where |= {"num_cpus": cores, "include_dashboard": False}
    try:
        ray.init(**where, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = f"no Ray cluster at {address or 'this machine'}: {str(error).splitlines()[0]}"
        hint = "`ray start --head` starts one, and says its address"
        if "AuthToken" in str(error):
            hint = "set RAY_AUTH_MODE=token where `ray start` made a token, or disabled where not"
        raise wrong(said, hint, "--address") from error
    except Exception as error:  # Ray raises no other class where a node does not start in time
        hint = "run it again when the machine is less busy, or with --engine local"
        reason = str(error).partition("\n")[0]
        said = f"Ray did not start at {address or 'this machine'}: {reason}"
        raise failed(said, hint) from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


def _require_there(address: str) -> None:
    """Raises MtcliError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host and address in ("auto", "local"):
        return
    hint = "HOST:PORT, as `ray start --head` says it, or auto"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise wrong(f"{address!r} is no address", hint, "--address")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise wrong(f"nothing answers at {address}: {error}", hint, "--address") from None
