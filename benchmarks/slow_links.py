"""Ranks in network namespaces of this machine, joined by links of a rate: `tc` makes them slow.

Each rank has a veth pair to a bridge, with a token bucket on both of its ends, so that it sends and
receives at most as fast as the link says, and gloo goes through the kernel's network. It needs
Linux, root and iproute2.

What makes such links slower than they say: a bucket that is smaller than the 64 KiB that TCP hands
to a device at once cuts each into frames, and a processor's time for 1,500-byte frames is more than
a link of 1 Gbit/s takes. So frames are of 9,000 bytes, and a bucket is a millisecond of the rate. A
queue that is shorter than what two neighbours send one at once drops frames, and TCP then waits for
200 ms: it holds four seconds of the rate. BBR, where a host has it, sends as fast as it has
measured, which is too little after a pause: TCP is Reno's, which every kernel allows.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BRIDGE, HUB, PORT = "mtcli-br", "mtcli-hub", 29517
FRAME = 9000  # bytes: jumbo frames
BURST_SECONDS = 1e-3  # of a link, that it passes at once


def missing() -> str:
    """What this machine lacks to make namespaces; empty where it has all."""
    lacks = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if lacks:
        return f"no {' and no '.join(lacks)} (iproute2, util-linux)"
    if os.geteuid():
        return "not root"
    try:
        with linked(2, 1.0):
            return ""
    except subprocess.CalledProcessError as error:  # a container's root may not make any
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def linked(ranks: int, gbits: float) -> Iterator[list[list[str]]]:
    """Joins namespaces by links of a rate; yields each one's prefix of a command."""
    with ExitStack() as undo:
        _ip(f"netns add {HUB}")
        undo.callback(_ip, f"netns del {HUB}")
        _ip(f"-n {HUB} link add {BRIDGE} type bridge")
        _ip(f"-n {HUB} link set {BRIDGE} up")
        for rank in range(ranks):
            name = f"mtcli-{rank}"
            undo.callback(shutil.rmtree, _names(name, ranks))
            _ip(f"netns add {name}")
            undo.callback(_ip, f"netns del {name}")
            _ip(f"link add eth0 netns {name} type veth peer name port{rank} netns {HUB}")
            _ip(f"-n {name} address add 10.77.0.{rank + 1}/24 dev eth0")
            for where, device in ((name, "eth0"), (HUB, f"port{rank}")):
                _ip(f"-n {where} link set {device} up mtu {FRAME}")
                burst = max(2 * FRAME, round(gbits * 1e9 / 8 * BURST_SECONDS))
                shape = f"rate {gbits * 1000:g}mbit burst {burst} latency 4000ms"
                _run(["tc", "-n", where, *f"qdisc add dev {device} root tbf {shape}".split()])
            _ip(f"-n {name} link set lo up")
            _ip(f"netns exec {name} sysctl -w net.ipv4.tcp_congestion_control=reno")
            _ip(f"-n {HUB} link set port{rank} master {BRIDGE}")
        yield [["ip", "netns", "exec", f"mtcli-{rank}"] for rank in range(ranks)]


def train(prefixes: Sequence[list[str]], arguments: Sequence[str], log: Path) -> None:
    """Runs `mtcli train` with a rank in each namespace, whose memory is allocated as `--nproc` has
    it; its words go into a file."""
    from mtcli.core.runtime.launch import ALLOCATOR

    world, processes, cores = len(prefixes), [], sorted(os.sched_getaffinity(0))
    with log.open("w") as file:
        for rank, prefix in enumerate(prefixes):
            # Each is a machine of its own: ranks of one would meet on loopback.
            told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            told |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
            told |= {"OMP_NUM_THREADS": 1}
            env = os.environ | ALLOCATOR | {name: str(value) for name, value in told.items()}
            core = ["taskset", "-c", str(cores[rank % len(cores)])]  # one thread, as of --nproc
            command = [*prefix, *core, sys.executable, "-m", "mtcli", "train", *arguments]
            processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"error: ranks ended with {codes}\n{log.read_text()[-2000:]}")


def _names(namespace: str, ranks: int) -> Path:
    """Writes what `ip netns exec` shows as /etc/hosts, and returns its folder.

    torch asks for the name of each peer by its address in IPv6, and a server for names, of which
    there is none, would let it wait.
    """
    folder = Path("/etc/netns") / namespace
    folder.mkdir(parents=True, exist_ok=True)
    named = {"127.0.0.1": "localhost"} | {f"10.77.0.{i + 1}": f"mtcli-{i}" for i in range(ranks)}
    lines = [f"{form}{at} {name}\n" for at, name in named.items() for form in ("", "::ffff:")]
    (folder / "hosts").write_text("".join(lines))
    return folder


def _ip(words: str) -> None:
    _run(["ip", *words.split()])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
