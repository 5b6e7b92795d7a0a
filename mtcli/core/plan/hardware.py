"""Devices by name: peak rates, memory and links, each number with its source.

Rates are those of runtime/peak_flops.py, links are per GPU and one way, in bytes/s. `sustained` is
the share of the datasheet's matrix rate that a large GEMM reaches at the board's power limit.
Latencies of links are those with which NCCL chooses its algorithms (src/graph/tuning.cc, hwLat:
ring, LL): for its network that of InfiniBand, which RoCE shares. Ethernet alone is taken as TCP
through the kernel, 10 to 30 us one way.
"""

import os
import re
import timeit
from dataclasses import dataclass, replace
from functools import cache
from time import process_time
from typing import Literal

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.synonyms import closest
from mtcli.core.plan.calibration import Calibration, calibrated
from mtcli.core.plan.physics import BLACKWELL, PHYSICS, Physics, host_physics
from mtcli.core.runtime.launch import cores
from mtcli.core.runtime.peak_flops import DENSE_TFLOPS, computes_in

TERA, GIGA, GIB = 1e12, 1e9, 2**30
USABLE = 0.95  # the rest goes to error correction's rows and to gaps between allocated blocks
LATENCY = {
    "nvlink": 0.6e-6,
    "pcie": 1.0e-6,
    "infiniband": 2.7e-6,
    "roce": 2.7e-6,
    "ethernet": 20e-6,
}
# Of a CPU's ranks, which share memory: bytes moved for a byte that goes from one to another, which
# is copied twice, and a collective's operations of the host.
LINK_BYTES, LINK_CALLS = 4.0, 10.0
CALL = 2e-6  # seconds of an operation of torch's, where it was not measured
ELEMENT = 1e-9  # and of an element of GELU on all cores
NETWORK_DEVICE = 2.3
"""times the processor time of a byte over loopback that one through a network device takes: 2.1 to
2.6 at 10 Gbit/s (benchmarks/bench_sockets.py)"""
HINT = f"KIND-RATE, such as ethernet-100: {', '.join(LATENCY)}, and Gb/s per GPU and way"


@dataclass(frozen=True)
class Link:
    """A link of one GPU: bytes/s one way, and its latency in seconds."""

    bandwidth: float
    latency: float


def link(kind: str, gigabytes: float) -> Link:
    """A link of a kind of `gigabytes` GB/s one way, per GPU."""
    return Link(gigabytes * 1e9, LATENCY[kind])


def read_link(text: str) -> Link | None:
    """Parses the link `KIND-RATE`, in Gb/s; None for other text."""
    match = re.fullmatch(r"([a-z]+)-(\d+(?:\.\d+)?)", text)
    if match is None or match[1] not in LATENCY or float(match[2]) <= 0.0:
        return None
    return link(match[1], float(match[2]) / 8.0)


@dataclass(frozen=True, eq=False)  # a device is itself, and so may key a cache
class Device:
    """One accelerator, and the links that connect it to others."""

    name: str
    flops: dict[str, float]  # FLOP/s by precision
    sustained: float
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    processors: int  # streaming multiprocessors, or cores
    node_size: int  # GPUs that share the fast link
    link: Link  # within a node: NVLink, or PCIe where there is none
    network: Link  # between nodes: InfiniBand or Ethernet
    watts: float = 0.0  # the board's power limit; 0 where it is not known
    reserved_bytes: float = 1.5 * GIB  # CUDA context, NCCL buffers, library workspaces
    source: str = ""
    rates: Literal["datasheet", "calibration", "roofline"] = "datasheet"  # where they come from
    crowd: float = 1.0  # CPUs: ranks on a core
    widens: bool = False  # makes bfloat16's GEMMs in float32, as some CPUs do
    physics: Physics = PHYSICS  # the shares of the rates that a step reaches
    measured: Calibration | None = None  # of this machine's CPU, by `mtcli calibrate`

    @property
    def usable_bytes(self) -> float:
        """The memory that a plan may fill: the share USABLE of it."""
        return USABLE * self.memory_bytes

    @property
    def reached_bandwidth(self) -> float:
        """Bytes/s of memory that a step's kernels reach."""
        return self.memory_bandwidth * self.physics.memory

    @property
    def reached_link(self) -> float:
        """Bytes/s within a node that a step's collectives reach."""
        return self.link.bandwidth * self.physics.link

    @property
    def reached_network(self) -> float:
        """Bytes/s between nodes that a step's collectives reach, per GPU."""
        return self.network.bandwidth * self.physics.network

    def peak(self, precision: str) -> float:
        """FLOP/s of GEMMs in a precision; one that the device lacks runs as the next wider one."""
        return self.flops[self.computes_in(precision)]

    def computes_in(self, precision: str) -> str:
        """The precision at whose rate GEMMs of `precision` run."""
        return computes_in(self.flops, precision)

    @property
    def half_precision(self) -> str:
        """The precision for training in 16 bits: bf16, or fp16 on GPUs without bf16."""
        return "fp16" if "fp16" in self.flops and "bf16" not in self.flops else "bf16"


