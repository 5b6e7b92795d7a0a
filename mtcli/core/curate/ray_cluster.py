"""Runs the tasks of `mtcli curate --engine ray` on a Ray cluster, started here or joined by its
address.

Where a node dies, its tasks run again without limit, and lost objects are rebuilt by the tasks that
made them (Ray's lineage). Ray spills objects that do not fit in memory.

Ray runs the code of any caller it accepts, so every cluster authenticates callers by a token:
https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import io
import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.curate.cluster import Ref, Results, Task
from mtcli.core.curate.extras import require
from mtcli.core.runtime.progress import progress_bar

CONNECT_SECONDS = 5.0
TOKEN = (
    "`ray get-auth-token --generate` makes ~/.ray/auth_token, a copy of which every node needs; "
    "or set RAY_AUTH_TOKEN"
)
SAME = "inputs, task files, models and the output must have one path on all nodes"


class RayRef:
    """A reference to a value in a cluster's object stores."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __call__(self) -> Any:
        """Fetches the value, which is rebuilt where its node died."""
        import ray

        return ray.get(self.ref)


class Held(NamedTuple):
    """A value that came to a task with its arguments."""

    value: Any

    def __call__(self) -> Any:
        return self.value


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._call = ray.remote(_call)

    @property
    def cores(self) -> int:
        """The CPUs of all nodes that are alive now."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def run(
        self, function: Task, items: Sequence[Any], what: str, returns: int = 1
    ) -> list[tuple[Ref, ...]]:
        """Runs a task for each item. A task returns None first, so that waiting for it fetches no
        data.

        The values that an item refers to are arguments of its task: Ray waits for them, and
        rebuilds them, before it gives the task a core. A task that fetched them itself could hold
        the core on which they had to be rebuilt.
        """
        function_ref = self._ray.put(function)
        task = self._call.options(num_returns=returns + 1, max_retries=-1)
        rows = []
        for item in items:
            data, refs = _without_refs(item)
            rows.append(task.remote(function_ref, data, *refs))
        with progress_bar(what, len(rows), unit="tasks", leave=False) as bar:
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


def _call(function: Task, data: bytes, *values: Any) -> Results:
    unpickler = pickle.Unpickler(io.BytesIO(data))  # of our own driver, never read from a file
    unpickler.persistent_load = lambda index: Held(values[index])  # type: ignore[method-assign]
    return (None, *function(unpickler.load()))


def _without_refs(item: Any) -> tuple[bytes, list[Any]]:
    """Pickles an item with placeholders for its references, and returns both."""
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
    """Yields the cluster at an address, or a new one of `cores` on this machine, and disconnects at
    the end.

    A cluster that is started here listens on loopback. `RAY_ADDRESS` stands for an address. Raises
    MtcliError where Ray is not installed, or where no cluster at the address requires and accepts
    our token.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _set_environment(address)
    ray = require("ray", "--engine ray", "ray")
    where: dict[str, Any] = {"address": address}
    if address == "local":
        where |= {"num_cpus": cores, "include_dashboard": False}
    else:
        _require_there(address)
        _require_token(address)
    try:
        ray.init(**where, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _not_there(address, str(error).splitlines()[0]) from error
    except Exception as error:  # Ray raises no other class where a node does not start in time
        hint = "run it again when the machine is less busy, or with --engine local"
        reason = str(error).partition("\n")[0]
        said = f"Ray did not start at {_name(address)}: {reason}"
        raise failed(said, hint) from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


def _set_environment(address: str) -> None:
    """Sets the variables that Ray reads at import and passes to its processes."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if address == "local":
        # The node is then 127.0.0.1, as on Windows and OSX, whose firewalls ask about any other.
        # ray.init(_node_ip_address=) cannot name it: Ray replaces a loopback address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


def _require_there(address: str) -> None:
    """Raises MtcliError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    hint = "HOST:PORT, as `ray start --head` says it, or auto"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise wrong(f"{address!r} is no address", hint, "--address")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise wrong(f"nothing answers at {address}: {error}", hint, "--address") from None


def _require_token(address: str) -> None:
    """Raises MtcliError where a cluster accepts callers without a token, or refuses ours.

    Ray itself would join the former, and would retry the latter for a minute.
    """
    refusal = _refusal(address, "disabled")
    if not refusal:
        said = f"the cluster at {address} runs the code of anyone who can reach it"
        raise wrong(said, f"start all its nodes with RAY_AUTH_MODE=token: {TOKEN}", "--address")
    if "InvalidAuthToken" not in refusal:
        raise _not_there(address, refusal.splitlines()[-1])
    if _refusal(address, "token"):
        said = f"the cluster at {address} refuses our token, or we have none"
        raise wrong(said, f"give mtcli the cluster's: {TOKEN}", "--address")


def _refusal(address: str, auth_mode: str) -> str:
    """Returns the error of a caller in this RAY_AUTH_MODE, empty where the cluster accepts it.

    The caller is a separate process: Ray reads the mode once.
    """
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check"]
    command += ["--skip-version-check", "--address", address]
    environment = os.environ | {"RAY_AUTH_MODE": auth_mode}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return done.stderr.strip() or f"Ray's health check ended with {done.returncode}"


def _not_there(address: str, reason: str) -> MtcliError:
    said = f"no Ray cluster at {_name(address)}: {reason}"
    return wrong(said, "`ray start --head` starts one, and says its address", "--address")


def _name(address: str) -> str:
    return "this machine" if address == "local" else address
