"""The machine's checks, by planted readings: what is fine, what warns, what is broken."""

import json
import socket
from types import SimpleNamespace

import pytest

from mtcli.core.doctor import machine, readings
from mtcli.core.doctor.diagnosis import broken, examine, least, ok
from mtcli.core.runtime.json_text import json_text

GIB = 2**30
INFINITE = machine.resource.RLIM_INFINITY


def reads(value):
    return lambda *_: value


def limits(soft, hard=INFINITE):
    return {"machine.resource.getrlimit": reads((soft, hard))}


def memory(total, available, **cgroup):
    virtual = SimpleNamespace(total=total * GIB, available=available * GIB)
    limit = {name.replace("_", "."): int(size * GIB) for name, size in cgroup.items()}
    return {"machine.psutil.virtual_memory": reads(virtual), "readings.cgroup_limit": limit.get}


def address(number, family=socket.AF_INET):
    return SimpleNamespace(family=family, address=number)


def interfaces(down=(), outward="10.0.0.4", **addresses):
    up = {name: SimpleNamespace(isup=name not in down) for name in addresses}
    entries = {name: [address("aa:bb", 17), address(a)] for name, a in addresses.items()}
    return {
        "machine.psutil.net_if_addrs": reads(entries),
        "machine.psutil.net_if_stats": reads(up),
        "readings.address_outward": reads(outward),
    }