def _gpu(
    name: str,
    board: tuple[float, float, float, int, float],
    links: tuple[int, float, float],
    source: str,
    within: str = "nvlink",
) -> Device:
    """Builds a GPU from (sustained share, GiB, GB/s, processors, watts) and (node size, GB/s within
    a node, GB/s between nodes)."""
    sustained, gib, bandwidth, processors, watts = board
    node_size, inside, between = links
    return Device(
        name=name,
        flops={precision: rate * TERA for precision, rate in DENSE_TFLOPS[name].items()},
        sustained=sustained,
        memory_bytes=gib * GIB,
        memory_bandwidth=bandwidth * GIGA,
        processors=processors,
        watts=watts,
        node_size=node_size,
        link=link(within, inside),
        network=link("infiniband", between),
        source=source,
        physics=BLACKWELL if "nvfp4" in DENSE_TFLOPS[name] else PHYSICS,
    )


# fmt: off
GPUS = {device.name: device for device in (
    _gpu("v100-32gb", (0.75, 32, 900, 80, 350),
         (16, 150.0, 6.25), "NVIDIA V100 datasheet; DGX-2: NVSwitch, 8 x 100 Gb/s for 16 GPUs"),
    _gpu("a100-40gb", (0.88, 40, 1555, 108, 400),
         (8, 300.0, 25.0), "NVIDIA A100 datasheet; NVLink3 600 GB/s both ways; HDR 200 Gb/s a GPU"),
    _gpu("a100-80gb", (0.88, 80, 2039, 108, 400),
         (8, 300.0, 25.0), "NVIDIA A100 datasheet; NVLink3 600 GB/s both ways; HDR 200 Gb/s a GPU"),
    _gpu("h100", (0.75, 80, 3352, 132, 700), (8, 450.0, 50.0),
         "NVIDIA H100 SXM datasheet; NVLink4 900 GB/s both ways; NDR 400 Gb/s a GPU"),
    _gpu("h200", (0.79, 141, 4800, 132, 700), (8, 450.0, 50.0),
         "NVIDIA H200 datasheet; 769-798 TFLOP/s measured at 8192^3 in bf16"),
    _gpu("b200", (0.75, 180, 8000, 148, 1000), (8, 900.0, 50.0),
         "NVIDIA DGX B200 datasheet; NVLink5 1.8 TB/s both ways; NDR 400 Gb/s a GPU"),
    _gpu("b300", (0.75, 270, 8000, 148, 1100), (8, 900.0, 100.0),
         "NVIDIA DGX B300 datasheet; NVLink5 1.8 TB/s both ways; XDR 800 Gb/s a GPU"),
    _gpu("gb200", (0.75, 186, 8000, 152, 1200), (72, 900.0, 50.0),
         "NVIDIA GB200 NVL72 datasheet; 72 GPUs in one NVLink domain; NDR 400 Gb/s a GPU"),
    _gpu("gb300", (0.75, 279, 8000, 152, 1400), (72, 900.0, 100.0),
         "NVIDIA GB300 NVL72 datasheet; 72 GPUs in one NVLink domain; XDR 800 Gb/s a GPU"),
    _gpu("rtx-5000", (0.75, 16, 448, 48, 230), (4, 12.0, 1.75),
         "Quadro RTX 5000 datasheet; PCIe 3 x16; TACC Frontera: FDR 56 Gb/s for 4 GPUs", "pcie"),
)}
# fmt: on

NAMES = (*GPUS, "cpu")


