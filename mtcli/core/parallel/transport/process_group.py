"""The transport of an axis: a process group, or shared memory (`shared_memory.py`)."""

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.parallel.transport.same_machine import connect
from mtcli.core.parallel.transport.shared_memory import SharedMemory

# torch 2.13 renames two collectives and deprecates the old names, which are all that 2.11 has.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingWork(Protocol):
    """An operation in flight."""

    def wait(self) -> Any:
        """Waits until the operation is complete."""

    def is_completed(self) -> bool:
        """Whether the operation is complete."""


class ProcessGroupTransport:
    """Starts collectives of a process group: NCCL's or gloo's."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int) -> None:
        self.group, self.ranks, self.rank = group, ranks, rank

    def all_reduce(self, x: Tensor, op: Any) -> PendingWork:
        """The sum (or `op`) over the ranks, in place."""
        return dist.all_reduce(x, op, self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def all_gather(self, out: Tensor, x: Tensor) -> PendingWork:
        """x [...] on each rank -> out [n, ...]."""
        return _gather_into(out.view(-1), x.view(-1), self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def reduce_scatter(self, out: Tensor, x: Tensor) -> PendingWork:
        """Starts x [n, ...] on each rank -> out [...], row `rank` of the sum.

        On gloo it is an all-to-all and a local sum: gloo's own is an all-reduce, which sends twice
        as much.
        """
        if dist.get_backend(self.group) == "gloo":
            rows = torch.empty_like(x).view(len(self.ranks), out.numel())
            work = dist.all_to_all_single(rows, x.view_as(rows), group=self.group, async_op=True)
            return _Summed(work, rows, out.view(-1), x)
        return _scatter_from(out.view(-1), x.view(-1), group=self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def all_to_all(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int]
    ) -> PendingWork:
        """x [sum(sent), ...] -> out [sum(received), ...]: sent[i] rows go to rank i."""
        return dist.all_to_all_single(out, x, received, sent, self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def broadcast(self, x: Tensor, root: int) -> PendingWork:
        """Overwrites x by that of rank `root`."""
        return dist.broadcast(x, self.ranks[root], self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def reduce(self, x: Tensor, root: int) -> PendingWork:
        """Sums x over the ranks into rank `root`'s x; the other ranks' x becomes undefined."""
        return dist.reduce(x, self.ranks[root], dist.ReduceOp.SUM, self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def shift(self, out: Tensor, x: Tensor) -> PendingWork:
        """x of each rank -> out of the next rank, and of the last rank -> out of the first."""
        after = self.ranks[(self.rank + 1) % len(self.ranks)]
        previous_rank = self.ranks[self.rank - 1]
        ops = [
            dist.P2POp(dist.isend, x, after, self.group),
            dist.P2POp(dist.irecv, out, previous_rank, self.group),
        ]
        return _Several(dist.batch_isend_irecv(ops), x)


class _Several:
    """Several works as one; keeps alive the tensors that they read."""

    def __init__(self, works: list[dist.Work], buffer: Tensor) -> None:
        self.works, self.kept = works, buffer

    def wait(self) -> None:
        """Waits until all are complete."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class _Summed:
    """A work that receives rows, and their sum; keeps alive what it sends."""

    def __init__(self, work: dist.Work, rows: Tensor, out: Tensor, sent: Tensor) -> None:
        self.work, self.rows, self.out, self.kept = work, rows, out, sent

    def wait(self) -> None:
        """Waits for the rows and sums them."""
        self.work.wait()
        torch.sum(self.rows, 0, out=self.out)

    def is_completed(self) -> bool:
        """Whether the rows have arrived."""
        return self.work.is_completed()


# Starts collectives of n ranks; every tensor is contiguous.
Transport = ProcessGroupTransport | SharedMemory


def transport_between(
    group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, timeout: float
) -> Transport:
    """The transport of a group: shared memory for CPU ranks of one machine, else the process group.

    Collective over the group. Ranks wait `timeout` seconds for each other.
    """
    network = ProcessGroupTransport(group, ranks, rank)
    if dist.get_backend(group) != "gloo":
        return network
    return connect(rank, ranks, lambda value: gather_json(value, group), timeout) or network


def first_bytes(data: bytes | None, group: dist.ProcessGroup) -> bytes | None:
    """Returns, on every rank, the bytes of the first rank that has any; None if none has."""
    device = _device(group)
    rank, size = group.rank(), group.size()
    first = torch.tensor([size if data is None else rank], device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group)
    if (source := int(first)) == size:
        return None
    length = torch.tensor([len(data or b"")], device=device)
    dist.broadcast(length, group=group, group_src=source)
    if rank == source:
        x = torch.frombuffer(bytearray(data or b""), dtype=torch.uint8).to(device)
    else:
        x = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(x, group=group, group_src=source)
    return bytes(x.cpu().numpy())


def _device(group: dist.ProcessGroup) -> torch.device:
    """The device of the tensors that a group exchanges."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns every rank's JSON value, in rank order, on every rank; tuples become lists.

    torch's own gathering of objects unpickles data from a socket, which can run code.
    """
    device = _device(group)
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], device=device)
    sizes = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(sizes, length, group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(x.cpu().numpy())) for x in texts]
