"""Ranks in network namespaces of this machine, joined by links of a rate: `tc` makes them slow.

Each rank has a veth pair to a bridge, with a token bucket on both of its ends, so that it sends and
receives at most as fast as the link says, and gloo goes through the kernel's network. It needs
Linux, root and iproute2.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BRIDGE, HUB, PORT = "mtcli-br", "mtcli-hub", 29517
LARGEST_BURST = 64 * 1024  # bytes that a link passes at once


def missing() -> str:
    """What this machine lacks to make namespaces; empty where it has all."""
    lacks = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if lacks:
        return f"no {' and no '.join(lacks)} (iproute2, util-linux)"
    return "" if os.geteuid() == 0 else "not root"


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
            # Every rank's name, as `ip netns exec` shows it: a lookup would wait for a server.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            undo.callback(shutil.rmtree, hosts.parent)
            lines = [f"10.77.0.{i + 1} mtcli-{i}" for i in range(ranks)]
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
            _ip(f"netns add {name}")
            undo.callback(_ip, f"netns del {name}")
            _ip(f"link add eth0 netns {name} type veth peer name port{rank} netns {HUB}")
            _ip(f"-n {name} address add 10.77.0.{rank + 1}/24 dev eth0")
            for where, device in ((name, "eth0"), (HUB, f"port{rank}")):
                _ip(f"-n {where} link set {device} up")
                shape = f"rate {gbits * 1000:g}mbit burst {LARGEST_BURST} latency 400ms"
                _run(["tc", "-n", where, *f"qdisc add dev {device} root tbf {shape}".split()])
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {HUB} link set port{rank} master {BRIDGE}")
        yield [["ip", "netns", "exec", f"mtcli-{rank}"] for rank in range(ranks)]


def train(prefixes: Sequence[list[str]], arguments: Sequence[str], log: Path) -> None:
    """Runs `mtcli train` with a rank in each namespace; its words go into a file."""
    world, processes, cores = len(prefixes), [], sorted(os.sched_getaffinity(0))
    with log.open("w") as file:
        for rank, prefix in enumerate(prefixes):
            told = {
                "RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world,
            }
            told |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
            told |= {"OMP_NUM_THREADS": 1}
            env = os.environ | {name: str(value) for name, value in told.items()}
            core = ["taskset", "-c", str(cores[rank % len(cores)])]  # one thread, as of --nproc
            command = [*prefix, *core, sys.executable, "-m", "mtcli", "train", *arguments]
            processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"error: ranks ended with {codes}\n{log.read_text()[-2000:]}")


def _ip(words: str) -> None:
    _run(["ip", *words.split()])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
