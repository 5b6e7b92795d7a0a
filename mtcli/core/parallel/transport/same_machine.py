"""Connects ranks of one machine by memory that they share, if they are all on one."""

import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence

from mtcli.core.parallel.transport.shared_memory import SLOT_BYTES, SLOTS, SharedMemory


def connect(
    rank: int,
    names: Sequence[int],
    gather: Callable[[object], list[list[str | None]]],
    timeout: float,
) -> SharedMemory | None:
    """The shared memory of the ranks `names`, of which this one is number `rank`.

    None where they are not all on one Linux machine. `gather` is an all-gather of JSON values. The
    memory has no name in any file system and is freed with its ranks' processes. Other users of the
    machine can call its sockets, so connections from processes of another user are refused.

    Raises RuntimeError where a rank does not answer within `timeout` seconds, now or later.
    """
    listener, own_file = _listener(), _memory()
    able = listener is not None and own_file is not None
    members = gather([_machine(), listener.getsockname().hex() if listener and able else None])
    addresses = [bytes.fromhex(address) for _, address in members if address is not None]
    if len(addresses) < len(names) or len({machine for machine, _ in members}) > 1:
        if listener is not None:
            listener.close()
        if own_file is not None:
            os.close(own_file)
        return None
    assert listener is not None and own_file is not None, "every rank gave an address"
    files, peers = {rank: own_file}, dict[int, socket.socket]()
    try:
        for peer, connection in _connections(rank, listener, addresses, timeout):
            peers[peer] = connection
            socket.send_fds(connection, [b"\0"], [own_file])
        for peer, connection in peers.items():
            _, (files[peer],), _, _ = socket.recv_fds(connection, 1, 1)
    except (OSError, ValueError):  # no answer in time, nobody there, or one who left: no file
        away = ", ".join(str(name) for i, name in enumerate(names) if i not in files)
        raise RuntimeError(f"rank {away} has gone, or has not come in {timeout} s") from None
    memory = [mmap.mmap(files[i], SLOTS * SLOT_BYTES) for i in range(len(names))]
    for file in files.values():
        os.close(file)
    return SharedMemory(rank, names, memory, dict(sorted(peers.items())))


def _machine() -> str:
    """An id that is equal on two ranks if they can reach each other's sockets."""
    if sys.platform != "linux":
        return f"none of rank {os.getpid()}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _memory() -> int | None:
    """A new file in memory; None where the system has or allows none."""
    if sys.platform != "linux":
        return None
    try:
        file = os.memfd_create("mtcli")
        os.ftruncate(file, SLOTS * SLOT_BYTES)
    except OSError:
        return None
    return file


def _listener() -> socket.socket | None:
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"")  # the kernel names it, and the name goes when the socket does
    listener.listen()
    return listener


def _connections(
    rank: int, listener: socket.socket, addresses: list[bytes], timeout: float
) -> Iterator[tuple[int, socket.socket]]:
    """Yields (rank, socket): calls the ranks with lower numbers, and accepts those with higher
    ones, which send theirs."""
    for peer in range(rank):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(addresses[peer])
        if not _is_same_user(connection):
            raise OSError("another user answers")
        connection.send(rank.to_bytes(4, "little"))
        yield peer, connection
    listener.settimeout(timeout)
    awaited = list(range(rank + 1, len(addresses)))
    while awaited:
        connection, _ = listener.accept()
        connection.settimeout(timeout)
        if not _is_same_user(connection):
            connection.close()
            continue
        peer = int.from_bytes(connection.recv(4), "little")
        awaited.remove(peer)
        yield peer, connection
    listener.close()


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the kernel says that the process at the other end is this user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("iII", credentials)
    return user == os.getuid()  # type: ignore[no-any-return]  # from struct