LOAD, CORES = "machine.psutil.getloadavg", "machine.cores"
FREE, EXISTS = "readings.free_bytes", "machine.os.path.isdir"
GROUP, WRITABLE = "readings.cgroup_limit", "machine.os.access"
ADAPTERS, NTP = "readings.names_in", "readings.clock_error"
NETWORK = interfaces(lo="127.0.0.1", eth0="10.0.0.4")
# fmt: off
CASES = [  # check, arguments, planted readings, state, found, fix
    ("processors", (), {LOAD: reads((3.9, 0, 0)), CORES: reads(4)}, "ok", "4 of", ""),
    ("processors", (), {LOAD: reads((4.1, 0, 0)), CORES: reads(4)}, "warn", "load 4.1", "`top`"),
    ("memory", (), memory(64, 2), "ok", "2.0 GiB available of 64.0 GiB", ""),
    ("memory", (), memory(64, 1), "warn", "1.0 GiB", "ps aux"),
    ("memory", (), memory(64, 0.25), "broken", "0.2 GiB", "ps aux"),
    ("memory", (), memory(64, 32, memory_max=8, memory_current=7), "warn",
     "1.0 GiB available of 8.0", "ps aux"),
    ("memory", (), memory(64, 32, memory_max=128, memory_current=1), "ok", "of 64.0 GiB", ""),
    ("shared_memory", (0,), {FREE: reads((0, 9))}, "ok", "need none", ""),
    ("shared_memory", (1,), {EXISTS: reads(False)}, "ok", "no /dev/shm", ""),
    ("shared_memory", (2,), {EXISTS: reads(False)}, "broken", "no /dev/shm", "--shm-size=1g"),
    ("shared_memory", (2,), {FREE: reads((GIB, 9))}, "ok", "1.0 GiB free", ""),
    ("shared_memory", (2,), {FREE: reads((GIB - 1, 9))}, "warn", "1.0 GiB free", "--shm-size=1g"),
    ("shared_memory", (2,), {FREE: reads((2**26, 9))}, "broken", "64.0 MiB free", "--shm-size=1g"),
    ("open_files", (), limits(1024), "ok", "1,024 a process, at most unlimited", ""),
    ("open_files", (), limits(1023, 4096), "warn", "1,023 a process", "ulimit -n 4096"),
    ("open_files", (), limits(127), "broken", "127 a process", "ulimit -n 65536"),
    ("open_files", (), limits(512, 512), "warn", "at most 512", "limits.conf(5)"),
    ("processes", (), limits(INFINITE) | {GROUP: reads(None)}, "ok", "unlimited more", ""),
    ("processes", (), limits(1023) | {GROUP: reads(None)}, "warn", "1,023 more", "ulimit -u"),
    ("processes", (), limits(9999) | {GROUP: {"pids.max": 100, "pids.current": 50}.get}, "broken",
     "50 more", "--pids-limit=-1"),
    ("locked_memory", (), limits(2**16) | {ADAPTERS: reads([])}, "ok", "without InfiniBand", ""),
    ("locked_memory", (), limits(INFINITE) | {ADAPTERS: reads(["mlx5_0"])}, "ok", "mlx5_0", ""),
    ("locked_memory", (), limits(GIB) | {ADAPTERS: reads(["mlx5_0"])}, "warn", "1.0 GiB",
     "memlock=-1"),
    ("locked_memory", (), limits(2**16) | {ADAPTERS: reads(["mlx5_0"])}, "broken", "0.1 MiB",
     "memlock=-1"),
    ("disk", (), {FREE: reads((10 * GIB, 1))}, "ok", "10.0 GiB free in /", ""),
    ("disk", (), {FREE: reads((10 * GIB - 1, 1))}, "warn", "10.0 GiB", "train.output=FOLDER"),
    ("disk", (), {FREE: reads((2**27, 1))}, "broken", "0.1 GiB", "train.output=FOLDER"),
    ("disk", (), {FREE: reads((10 * GIB, 0))}, "broken", "no more files", "train.output=FOLDER"),
    ("disk", (), {WRITABLE: reads(False)}, "broken", "cannot be written", "train.output=FOLDER"),
    ("temporary_disk", (), {FREE: reads((GIB, 1))}, "ok", "1.0 GiB free", ""),
    ("temporary_disk", (), {FREE: reads((GIB - 1, 1))}, "warn", "1.0 GiB free", "TMPDIR"),
    ("temporary_disk", (), {FREE: reads((2**20, 1))}, "broken", "1.0 MiB free", "TMPDIR"),
    ("interfaces", (), NETWORK, "ok", "gloo takes lo on one machine, eth0 between machines", ""),
    ("interfaces", (), interfaces(lo="127.0.0.1", outward=None), "ok", "are not reached", ""),
    ("interfaces", (), interfaces(eth0="10.0.0.4"), "broken", "no loopback", "ip link set lo up"),
    ("interfaces", (), interfaces(down=["lo"], lo="127.0.0.1"), "broken", "none is up; no loop",
     "ip link set lo up"),
]
# fmt: on


