"""Which device a published run used: by the name that a source prints, and by its own machines
where these are not the device's usual ones.
"""

from dataclasses import replace

from mtcli.core.cost.hardware import GPUS, Device
from mtcli.core.cost.links import link

# As they stand in "NVIDIA A100-SXM4-40GB" or "Quadro RTX 5000", longer ones first.
PRINTED = {
    "gb300": "gb300",
    "gb200": "gb200",
    "b300": "b300",
    "b200": "b200",
    "h200": "h200",
    "h100": "h100",
    "a100": "a100-80gb",
    "v100": "v100-32gb",
    "rtx5000": "rtx-5000",
}

_A100, _H100 = GPUS["a100-80gb"], GPUS["h100"]
# 4 NVLinks between GPUs, 4 Omni-Path links of 100 Gb/s for 8 of them (BigScience, tr11-176B-ml).
_JEAN_ZAY = replace(_A100, link=link("nvlink", 4 * 25.0), network=link("infiniband", 4 * 12.5 / 8))
# 96 GB of HBM2e at 2.4 TB/s, 500 W of 700 (torchtitan, benchmarks/llama3_h100_202412): power goes
# with the cube of the clock, which voltage follows.
_GRAND_TETON = replace(
    _H100,
    memory_bytes=96e9,
    memory_bandwidth=2.4e12,
    sustained=_H100.sustained * (500 / 700) ** (1 / 3),
)

SITES = {
    ("bigscience", "a100-80gb"): _JEAN_ZAY,
    ("bloom", "a100-80gb"): _JEAN_ZAY,
    ("torchtitan", "h100"): _GRAND_TETON,
}


def device_of(gpu: str, source: str) -> Device:
    """The device that a source calls `gpu`.

    Raises ValueError where it is none of those that are known.
    """
    letters = "".join(c for c in gpu.lower() if c.isalnum())
    name = next((name for part, name in PRINTED.items() if part in letters), None)
    if name is None:
        raise ValueError(f"no device for {gpu!r}")
    if name == "a100-80gb" and "40" in letters.partition("a100")[2]:
        name = "a100-40gb"
    for (word, usual), site in SITES.items():
        if word in source.lower() and usual == name:
            return site
    return GPUS[name]
