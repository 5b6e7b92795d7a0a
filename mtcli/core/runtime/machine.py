"""How the processes of a run use the machine they are on."""

import os

# glibc gives freed blocks back to the system and faults them in again at the next step; keeping
# them made a training step 1.25 to 1.5 times faster (benchmarks/bench_train.py). Read at exec.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
