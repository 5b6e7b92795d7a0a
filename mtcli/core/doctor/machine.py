"""Checks of the machine: processors, memory, limits, disks, clock, network interfaces."""

import os
import platform
import resource
import socket
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from mtcli.core.doctor import readings
from mtcli.core.doctor.diagnosis import Diagnosis, broken, least, ok, warn
from mtcli.core.plan.hardware import GIB, gib
from mtcli.core.runtime.launch import cores

MEMORY = 2 * GIB, GIB // 2  # available: below the first is a warning, below the second broken
OPEN_FILES = 1024, 128  # a rank of many shards, and Python with torch
PROCESSES = 1024, 64  # each rank starts a thread a core, and some more
DISK = 10 * GIB, GIB // 4
TEMPORARY = GIB, GIB // 64
LOCKED = 64 * 2**20  # bytes below which InfiniBand registers no buffers of NCCL's
# What NVIDIA advises for containers; Docker's default is 64 MiB.
SHARED = GIB, 128 * 2**20
DRIFT = 0.01  # seconds in INTERVAL; NTP steers by 0.0001
INTERVAL = 0.2
SET_CLOCK = "sudo timedatectl set-ntp true"


def processors() -> Diagnosis:
    """Cores and load: a busy machine measures wrong times."""
    usable, load = cores(), psutil.getloadavg()[0]
    name = (readings.kernel_file("/proc/cpuinfo") or "").partition("model name")[2]
    name = name.partition(":")[2].partition("\n")[0].strip() or platform.machine()
    found = f"{name}, {usable} of {os.cpu_count()} cores, load {load:.1f}; {platform.platform()}"
    numbers = {"cores": usable, "all_cores": os.cpu_count(), "load": load}
    if load > usable:
        return warn(found, "`top` shows what else runs: times will be too long", **numbers)
    return ok(found, **numbers)


def memory() -> Diagnosis:
    """Memory of this machine, or of its container."""
    virtual = psutil.virtual_memory()
    total, available = virtual.total, virtual.available
    limit = readings.cgroup_limit("memory.max")
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit - (readings.cgroup_limit("memory.current") or 0))
    found = f"{gib(available)} available of {gib(total)}"
    fix = "`ps aux --sort=-rss | head` shows what holds it"
    return least(available, *MEMORY, found, fix, available_bytes=available, total_bytes=total)


def shared_memory(gpus: int) -> Diagnosis:
    """/dev/shm, by which NCCL connects GPUs; CPU ranks share memory that needs no file system."""
    fix = "docker run --shm-size=1g, or sudo mount -o remount,size=1G /dev/shm"
    if not os.path.isdir("/dev/shm"):
        found = "there is no /dev/shm"
        return broken(found, fix, free_bytes=0) if gpus > 1 else ok(found, free_bytes=0)
    free, _ = readings.free_bytes("/dev/shm")
    found = f"{gib(free)} free in /dev/shm; "
    if gpus < 2:
        return ok(found + "runs without several GPUs need none of it", free_bytes=free)
    return least(free, *SHARED, f"{found}NCCL wants {gib(SHARED[0])}", fix, free_bytes=free)


def open_files() -> Diagnosis:
    """The files that a process may hold open."""
    soft, hard = _limits(resource.RLIMIT_NOFILE)
    most = int(min(hard, 65536))
    fix = f"ulimit -n {most}"
    if most < OPEN_FILES[0]:
        fix = "the hard limit is too low: docker run --ulimit nofile=65536, or limits.conf(5)"
    found = f"{_count(soft)} a process, at most {_count(hard)}"
    return least(soft, *OPEN_FILES, found, fix, soft=soft, hard=hard)


def processes() -> Diagnosis:
    """The processes and threads that this user, or this container, may still have."""
    soft, hard = _limits(resource.RLIMIT_NPROC)
    limit = readings.cgroup_limit("pids.max")
    running = readings.cgroup_limit("pids.current") or 0
    room = soft if limit is None else min(soft, limit - running)
    fix = "ulimit -u unlimited, docker run --pids-limit=-1, or the kubelet's podPidsLimit"
    found = f"{_count(room)} more processes and threads"
    return least(room, *PROCESSES, found, fix, room=room, soft=soft, hard=hard)


def locked_memory() -> Diagnosis:
    """The memory that may be locked: InfiniBand registers its buffers so."""
    soft, _ = _limits(resource.RLIMIT_MEMLOCK)
    adapters = readings.names_in("/sys/class/infiniband")
    size = "unlimited" if soft == float("inf") else gib(soft)
    if not adapters:
        found = f"{size}; without InfiniBand or RoCE no run needs any"
        return ok(found, soft=soft, adapters=0)
    found = f"{size}, for {len(adapters)} adapters: {', '.join(adapters)}"
    fix = "docker run --ulimit memlock=-1, LimitMEMLOCK=infinity of slurmd, or limits.conf(5)"
    return least(soft, float("inf"), LOCKED, found, fix, soft=soft, adapters=len(adapters))


