"""n = 1, 2 and 3 ranks; every collective against the sum or the slice it is, and its transpose."""

import pytest
import torch
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import collectives
from mtcli.core.parallel.groups import consecutive, make_groups
from mtcli.core.parallel.transport.process_group import ProcessGroupTransport

N = 2  # rows of a rank's share


def axis_of(runtime):
    layout = ParallelLayout(runtime.world, tp=runtime.world)
    return make_groups(layout, runtime.rank, runtime.device).tp


def given(rank, rows, scale=1.0):
    """The tensor of a rank [rows, 3], different in every element and on every rank."""
    return (torch.arange(rows * 3, dtype=torch.float64).view(rows, 3) + 100.0 * rank) * scale


def both_ways(runtime, name, rows_in, rows_out):
    """(y, dx) of a differentiable collective with x and dy as `given`."""
    x = given(runtime.rank, rows_in).requires_grad_()
    y = getattr(collectives, name)(x, axis_of(runtime))
    y.backward(given(runtime.rank, rows_out, scale=-1.0))
    return y.detach(), x.grad


@pytest.mark.parametrize("n", [1, 2, 3])
def test_copy_in_is_the_identity_and_sums_gradients(n):
    total = sum(given(rank, N, -1.0) for rank in range(n))
    for rank, (y, dx) in enumerate(run_ranks(n, both_ways, "copy_in", N, N)):
        assert torch.equal(y, given(rank, N)) and torch.equal(dx, total)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sum_out_sums_and_copies_gradients(n):
    total = sum(given(rank, N) for rank in range(n))
    for rank, (y, dx) in enumerate(run_ranks(n, both_ways, "sum_out", N, N)):
        assert torch.equal(y, total) and torch.equal(dx, given(rank, N, -1.0))


def transposed(runtime, name, forwards):
    """(y, dx) where x, or else dy, is the transpose of a tensor."""
    x, dy = given(runtime.rank, 3), given(runtime.rank, 3, -1.0)
    x, dy = (x.T, dy) if forwards else (x, dy.T)
    x = x.detach().requires_grad_()
    y = getattr(collectives, name)(x, axis_of(runtime))
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("name", ["copy_in", "sum_out"])
def test_what_is_summed_need_not_be_contiguous(name):
    total = given(0, 3) + given(1, 3)
    forwards = name == "sum_out"
    for y, dx in run_ranks(2, transposed, name, forwards):
        assert torch.equal(y if forwards else -dx, total.T)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gather_in_gathers_and_reduce_scatters_gradients(n):
    whole = torch.cat([given(rank, N) for rank in range(n)])
    total = sum(given(rank, n * N, -1.0) for rank in range(n))
    for rank, (y, dx) in enumerate(run_ranks(n, both_ways, "gather_in", N, n * N)):
        assert torch.equal(y, whole) and torch.equal(dx, total[rank * N : (rank + 1) * N])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_scatter_out_reduce_scatters_and_gathers_gradients(n):
    total = sum(given(rank, n * N) for rank in range(n))
    whole = torch.cat([given(rank, N, -1.0) for rank in range(n)])
    for rank, (y, dx) in enumerate(run_ranks(n, both_ways, "scatter_out", n * N, N)):
        assert torch.equal(y, total[rank * N : (rank + 1) * N]) and torch.equal(dx, whole)


def plain(runtime):
    axis, x = axis_of(runtime), given(runtime.rank, N)
    largest = collectives.all_reduce(x.clone(), axis, torch.distributed.ReduceOp.MAX)
    strided = collectives.all_gather(given(runtime.rank, N).T, axis)
    told = collectives.gather_values({"rank": runtime.rank}, axis)
    return largest, strided, told, collectives.all_reduce(x, axis) is x


@pytest.mark.parametrize("n", [1, 3])
def test_plain_collectives_take_any_operator_stride_and_object(n):
    for largest, strided, told, in_place in run_ranks(n, plain):
        assert torch.equal(largest, given(n - 1, N))
        assert torch.equal(strided, torch.cat([given(rank, N).T for rank in range(n)]))
        assert told == [{"rank": rank} for rank in range(n)]
        assert in_place


def first_of(runtime, those):
    own = {"of": runtime.rank, "text": "x" * (1 + runtime.rank)} if runtime.rank in those else None
    return collectives.first_value(own, axis_of(runtime))


@pytest.mark.parametrize(("n", "those"), [(1, [0]), (3, [0]), (3, [1, 2]), (3, [2]), (3, [])])
def test_every_rank_gets_the_value_of_the_first_that_has_one(n, those):
    expected = {"of": those[0], "text": "x" * (1 + those[0])} if those else None
    assert run_ranks(n, first_of, those) == [expected] * n


def test_an_axis_of_one_rank_costs_no_copy():
    x = given(0, N)
    axis = make_groups(ParallelLayout(1), 0, x.device).tp
    for name in ("copy_in", "sum_out", "gather_in", "scatter_out", "all_gather", "reduce_scatter"):
        assert getattr(collectives, name)(x, axis) is x


def by_both(axis):
    """The axis by shared memory, and by its process group."""
    if axis.group is None:
        return axis, axis
    return axis, axis._replace(transport=ProcessGroupTransport(axis.group, axis.ranks, axis.rank))


def told(runtime, source):
    """The tensor of one rank, by each transport."""
    x = given(runtime.rank, 2)
    return [collectives.broadcast(x.clone(), one, source) for one in by_both(axis_of(runtime))]


@pytest.mark.parametrize(("n", "source"), [(1, 0), (2, 1), (3, 0), (3, 2)])
def test_a_broadcast_gives_all_what_its_source_has(n, source):
    for both in run_ranks(n, told, source):
        assert all(torch.equal(x, given(source, 2)) for x in both)


def scattered(runtime):
    return [
        collectives.reduce_scatter(given(runtime.rank, 6), x) for x in by_both(axis_of(runtime))
    ]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_rank_gets_its_rows_of_the_sum_by_either_transport(n):
    rows = sum(given(rank, 6) for rank in range(n)).chunk(n)
    for rank, both in enumerate(run_ranks(n, scattered)):
        assert all(torch.allclose(x, rows[rank], rtol=1e-12) for x in both)


def of_blocks(runtime, size):
    """The ranks and the sum of a block of the axis, and whether it has a group."""
    axis = consecutive(axis_of(runtime), size, "block", timeout=60.0)
    total = collectives.all_reduce(torch.tensor([float(runtime.rank)]), axis)
    return axis.ranks, axis.rank, total.item(), axis.name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_axis_is_cut_into_blocks_of_consecutive_ranks(size):
    for rank, found in enumerate(run_ranks(4, of_blocks, size)):
        ranks = tuple(range(rank // size * size, rank // size * size + size))
        assert found == (ranks, rank % size, float(sum(ranks)), "block")
