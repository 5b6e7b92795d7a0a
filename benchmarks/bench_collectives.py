"""What a collective of two CPU ranks costs: gloo's loopback beside shared memory, and a plain copy.

Results are compared first. The best of many calls counts: other work only ever adds time.

    python benchmarks/bench_collectives.py
"""

import argparse
import os
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing
from arguments import Arguments, write_rows

from mtcli.core.parallel.transport.process_group import gather_json
from mtcli.core.parallel.transport.same_machine import connect

KIB = (4, 128, 512, 2048, 8192)  # what each rank gives
CALLS = 60


def main() -> None:
    parser = Arguments(__doc__)
    torch.multiprocessing.spawn(measure, (2, parser.parse_args()), 2)


def measure(rank: int, world: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29560"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    memory = connect(rank, range(world), gather, 60.0)
    assert memory is not None, "the ranks share no memory"
    rows: list[dict] = []
    if rank == 0:
        print(f"{'':24}{'gloo':>10}{'shared':>10}{'ratio':>8}{'copy':>10}   microseconds")
    for kib in KIB[: 1 if args.tiny else None]:
        x, several = torch.randn(kib * 256), torch.randn(world, kib * 256)
        parts = [torch.empty_like(several) for _ in range(2)]
        sums = [torch.empty_like(x) for _ in range(2)]
        copy = best(lambda x=x, out=sums[0]: out.copy_(x))
        old = best(lambda x=x, out=parts[0]: dist.all_gather_into_tensor(out.view(-1), x))
        new = best(lambda x=x, out=parts[1]: memory.all_gather(out, x).wait())
        assert torch.equal(*parts)
        rows.append(show(rank, row(f"all-gather {kib} KiB", old, new, copy)))
        old = best(lambda r=several, out=sums[0]: dist.reduce_scatter_tensor(out, r.view(-1)))
        new = best(lambda r=several, out=sums[1]: memory.reduce_scatter(out, r).wait())
        assert torch.equal(*sums)
        rows.append(show(rank, row(f"reduce-scatter {kib} KiB", old, new, copy)))
    if rank == 0:
        write_rows(args.json, rows)
    dist.destroy_process_group()


def best(call: Callable[[], object]) -> float:
    """Seconds of the quickest call; all ranks begin each one together."""
    seconds = []
    for _ in range(CALLS):
        dist.barrier()
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return min(seconds)


def row(what: str, gloo: float, shared: float, copy: float) -> dict:
    """Microseconds, and how many times shared memory is quicker."""
    times = {"gloo": 1e6 * gloo, "shared": 1e6 * shared, "copy": 1e6 * copy}
    return {"what": what, "ratio": gloo / shared, **times}


def show(rank: int, row: dict) -> dict:
    if rank == 0:
        print("{what:24}{gloo:10.0f}{shared:10.0f}{ratio:8.1f}{copy:10.0f}".format(**row))
    return row


def gather(value: object) -> list:
    return gather_json(value, dist.group.WORLD)


if __name__ == "__main__":
    main()
