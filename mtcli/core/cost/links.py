"""The links that join devices: by kind their latency, and for each device its own rate.

Latencies are those with which NCCL chooses its algorithms (src/graph/tuning.cc, hwLat: ring, LL):
for its network that of InfiniBand, which RoCE shares. Ethernet alone is taken as TCP through the
kernel, 10 to 30 us one way.
"""

import re
from dataclasses import dataclass

LATENCY = {
    "nvlink": 0.6e-6,
    "pcie": 1.0e-6,
    "infiniband": 2.7e-6,
    "roce": 2.7e-6,
    "ethernet": 20e-6,
}
HINT = f"KIND-RATE, such as ethernet-100: {', '.join(LATENCY)}, and Gb/s per GPU and way"


@dataclass(frozen=True)
class Link:
    """A link of one GPU: bytes/s one way, and seconds until the first byte is there."""

    bandwidth: float
    latency: float


def link(kind: str, gigabytes: float) -> Link:
    """A link of a kind and its GB/s one way, per GPU."""
    return Link(gigabytes * 1e9, LATENCY[kind])


def read_link(text: str) -> Link | None:
    """The link of `KIND-RATE`, in Gb/s; None where it is not one."""
    found = re.fullmatch(r"([a-z]+)-(\d+(?:\.\d+)?)", text)
    if found is None or found[1] not in LATENCY or float(found[2]) <= 0.0:
        return None
    return link(found[1], float(found[2]) / 8.0)
