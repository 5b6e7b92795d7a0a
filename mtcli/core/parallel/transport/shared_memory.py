"""Collectives among CPU ranks of one machine, through memory that they share.

Gloo's loopback takes every byte through the kernel four times. Here a rank writes its data into its
own shared memory, notifies its peers by one byte on a socket, and reads theirs. Two ranks, 2 MiB
each, one core per rank: all-gather 1.15 -> 0.42 ms, reduce-scatter 2.51 -> 0.38 ms
(benchmarks/bench_collectives.py).

A collective is one or more rounds: write, notify, wait for all, read. Round w uses slot w % SLOTS
of a rank's memory. At most two rounds are in flight, and they end in the order in which they began.
A rank that begins round w has been notified of round w - 2 by every peer, and a peer that wrote
round w - 2 had read round w - 4: so the slot is free.
"""

import mmap
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

SLOTS, SLOT_BYTES = 4, 2**22
SMALL_BYTES = 2**16  # an all-reduce of at most this is read whole by everyone, in one round
ALIGNMENT = 64

Peers = Mapping[int, socket.socket]
DONE = object()
Rounds = Iterator[None]  # yields when this rank has written, and goes on when all ranks have


class SharedMemory:
    """The memory shared by some ranks, this one being number `rank`; built by
    `same_machine.connect`."""

    def __init__(
        self, rank: int, names: Sequence[int], memory: list[mmap.mmap], peers: Peers
    ) -> None:
        """`names` are the ranks in errors, `memory` every rank's memory, `peers` the connections to
        the others."""
        self.rank, self.size, self.names, self.peers = rank, len(memory), names, peers
        self.slots = [torch.frombuffer(m, dtype=torch.uint8).view(SLOTS, -1) for m in memory]
        self.heard = dict.fromkeys(peers, 0)  # rounds that each peer has written
        self.written = 0
        self.under_way: deque[Operation] = deque()

    def all_gather(self, out: Tensor, x: Tensor) -> "Operation":
        """Starts x [...] on each of n ranks -> out [n, ...]."""
        flat = x.reshape(-1)
        return self._start(self._gathered(out.view(self.size, -1), flat), len(_parts(flat)))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> "Operation":
        """Starts x [n, ...] on each of n ranks -> out [...], row `rank` of the sum."""
        rows = x.view(self.size, -1)
        return self._start(self._scattered(out.view(-1), rows), len(_parts(rows)))

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> "Operation":
        """Starts the sum or maximum over all ranks, in place; bitwise equal on every rank."""
        combines: dict[dist.ReduceOp.RedOpType, Callable[..., Tensor]]
        combines = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
        combine = combines[op]
        flat = x.view(-1)
        if flat.numel() * flat.element_size() <= SMALL_BYTES:
            return self._start(self._reduced(flat, combine), 1)
        return self._start(self._reduced_in_parts(flat, combine), 2 * len(_parts(flat)))

    def all_to_all(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int]
    ) -> "Operation":
        """Starts x [sum(sent), ...] -> out [sum(received), ...]: sent[i] rows go to rank i."""
        several = 2  # how many rounds is known when all have said what they send
        return self._start(self._exchanged(_split(out, received), _split(x, sent)), several)

    def broadcast(self, x: Tensor, root: int) -> "Operation":
        """Starts overwriting x by that of rank `root`."""
        flat = x.view(-1)
        return self._start(self._broadcasted(flat, root), len(_parts(flat)))

    def reduce(self, x: Tensor, root: int) -> "Operation":
        """Starts the sum over all ranks -> x of rank `root`."""
        flat = x.view(-1)
        return self._start(self._summed_at(flat, root), len(_parts(flat)))

    def shift(self, out: Tensor, x: Tensor) -> "Operation":
        """Starts x of each rank -> out of the next rank, and of the last rank -> out of the
        first."""
        flat = x.reshape(-1)
        return self._start(self._shifted(out.view(-1), flat), len(_parts(flat)))

    def _gathered(self, out_nN: Tensor, x_N: Tensor) -> Rounds:
        for part in _parts(x_N):
            slot = self._write()
            self._view(self.rank, slot, x_N[part]).copy_(x_N[part])
            out_nN[self.rank, part] = x_N[part]
            yield
            for peer in self.peers:
                out_nN[peer, part] = self._view(peer, slot, x_N[part])

    def _scattered(self, out_N: Tensor, x_nN: Tensor) -> Rounds:
        for part in _parts(x_nN):
            slot, like = self._write(), x_nN[:, part]
            outgoing = self._view(self.rank, slot, like)
            for peer in self.peers:
                outgoing[peer] = like[peer]
            yield
            terms = [self._view(peer, slot, like)[self.rank] for peer in self.peers]
            _combine(out_N[part], [like[self.rank], *terms], torch.add)

    def _reduced(self, x_N: Tensor, combine: Callable[..., Tensor]) -> Rounds:
        slot = self._write()
        self._view(self.rank, slot, x_N).copy_(x_N)
        yield
        terms = [self._view(rank, slot, x_N) for rank in range(self.size)]
        _combine(x_N, terms, combine)

    def _reduced_in_parts(self, x_N: Tensor, combine: Callable[..., Tensor]) -> Rounds:
        """Each rank combines 1/n of a part, which all ranks then read."""
        for part in _parts(x_N):
            slot, like = self._write(), x_N[part]
            self._view(self.rank, slot, like).copy_(like)
            yield
            share = like.tensor_split(self.size)[self.rank]
            terms = [
                self._view(rank, slot, like).tensor_split(self.size)[self.rank]
                for rank in range(self.size)
            ]
            _combine(share, terms, combine)
            slot = self._write()
            self._view(self.rank, slot, share).copy_(share)
            yield
            for peer in self.peers:
                peer_share = like.tensor_split(self.size)[peer]
                peer_share.copy_(self._view(peer, slot, peer_share))

    def _exchanged(self, out: list[Tensor], x: list[Tensor]) -> Rounds:
        """Each round has an equal share of the slot for each rank; the first exchanges the number
        of rounds."""
        share = (SLOT_BYTES - ALIGNMENT) // self.size // ALIGNMENT * ALIGNMENT
        out[self.rank].copy_(x[self.rank])
        own_rounds = max(-(-part.numel() * part.element_size() // share) for part in x)
        rounds, done = 1, 0
        step = share // x[0].element_size()
        while done < rounds:
            slot, part = self._write(), slice(done * step, (done + 1) * step)
            self.slots[self.rank][slot, -8:].view(torch.int64)[0] = own_rounds
            for peer in self.peers:
                self._view(self.rank, slot, x[peer][part], peer * share).copy_(x[peer][part])
            yield
            if done == 0:
                ends = [self.slots[rank][slot, -8:].view(torch.int64) for rank in range(self.size)]
                rounds = max(int(end) for end in ends)
            for peer in self.peers:
                received = out[peer][part]
                received.copy_(self._view(peer, slot, received, self.rank * share))
            done += 1

    def _broadcasted(self, x_N: Tensor, root: int) -> Rounds:
        for part in _parts(x_N):
            slot = self._write()
            if self.rank == root:
                self._view(root, slot, x_N[part]).copy_(x_N[part])
            yield
            if self.rank != root:
                x_N[part] = self._view(root, slot, x_N[part])

    def _summed_at(self, x_N: Tensor, root: int) -> Rounds:
        for part in _parts(x_N):
            slot = self._write()
            if self.rank != root:
                self._view(self.rank, slot, x_N[part]).copy_(x_N[part])
            yield
            if self.rank == root:
                terms = [self._view(peer, slot, x_N[part]) for peer in self.peers]
                _combine(x_N[part], [x_N[part], *terms], torch.add)

    def _shifted(self, out_N: Tensor, x_N: Tensor) -> Rounds:
        previous_rank = (self.rank - 1) % self.size
        for part in _parts(x_N):
            slot = self._write()
            self._view(self.rank, slot, x_N[part]).copy_(x_N[part])
            yield
            out_N[part] = self._view(previous_rank, slot, x_N[part])

    def _start(self, rounds: Rounds, count: int) -> "Operation":
        while self.under_way and (len(self.under_way) > 1 or self.under_way[0].count + count > 2):
            self.under_way[0].wait()
        operation = Operation(self, rounds, count)
        self.under_way.append(operation)
        operation.advance()
        return operation

    def _write(self) -> int:
        """The slot of the round that begins."""
        self.written += 1
        return (self.written - 1) % SLOTS

    def tell(self) -> int:
        """Notifies the peers that this rank wrote its round; returns the number of rounds
        written."""
        for peer, connection in self.peers.items():
            try:
                connection.send(b"\0")
            except ConnectionError:
                raise self._gone(peer) from None
        return self.written

    def hear(self, rounds: int) -> None:
        """Waits until every peer has written `rounds` rounds."""
        for peer, connection in self.peers.items():
            while self.heard[peer] < rounds:
                self.heard[peer] += self._news(peer, connection)

    def _news(self, peer: int, connection: socket.socket) -> int:
        """Reads a peer's notifications: the number of rounds, at least one, that it wrote since the
        last."""
        try:
            news = connection.recv(4096)
        except TimeoutError:
            raise RuntimeError(
                f"rank {self.names[peer]} has not come: {connection.gettimeout()} s"
            ) from None
        except ConnectionError:
            news = b""
        if not news:
            raise self._gone(peer)
        return len(news)

    def _gone(self, peer: int) -> RuntimeError:
        return RuntimeError(f"rank {self.names[peer]} has gone")

    def _view(self, rank: int, slot: int, like: Tensor, offset: int = 0) -> Tensor:
        """A view of a rank's slot, in the shape and dtype of `like`."""
        size = like.numel() * like.element_size()
        return self.slots[rank][slot, offset : offset + size].view(like.dtype).view(like.shape)


class Operation:
    """A collective in flight. Operations complete in the order in which they were started."""

    def __init__(self, memory: SharedMemory, rounds: Rounds, count: int) -> None:
        self.memory, self.rounds, self.count = memory, rounds, count
        self.number = 0

    def wait(self) -> None:
        """Waits until this operation, and all that were started earlier, are complete."""
        while self in self.memory.under_way:
            self.memory.under_way[0].finish()

    def is_completed(self) -> bool:
        return self not in self.memory.under_way

    def finish(self) -> None:
        """Runs the remaining rounds."""
        while self.memory.under_way and self.memory.under_way[0] is self:
            self.memory.hear(self.number)
            self.advance()

    def advance(self) -> None:
        """Reads the last round's data and writes the next round's."""
        with torch.no_grad():
            going = next(self.rounds, DONE) is not DONE
        if going:
            self.number = self.memory.tell()
        else:
            self.memory.under_way.remove(self)


def _combine(out: Tensor, terms: list[Tensor], combine: Callable[..., Tensor]) -> None:
    """out = combine of all terms in their order; `out` may be the first term."""
    first, second, *remaining_terms = terms
    combine(first, second, out=out)
    for term in remaining_terms:
        combine(out, term, out=out)


def _parts(x: Tensor) -> list[slice]:
    """Divides the last dimension so that one part of all rows fills a slot."""
    rows = x.numel() // max(1, x.shape[-1])
    step = max(1, SLOT_BYTES // max(1, rows * x.element_size()))
    return [slice(i, i + step) for i in range(0, x.shape[-1], step)] or [slice(0)]


def _split(x: Tensor, rows: list[int]) -> list[Tensor]:
    """Flat views of consecutive rows."""
    flat, width = x.view(-1), prod(x.shape[1:])
    ends = list(accumulate(rows))
    return [flat[(b - n) * width : b * width] for b, n in zip(ends, rows, strict=True)]
