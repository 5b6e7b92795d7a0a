"""Connects the ranks of a run with each other, on the right network interfaces.

A store, gloo and NCCL authenticate nobody, so a run listens on as little as possible: on loopback
where all ranks are on one machine, else on the interface by which MASTER_ADDR is reached. Nothing
received is unpickled. torch's c10d rendezvous unpickles its store's values, so the launcher does
not use it.
"""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from mtcli.core.config.errors import failed, wrong
from mtcli.core.runtime.attempts import Attempt, Meeting, keeps_store
from mtcli.core.runtime.health.watchdog import LATER
from mtcli.core.runtime.slurm import slurm_task
from mtcli.core.runtime.variables import INTERFACES

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # ranks that may connect to the store at once


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a launcher with its own workers: a store on loopback, which they share.

    torch's static rendezvous is the same, but listens on all interfaces.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        self.store = _host_store(_listen(LOOPBACK, 0), timedelta(seconds=60))

    @property
    def use_agent_store(self) -> bool:
        """Returns True: workers use this store too."""
        return True

    def get_backend(self) -> str:
        """The name under which elastic_launch finds it."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns a single node, and the address of its store."""
        store = dist.PrefixStore("launcher", self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.store.port))

    def is_closed(self) -> bool:
        """Returns False: it lasts as long as the launcher."""
        return False

    def set_closed(self) -> None:
        """Does nothing: there is no other node."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: no other node may join."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return self.run_id

    def shutdown(self) -> bool:
        """Returns True: the store ends with this object."""
        return True


def meet(rank: int, world: int, timeout: float, device: torch.device) -> tuple[dist.Store, Attempt]:
    """Joins the process group of all ranks; returns (its store, the attempt).

    On GPUs NCCL connects all ranks here, each with its device, and every later group when it is
    created. By default it would connect within a group's first collective, which ranks may reach in
    any order.

    Raises MtcliError where ranks are missing after `timeout` seconds, and where MASTER_ADDR names
    no single interface.
    """
    limit, later = timedelta(seconds=timeout), timedelta(seconds=timeout + LATER)
    root_store = _connect(rank, limit)
    name, attempt = Meeting(root_store, rank, world, timeout, device.type).agree()
    store = dist.PrefixStore(name, root_store)
    members: dict[str, Any] = {"store": store, "rank": rank, "world_size": world, "timeout": later}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **members)
    else:
        dist.init_process_group("gloo", **members)
    return store, attempt


def attempt_alone(timeout: float) -> Attempt:
    """The attempt of a run of one rank, from its launcher's store."""
    store = _connect(0, timedelta(seconds=timeout))
    return Meeting(store, 0, 1, timeout, "any").agree()[1]


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """Whether a launcher's variables say that all ranks are on this machine."""
    if "LOCAL_WORLD_SIZE" in environ:
        return environ["LOCAL_WORLD_SIZE"] == environ.get("WORLD_SIZE")
    if "MASTER_ADDR" in environ:
        return _is_loopback(environ["MASTER_ADDR"])
    task = slurm_task(environ)
    return task is None or task.nodes == 1


def endpoint(environ: Mapping[str, str]) -> tuple[str, int]:
    """The address and port of the run's store, from torchrun's variables or Slurm's.

    Raises MtcliError where the port is invalid.
    """
    job = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000  # a port for each job
    task = slurm_task(environ)
    host = environ.get("MASTER_ADDR") or (task and task.first_host) or LOOPBACK
    port = environ.get("MASTER_PORT", str(job))
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise wrong(f"MASTER_PORT is {port!r}", "a port from 1 to 65535")
    return host, int(port)


def _connect(rank: int, limit: timedelta) -> dist.Store:
    """This rank's connection to the run's store, which rank 0 hosts if no launcher does."""
    host, port = endpoint(os.environ)
    hosted, address = keeps_store(), cast(str | None, LOOPBACK)
    if on_one_machine(os.environ):
        host = host if hosted else LOOPBACK
    else:
        address = _address_towards(host, port, hosted)
    if address is not None:
        interface = _interface_of(address)
        for variable in INTERFACES:  # a user's choice stays
            os.environ.setdefault(variable, interface)
    if rank == 0 and not hosted:
        assert address, f"no address of {host} to host the store on"
        return _host_store(_listen(address, port), limit)
    return dist.TCPStore(host, port, is_master=False, timeout=limit)


def _address_towards(host: str, port: int, hosted: bool) -> str | None:
    """This machine's address on the interface by which `host` is reached; on rank 0's machine, the
    host's own address.

    None where a launcher hosts the store on this machine under a loopback address, as in Debian's
    /etc/hosts. Raises MtcliError where rank 0 cannot listen on that address alone, or no other
    machine can reach it.
    """
    hint = "set MASTER_ADDR to the address of rank 0's machine on the network that ranks share"
    hint += "; torchrun takes it from --local-addr"
    try:
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # UDP: nothing is sent
            probe.connect(target)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise wrong(f"MASTER_ADDR={host} is not reached: {error.strerror}", hint) from None
    if ip_address(target[0]).is_unspecified:
        raise wrong(f"MASTER_ADDR={host} stands for every interface of a machine", hint)
    if ip_address(address).is_loopback:
        if hosted:
            return None
        message = f"MASTER_ADDR={host} is {target[0]} here, which no other machine can reach"
        raise wrong(message, hint)
    return address


def _is_loopback(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ip_address(address).is_loopback for address in addresses)


def _interface_of(address: str) -> str:
    name: str
    for name, entries in psutil.net_if_addrs().items():
        if address in {entry.address.partition("%")[0] for entry in entries}:
            return name
    raise AssertionError(f"{address} is an address of this machine, and of no interface")


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address; port 0 is any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        message = f"rank 0 cannot listen on {address}, port {port}: {error.strerror}"
        raise failed(message, "set MASTER_PORT to a port that is free") from None
    listener.listen(BACKLOG)
    return listener


def _host_store(listener: socket.socket, limit: timedelta) -> dist.TCPStore:
    """A store that listens on a given socket; torch's own would listen on every interface."""
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
