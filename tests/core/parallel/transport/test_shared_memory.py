"""Collectives through shared memory, against sums and permutations written out by hand."""

import multiprocessing.connection
import os
import socket
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, warm

from mtcli.core.parallel.transport import same_machine, shared_memory
from mtcli.core.parallel.transport.process_group import gather_json
from mtcli.core.parallel.transport.same_machine import connect
from mtcli.core.parallel.transport.shared_memory import SMALL_BYTES

SIZES = [1, 3, 1000, SMALL_BYTES // 4 + 7]


def connected(runtime, slot_bytes=shared_memory.SLOT_BYTES):
    shared_memory.SLOT_BYTES = same_machine.SLOT_BYTES = slot_bytes
    return connect(runtime.rank, range(runtime.world), gather, timeout=60.0)


def test_ranks_that_share_no_machine_leave_no_file_open():
    def two_machines(value):
        return [value, ["another", b"address".hex()]]

    before = len(os.listdir("/proc/self/fd"))
    assert connect(0, range(2), two_machines, timeout=1.0) is None
    assert len(os.listdir("/proc/self/fd")) == before


def gather(value):
    return gather_json(value, dist.group.WORLD)


def values(rank, count, dtype=torch.float64, salt=0):
    """Whole numbers, so that sums are exact in any order and dtype; other ones for each rank."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randint(-4, 5, (count,), generator=generator).to(dtype)


def every_kind(runtime, counts, dtype, slot_bytes):
    """Each collective on each count of elements a rank; asserts what it gave."""
    memory = connected(runtime, slot_bytes)
    for count in counts:
        _every_kind(memory, runtime.world, runtime.rank, count, dtype)


def _every_kind(memory, n, me, count, dtype):
    mine, everyone = values(me, count, dtype), [values(r, count, dtype) for r in range(n)]
    for _ in range(3):  # slots come round again
        out = mine.new_empty(n, count)
        memory.all_gather(out, mine).wait()
        assert torch.equal(out, torch.stack(everyone))
        summed = mine.clone()
        memory.all_reduce(summed, dist.ReduceOp.SUM).wait()
        assert torch.equal(summed, sum(everyone))
        largest = mine.clone()
        memory.all_reduce(largest, dist.ReduceOp.MAX).wait()
        assert torch.equal(largest, torch.stack(everyone).amax(0))
        rows = [torch.stack([values(r, count, dtype, salt) for salt in range(n)]) for r in range(n)]
        mine_nN = rows[me].clone()
        memory.reduce_scatter(mine_nN[me], mine_nN).wait()  # in place, as gradient buckets do
        assert torch.equal(mine_nN[me], sum(rows)[me])
        shifted = torch.empty_like(mine)
        memory.shift(shifted, mine).wait()
        assert torch.equal(shifted, everyone[me - 1])
        told = mine.clone()
        memory.broadcast(told, n - 1).wait()
        assert torch.equal(told, everyone[n - 1])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_collectives_give_what_is_written_out_by_hand(world, dtype):
    run_ranks(world, every_kind, (0, *SIZES), dtype, shared_memory.SLOT_BYTES)


@pytest.mark.parametrize("world", [2, 3])
def test_what_does_not_fit_a_slot_goes_in_rounds(world):
    run_ranks(world, every_kind, (100_000, 130_001), torch.float32, 2**16)


def exchange(runtime, table, slot_bytes):
    """table[i][j] rows go from rank i to rank j; each row says where it is from."""
    memory, me = connected(runtime, slot_bytes), runtime.rank
    for turn in range(5):
        sent, received = table[me], [row[me] for row in table]
        x = torch.cat([_rows(me, to, count, turn) for to, count in enumerate(sent)])
        out = x.new_empty(sum(received), 3)
        memory.all_to_all(out, x, received, sent).wait()
        parts = [_rows(source, me, count, turn) for source, count in enumerate(received)]
        assert torch.equal(out, torch.cat(parts))


def _rows(source, to, count, turn):
    return torch.arange(3.0 * count).view(count, 3) + 1000.0 * source + 100.0 * to + turn


@pytest.mark.parametrize("slot_bytes", [2**12, 2**22])
def test_uneven_shares_reach_their_ranks_and_no_rows_are_no_trouble(slot_bytes):
    run_ranks(3, exchange, [[2, 0, 900], [0, 0, 0], [1, 400, 3]], slot_bytes)
    run_ranks(2, exchange, [[0, 0], [700, 1]], slot_bytes)


def overlapping(runtime):
    """Several under way at once, waited for in another order than they were started in."""
    memory, n, me = connected(runtime, 2**12), runtime.world, runtime.rank
    xs = [values(me, count, torch.float64, count) for count in (10, 20, 5000, 30, 40)]
    outs = [x.new_empty(n, len(x)) for x in xs]
    under_way = []
    for x, out in zip(xs, outs, strict=True):
        under_way.append(memory.all_gather(out, x))
        assert len(memory.under_way) <= 2
    x = values(me, 7)
    moved = torch.empty_like(x)
    last = memory.shift(moved, x)
    assert not last.is_completed()
    last.wait()
    for operation in reversed(under_way):
        operation.wait()
        assert operation.is_completed()
    for x, out in zip(xs, outs, strict=True):
        expected = [values(r, len(x), torch.float64, len(x)) for r in range(n)]
        assert torch.equal(out, torch.stack(expected))
    assert torch.equal(moved, values((me - 1) % n, 7))


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_may_be_under_way_together(world):
    run_ranks(world, overlapping)


def left_alone(runtime):
    memory = connected(runtime)
    if runtime.rank == 1:
        for peer in memory.peers.values():
            peer.close()
        return "left"
    try:
        memory.all_reduce(torch.ones(3), dist.ReduceOp.SUM).wait()
    except RuntimeError as error:
        return str(error)


def test_a_peer_that_has_gone_is_said_at_once():
    assert run_ranks(2, left_alone) == ["rank 1 has gone", "left"]


def elsewhere(runtime):
    def other(value):
        return [(f"machine {rank}", place[1]) for rank, place in enumerate(gather(value))]

    return connect(runtime.rank, range(runtime.world), other, 5.0)


def test_ranks_of_several_machines_share_nothing():
    assert run_ranks(2, elsewhere) == [None, None]


def not_there(runtime, late):
    """A rank that says where it is, and is not there."""
    if runtime.rank == late:
        return gather([same_machine._machine(), b"\0nobody".hex()])
    try:
        connect(runtime.rank, range(runtime.world), gather, timeout=0.5)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("late", [0, 1])
def test_a_peer_that_does_not_come_is_said_in_time(late):
    said = run_ranks(2, not_there, late)[1 - late]
    assert said == f"rank {late} has gone, or has not come in 0.5 s"


def forbidden(runtime):
    def refuse(name):
        raise PermissionError("not in this container")

    if runtime.rank == 1:
        same_machine.os.memfd_create = refuse
    return connected(runtime)


def test_where_one_rank_gets_no_memory_all_stay_with_the_network():
    assert run_ranks(2, forbidden) == [None, None]


def stranger(address):
    """Another user's process that says it is rank 1; it exits with 0 if it was sent away."""
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20.0)
        connection.connect(address)
        with suppress(ConnectionError):
            connection.send((1).to_bytes(4, "little"))
            os._exit(len(connection.recv(1)))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_gets_no_memory():
    listener = same_machine._listener()
    address = listener.getsockname()
    awaited = same_machine._connections(0, listener, [address, b""], 20.0)
    sent_away = warm().Process(target=stranger, args=(address,))
    sent_away.start()
    multiprocessing.connection.wait([listener])  # it is the first to call
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.send((1).to_bytes(4, "little"))
        ((peer, accepted),) = awaited
        accepted.send(b"!")
        assert peer == 1 and connection.recv(1) == b"!"
        accepted.close()
    sent_away.join()
    assert sent_away.exitcode == 0
