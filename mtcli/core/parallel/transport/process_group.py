"""What carries the collectives of some ranks: a process group, or memory that they share."""

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
    """Something under way."""

    def wait(self) -> Any:
        """Returns when it is done."""

    def is_completed(self) -> bool:
        """Whether it is done."""


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
        """x [n, ...] on each rank -> out [...], row `rank` of the sum.

        Gloo's own is an all-reduce, which sends twice as much.
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
        """x of rank `root` -> x of all."""
        return dist.broadcast(x, self.ranks[root], self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def reduce(self, x: Tensor, root: int) -> PendingWork:
        """The sum over the ranks -> x of rank `root`; that of others is lost."""
        return dist.reduce(x, self.ranks[root], dist.ReduceOp.SUM, self.group, async_op=True)  # type: ignore[no-any-return]  # torch

    def shift(self, out: Tensor, x: Tensor) -> PendingWork:
        """x of each rank -> out of the next one; the last one's goes to the first."""
        after = self.ranks[(self.rank + 1) % len(self.ranks)]
        previous_rank = self.ranks[self.rank - 1]
        ops = [
            dist.P2POp(dist.isend, x, after, self.group),
            dist.P2POp(dist.irecv, out, previous_rank, self.group),
        ]
        return _Several(dist.batch_isend_irecv(ops), x)


class _Several:
    """Works that count as one; what they read stays in memory until then."""

    def __init__(self, works: list[dist.Work], buffer: Tensor) -> None:
        self.works, self.kept = works, buffer

    def wait(self) -> None:
        """Returns when all are done."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self.works)


class _Summed:
    """A work that brings rows, and the sum of them; what it sends stays in memory until then."""

    def __init__(self, work: dist.Work, rows: Tensor, out: Tensor, sent: Tensor) -> None:
        self.work, self.rows, self.out, self.kept = work, rows, out, sent

    def wait(self) -> None:
        """Returns when the sum is there."""
        self.work.wait()
        torch.sum(self.rows, 0, out=self.out)

    def is_completed(self) -> bool:
        """Whether the rows are there."""
        return self.work.is_completed()


# Starts collectives of n ranks; every tensor is contiguous.
Transport = ProcessGroupTransport | SharedMemory


def transport_between(
    group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, timeout: float
) -> Transport:
    """Shared memory for CPU ranks of one machine, else the network. Collective over the group.

    A rank waits `timeout` seconds for another one.
    """
    network = ProcessGroupTransport(group, ranks, rank)
    if dist.get_backend(group) != "gloo":
        return network
    return connect(rank, ranks, lambda value: gather_json(value, group), timeout) or network


def first_bytes(data: bytes | None, group: dist.ProcessGroup) -> bytes | None:
    """The bytes of the first rank that has any, on every rank; None where none has."""
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
    """Where the tensors are that a group exchanges."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in rank order, on every rank; what JSON can say, with tuples as lists.

    torch's own gathering of objects unpickles, and so runs, what arrives on a socket.
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