@pytest.mark.parametrize(
    ("check", "arguments", "planted", "state", "found", "fix"),
    CASES,
    ids=[f"{case[0]}-{case[3]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_reading_gives_its_state(check, arguments, planted, state, found, fix, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, reader in planted.items():
        monkeypatch.setattr(f"mtcli.core.doctor.{name}", reader)
    diagnosis = getattr(machine, check)(*arguments)
    assert diagnosis.state == state and found in diagnosis.found, diagnosis
    assert fix in diagnosis.fix and bool(diagnosis.fix) == (state != "ok"), diagnosis
    json.loads(json_text(diagnosis._asdict()))


def test_a_chosen_interface_must_be_up(monkeypatch):
    for name, reader in NETWORK.items():
        monkeypatch.setattr(f"mtcli.core.doctor.{name}", reader)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert machine.interfaces().found.endswith("gloo takes eth0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    diagnosis = machine.interfaces()
    assert diagnosis.state == "broken"
    assert diagnosis.found.endswith("GLOO_SOCKET_IFNAME=ib0, an interface that is not up")
    assert diagnosis.fix == "unset GLOO_SOCKET_IFNAME, or set it to one of lo, eth0"


NOW = 2e9  # after every installation of today


@pytest.mark.parametrize(
    ("wall", "later", "error", "state", "found"),
    [
        (NOW, 0.2, 0.016, "ok", "+0.0 ms against the monotonic clock; NTP: at most 16.0 ms wrong"),
        (NOW, 0.2, None, "ok", "+0.0 ms against the monotonic clock"),
        (NOW, 0.209, None, "ok", "+9.0 ms"),
        (NOW, 0.211, None, "warn", "+11.0 ms against the monotonic clock in 0.2 s"),
        (NOW, 0.189, 0.016, "warn", "-11.0 ms"),
        (NOW, 0.2, float("inf"), "warn", "NTP does not steer it"),
        (0.0, 0.2, 0.016, "broken", "1970-01-01 00:00 UTC is before mtcli was installed"),
    ],
)
def test_the_wall_clock_is_compared(wall, later, error, state, found, monkeypatch):
    moments = iter([(wall, 70.0), (wall + later, 70.2)])
    monkeypatch.setattr(readings, "clocks", lambda: next(moments))
    monkeypatch.setattr(readings, "clock_error", lambda: error)
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    diagnosis = machine.clock()
    assert diagnosis.state == state and found in diagnosis.found, diagnosis
    assert diagnosis.fix == ("" if state == "ok" else "sudo timedatectl set-ntp true")
    assert diagnosis.numbers["drift"] == pytest.approx(later - 0.2, abs=1e-6)


def test_readings_are_the_system_s_own():
    """Against other tools of Python's, and constants of Linux."""
    import shutil
    import time

    total, _, free = shutil.disk_usage("/")
    assert abs(readings.free_bytes("/")[0] - free) < 0.05 * total
    wall, steady = readings.clocks()
    assert abs(time.time() - wall - (time.monotonic() - steady)) < 0.005
    assert readings.kernel_file("/proc/sys/kernel/ostype") == "Linux"
    assert readings.kernel_file("/proc/none") is None and readings.names_in("/proc/none") == []
    assert "self" in readings.names_in("/proc")
    assert readings.nvidia_smi("--no-such-flag") is None


def test_the_clock_s_error_is_that_of_the_kernel_s_struct(monkeypatch):
    """The layout of adjtimex(2)'s struct on 64 bits: longs at 8, 16, 24 and 32, status at 40."""

    def libc_with(most, status):
        def adjtimex(room):
            room[24:32] = most.to_bytes(8, "little")
            room[32:40] = (77).to_bytes(8, "little")
            room[40:44] = status.to_bytes(4, "little")
            return 0

        return lambda _: SimpleNamespace(adjtimex=adjtimex)

    monkeypatch.setattr(readings.ctypes, "CDLL", libc_with(16_000, 0x2001))
    assert readings.clock_error() == pytest.approx(0.016)
    monkeypatch.setattr(readings.ctypes, "CDLL", libc_with(16_000, 0x2041))
    assert readings.clock_error() == float("inf")
    monkeypatch.setattr(readings.ctypes, "CDLL", lambda _: SimpleNamespace(adjtimex=lambda _: -1))
    assert readings.clock_error() is None
    monkeypatch.setattr(readings.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert readings.clock_error() is None


def test_a_check_that_raises_is_a_line(monkeypatch):
    def raises():
        raise PermissionError(13, "Permission denied")

    monkeypatch.delenv("MTCLI_TRACEBACK", raising=False)
    found = examine({"disk": raises, "memory": lambda: ok("fine")})
    text = "the check itself failed: PermissionError: [Errno 13] Permission denied"
    assert found == {
        "disk": broken(text, "MTCLI_TRACEBACK=1 mtcli doctor --only disk"),
        "memory": ok("fine"),
    }
    monkeypatch.setenv("MTCLI_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        examine({"disk": raises})


def test_a_bound_is_itself_enough():
    states = [least(value, 2, 1, "", "fix").state for value in (2, 1.9, 1, 0.9)]
    assert states == ["ok", "warn", "warn", "broken"]