def gib(count: float) -> str:
    """Bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def device_named(text: str) -> Device:
    """The device of a name; `cpu` is this machine, whose rates `for_run` measures.

    Changes may follow, as in `h100,network=ethernet-100,link=pcie-512,node=4`: the links between
    and within nodes, and the GPUs of a node. `cpu,network=ethernet-1` is this machine with that
    link between ranks, or between every `node` of them (network namespaces). Raises MtcliError with
    all unknown names.
    """
    name, *changes = text.split(",")
    if name not in NAMES:
        hint = f"one of {', '.join(NAMES)}{closest(name, NAMES)}"
        raise wrong(f"there is no device named {name!r}", hint, "--device")
    if name == "cpu":
        return _machines(text, changes) if changes else HERE
    return _joined(GPUS[name], text, changes) if changes else GPUS[name]


def _joined(device: Device, text: str, changes: list[str]) -> Device:
    joined: dict[str, Link | int] = {}
    problems, fields = [], set[str]()
    for change in changes:
        field, _, value = change.partition("=")
        if field in fields:
            problems.append(Problem(f"{field} is said twice", "once", "--device"))
        fields.add(field)
        if field in ("network", "link") and (new_link := read_link(value)):
            joined[field] = new_link
        elif field == "node" and value.isdecimal() and int(value) > 0:
            joined["node_size"] = int(value)
        elif field in ("network", "link"):
            problems.append(Problem(f"{value!r} is no link", HINT, "--device"))
        else:
            hint = "network=KIND-RATE, link=KIND-RATE or node=GPUS"
            problems.append(Problem(f"{change!r} changes no link", hint, "--device"))
    if problems:
        raise MtcliError(*problems)
    return replace(device, name=text, **joined)  # type: ignore[arg-type]


def _machines(text: str, changes: list[str]) -> Device:
    """This machine, with a network between its ranks."""
    if any(change.startswith("link=") for change in changes):
        hint = "network=KIND-RATE, and node=RANKS on a machine"
        raise wrong("the links within this machine are measured", hint, "--device")
    return replace(_joined(replace(HERE, node_size=1), text, changes), name="cpu")


def for_run(device: Device, config: RunConfig, world: int, calibrate: bool = True) -> Device:
    """The device of one rank of a run: a GPU, or its share of this machine with measured rates.
    Without `calibrate` those are quick rates, measured with numpy."""
    if device.name != "cpu":
        return device
    measured = device.measured or (calibrated(config, world) if calibrate else None)
    ranks = min(world, cores())
    rates, crowd = measured or quick_rates(ranks), world / ranks
    call, network = rates.call * crowd, device.network
    bandwidth = rates.memory_bandwidth / crowd
    return replace(
        device,
        flops={name: rates.flops / crowd for name in {"fp32", config.train.precision}},
        memory_bytes=device.memory_bytes / world,
        memory_bandwidth=bandwidth,
        processors=max(1, cores() // ranks),
        link=Link(bandwidth / LINK_BYTES, LINK_CALLS * call),
        # a core is busy with a byte, too: it sends no more than it can
        network=replace(
            network, bandwidth=min(network.bandwidth, rates.socket / NETWORK_DEVICE / crowd)
        ),
        rates="calibration" if measured else "roofline",
        crowd=crowd,
        widens=rates.widens,
        physics=host_physics(call, rates.element * crowd),
    )


@cache
def quick_rates(ranks: int) -> Calibration:
    """Measures a rank's share of this machine in 0.1 s without torch: numpy's GEMM with all
    threads, its copy, and bytes through a socket.

    Each is the best of several tries of a millisecond, some of which other programs do not disturb:
    under a load of 4 on 2 cores the best of 30 GEMMs of size 512 was that of an idle machine, of
    size 1024 not.
    """
    import numpy as np

    side, rows = 512, 2_000_000
    a = np.ones((side, side), dtype=np.float32)
    source, target = np.ones(rows, dtype=np.float32), np.empty(rows, dtype=np.float32)
    gemm = min(timeit.repeat(lambda: a @ a, number=1, repeat=30))
    copy = min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=10))
    return Calibration(
        flops=2.0 * side**3 / gemm / ranks,
        memory_bandwidth=2.0 * source.nbytes / copy / ranks,
        element=ELEMENT / ranks,
        call=CALL,
        socket=socket_rate(),
        widens=False,
    )


def socket_rate() -> float:
    """Measures bytes/s from one thread to another through a socket, per processor second of
    both."""
    data = memoryview(bytes(2**23))
    tries = timeit.repeat(lambda: send_over_loopback(data), timer=process_time, number=1, repeat=10)
    return len(data) / min(tries)


def send_over_loopback(data: memoryview) -> None:
    """Sends bytes from one thread to another by TCP, as ranks without shared memory do."""
    from socket import create_connection, create_server
    from threading import Thread

    with create_server(("127.0.0.1", 0)) as server:
        client, (connection, _) = create_connection(server.getsockname()), server.accept()
    with client, connection:
        sender = Thread(target=client.sendall, args=(data,))
        sender.start()
        left, buffer = len(data), bytearray(2**20)
        while left:
            left -= connection.recv_into(buffer)
        sender.join()


# rates are those of one core of 2020, which no plan is made with
HERE = Device(
    name="cpu",
    flops={"fp64": 0.05 * TERA, "fp32": 0.1 * TERA},
    sustained=1.0,
    memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    memory_bandwidth=10.0 * GIGA,
    processors=os.cpu_count() or 1,
    node_size=2**20,  # all ranks are of one machine
    link=Link(1.5 * GIGA, 1e-6),
    network=link("ethernet", 0.125),
    reserved_bytes=0.33 * GIB,  # of small models: what profile says of `process` less its `peak`
    source="this machine",
)