def disk() -> Diagnosis:
    """The disk of this folder, where runs and checkpoints go."""
    fix = "`du -sh runs/*` shows what takes it, or --set train.output=FOLDER on a larger disk"
    return _disk(os.getcwd(), DISK, fix)


def temporary_disk() -> Diagnosis:
    """The disk of temporary files."""
    return _disk(tempfile.gettempdir(), TEMPORARY, "export TMPDIR=FOLDER, on a larger disk")


def clock() -> Diagnosis:
    """The wall clock: against the monotonic one, this installation's date, and NTP."""
    wall, steady = readings.clocks()
    time.sleep(INTERVAL)
    later, steadier = readings.clocks()
    drift = later - wall - (steadier - steady)
    installed = Path(__file__).stat().st_mtime
    day = datetime.fromtimestamp(wall, UTC)
    error = readings.clock_error()
    numbers = {"wall": wall, "drift": drift, "ntp_error": error}
    if wall < installed - 86400:
        found = f"{day:%Y-%m-%d %H:%M} UTC is before mtcli was installed"
        return broken(found, SET_CLOCK, **numbers)
    found = f"{day:%Y-%m-%d %H:%M:%S} UTC, {drift * 1e3:+.1f} ms against the monotonic clock"
    if abs(drift) > DRIFT:
        return warn(f"{found} in {INTERVAL} s: it is being set", SET_CLOCK, **numbers)
    if error == float("inf"):
        found += "; NTP does not steer it, so traces and logs of several machines may not align"
        return warn(found, SET_CLOCK, **numbers)
    return ok(found + (f"; NTP: at most {error * 1e3:.1f} ms wrong" if error else ""), **numbers)


def interfaces() -> Diagnosis:
    """Network interfaces that are up, and those on which gloo would listen."""
    statuses = psutil.net_if_stats()
    found = {
        name: [one.address for one in addresses if one.family == socket.AF_INET]
        or [one.address for one in addresses if one.family == socket.AF_INET6]
        for name, addresses in psutil.net_if_addrs().items()
        if name in statuses and statuses[name].isup
    }
    found = {name: addresses for name, addresses in found.items() if addresses}
    text = ", ".join(f"{name} {addresses[0]}" for name, addresses in found.items())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in chosen.split(",") if name and name not in found]
    if missing:
        fix = f"unset GLOO_SOCKET_IFNAME, or set it to one of {', '.join(found)}"
        text = f"{text}; GLOO_SOCKET_IFNAME={chosen}, an interface that is not up"
        return broken(text, fix, interfaces=found, gloo=chosen)
    loopback = _with(found, "127.0.0.1")
    if loopback is None:
        text = f"{text or 'none is up'}; no loopback, by which ranks of one machine meet"
        return broken(text, "sudo ip link set lo up", interfaces=found, gloo=chosen)
    outward = _with(found, readings.address_outward())
    gloo = chosen or f"{loopback} on one machine"
    if not chosen:
        gloo += f", {outward} between machines" if outward else "; other machines are not reached"
    numbers = {"interfaces": found, "loopback": loopback, "outward": outward}
    return ok(f"{text}; gloo takes {gloo}", gloo=chosen, **numbers)


def _limits(kind: int) -> tuple[float, float]:
    soft, hard = resource.getrlimit(kind)
    infinite = resource.RLIM_INFINITY
    return (
        float("inf") if soft == infinite else soft,
        float("inf") if hard == infinite else hard,
    )


def _count(number: float) -> str:
    return "unlimited" if number == float("inf") else f"{number:,}"


def _disk(folder: str, bounds: tuple[int, int], fix: str) -> Diagnosis:
    free, files = readings.free_bytes(folder)
    numbers: dict[str, Any] = {"folder": folder, "free_bytes": free, "free_files": files}
    if not os.access(folder, os.W_OK):
        return broken(f"{folder} cannot be written", f"name another folder: {fix}", **numbers)
    if not files:
        return broken(f"{folder} has room for no more files", fix, **numbers)
    return least(free, *bounds, f"{gib(free)} free in {folder}", fix, **numbers)


def _with(interfaces: dict[str, list[str]], address: str | None) -> str | None:
    """The interface that has an address."""
    return next((name for name, entries in interfaces.items() if address in entries), None)
