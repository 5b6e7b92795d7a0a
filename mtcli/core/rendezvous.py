"""How the ranks of a run find each other: through the store that the launcher's variables name."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from mtcli.core.parallel.groups import LATER
from mtcli.core.spec.errors import failed


def meet(rank: int, world: int, timeout: float, backend: str, attempt: int) -> dist.Store:
    """The store of a process group that every rank has joined, at the launcher's n-th attempt.

    Raises MtcliError where ranks are missing after `timeout` seconds.
    """
    if "MASTER_ADDR" not in os.environ:  # Slurm names hosts, torchrun sets these two
        first = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000  # one for each job
        os.environ["MASTER_ADDR"] = first
        os.environ.setdefault("MASTER_PORT", str(port))
    limit, later = timedelta(seconds=timeout), timedelta(seconds=timeout + LATER)
    store, rank, world = next(dist.rendezvous("env://", rank, world, timeout=limit))
    # the launcher keeps its store over restarts: an attempt must not find the last one's peers
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    _await_all(store, rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=later)
    return store


def _await_all(store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Returns when every rank has come here. Raises MtcliError with those that have not."""
    end = time.monotonic() + timeout
    store.set(f"here/{rank}", "")
    if store.add("here", 1) == world:
        store.set("all here", "")
    while not store.check(["all here"]):
        if time.monotonic() > end:
            missing = [str(one) for one in range(world) if not store.check([f"here/{one}"])]
            message = f"after {timeout:g} s, of {world} ranks these have not started: "
            raise failed(message + ", ".join(missing), "raise train.timeout if they need longer")
        time.sleep(0.02)
