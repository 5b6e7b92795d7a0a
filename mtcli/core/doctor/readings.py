"""Reads what the system says of itself: the kernel's files, its clock, nvidia-smi."""

import ctypes
import os
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

STA_UNSYNC = 0x40  # of adjtimex(2): nothing steers the clock
TIMEX = struct.Struct("i4x4qi")  # modes, offset, frequency, max. and estimated error, status


def kernel_file(path: str) -> str | None:
    """The text of a file of /proc or /sys; None where there is none."""
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return None


def cgroup_limit(name: str) -> int | None:
    """A limit of this process's container, such as memory.max; None where it has none."""
    text = kernel_file(f"/sys/fs/cgroup/{name}")
    return int(text) if text and text.isdecimal() else None


def names_in(folder: str) -> list[str]:
    """The names in a folder of the kernel's; none where there is no such folder."""
    with suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def free_bytes(folder: str) -> tuple[int, int]:
    """Bytes that this user may still write to a folder's file system, and files."""
    status = os.statvfs(folder)
    inodes = status.f_favail if status.f_files else 2**63  # btrfs and others count none
    return status.f_bavail * status.f_frsize, inodes


def clocks() -> tuple[float, float]:
    """Wall and monotonic seconds of one moment: of ten readings, the quickest."""
    readings = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(10)]
    begin, wall, end = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall, (begin + end) / 2


def clock_error() -> float | None:
    """The most seconds by which NTP says that the clock is wrong; infinite where nothing steers it,
    None where the system does not say."""
    room = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex") or libc.adjtimex(room) < 0:
        return None
    _, _, _, most, _, status = TIMEX.unpack_from(room)
    return float("inf") if status & STA_UNSYNC else most * 1e-6


def address_outward() -> str | None:
    """This machine's address on its way to other networks; None without one. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of RFC 5737, for examples
        return str(probe.getsockname()[0])
    return None


def nvidia_smi(*arguments: str) -> str | None:
    """The output of nvidia-smi; None where there is none, or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout
    return None
