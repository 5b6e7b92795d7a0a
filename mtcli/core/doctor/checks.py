"""Lists the checks of `doctor` by name, in the order in which they are shown."""

from functools import partial

from mtcli.core.doctor import machine
from mtcli.core.doctor.devices import devices, gemm, links, num_gpus
from mtcli.core.doctor.diagnosis import Check
from mtcli.core.doctor.installation import EXTRAS, extra, versions
from mtcli.core.doctor.rank_exchange import NAME, exchange_of_new_ranks


def checks(nproc: int, device: str) -> dict[str, Check]:
    """Every check, for `nproc` ranks of the exchange and `--device`."""
    gpus = num_gpus(device)
    return {
        "machine": machine.processors,
        "memory": machine.memory,
        "devices": partial(devices, device),
        "links": partial(links, device),
        "versions": partial(versions, gpus),
        **{f"extra-{name}": partial(extra, name) for name in EXTRAS},
        "shared-memory": partial(machine.shared_memory, gpus),
        "open-files": machine.open_files,
        "processes": machine.processes,
        "locked-memory": machine.locked_memory,
        "disk": machine.disk,
        "temporary-disk": machine.temporary_disk,
        "clock": machine.clock,
        "interfaces": machine.interfaces,
        "gemm": partial(gemm, device),
        NAME: partial(exchange_of_new_ranks, nproc, gpus, device),
    }
