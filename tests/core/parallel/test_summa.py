"""SUMMA's two GEMMs against dense ones, their gradients in closed form, and its messages."""

import pytest
import torch
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.summa import TensorGrid, gemm, gemm_transposed
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.traffic import Traffic

X, Y, P = 24, 36, 48  # what 1, 2, 3 and 4 rows and columns divide
GRIDS = [(1, 1), (2, 2), (3, 3), (2, 3), (3, 2), (4, 1), (1, 4), (2, 1)]


def seeded(*shape, seed, dtype=torch.float64):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def on_grid(runtime, rows):
    recorder = FlightRecorder()
    layout = ParallelLayout(runtime.world, tp=runtime.world, tp_rows=rows)
    return make_groups(layout, runtime.rank, "cpu", recorder=recorder), recorder


def block(whole, rows, columns, rank):
    """Block (i, j) of a matrix, where rank is i * columns + j."""
    i, j = divmod(rank, columns)
    return whole.tensor_split(rows)[i].tensor_split(columns, 1)[j].contiguous()


OPERANDS = {  # S [X, Y], U [X, P], V [P, Y]; what is multiplied, and what comes out
    gemm: ((X, P), (P, Y), (X, Y)),
    gemm_transposed: ((X, Y), (P, Y), (X, P)),
}
DENSE = {
    gemm: lambda a, b: a @ b,
    gemm_transposed: lambda a, b: a @ b.T,
}


def multiply(runtime, rows, dtype=torch.float64):
    """By product: (result, gradients of both operands) of this rank's blocks; and again, from the
    same buffers; the second operand lies transposed in memory the second time."""
    groups, _ = on_grid(runtime, rows)
    grid, columns, found = TensorGrid(groups), runtime.world // rows, []
    for function, (a, b, out) in OPERANDS.items():
        for transposed in (False, True):
            mine = [
                block(seeded(*shape, seed=n, dtype=dtype), rows, columns, runtime.rank)
                for n, shape in enumerate((a, b, out))
            ]
            if transposed:
                mine[1] = mine[1].T.contiguous().T
            operands = [x.requires_grad_() for x in mine[:2]]
            made = function(*operands, grid)
            made.backward(mine[2])
            found.append((made.detach(), *(x.grad for x in operands)))
    return found


@pytest.mark.parametrize(("rows", "columns"), GRIDS)
def test_both_gemms_and_all_gradients_are_the_dense_ones(rows, columns):
    check(run_ranks(rows * columns, multiply, rows), rows, columns)


def test_sixteen_ranks_multiply_on_a_square_of_four():
    check(run_ranks(16, multiply, 4), 4, 4)


def check(ranks, rows, columns, **tolerance):
    for n, (function, (a, b, out)) in enumerate(OPERANDS.items()):
        left, right = seeded(*a, seed=0).requires_grad_(), seeded(*b, seed=1).requires_grad_()
        expected = DENSE[function](left, right)
        expected.backward(seeded(*out, seed=2))
        for rank, found in enumerate(ranks):
            for values in found[2 * n : 2 * n + 2]:
                for value, whole in zip(values, (expected, left.grad, right.grad), strict=True):
                    wanted = block(whole.detach(), rows, columns, rank)
                    torch.testing.assert_close(value.double(), wanted, **tolerance)


def test_sums_over_panels_of_16_bits_are_rounded_once():
    """Operands that bfloat16 holds exactly: a result is off by half of its last place, 2**-9."""

    ranks = run_ranks(4, accumulate_16_bits, 2)
    a, b = (
        seeded(*shape, seed=n, dtype=torch.bfloat16).double()
        for n, shape in enumerate(((X, P), (P, Y)))
    )
    whole = (a @ b).to(torch.bfloat16)
    for rank, made in enumerate(ranks):
        assert torch.equal(made, block(whole, 2, 2, rank))


def accumulate_16_bits(runtime, rows):
    groups, _ = on_grid(runtime, rows)
    blocks = (
        block(seeded(*shape, seed=n, dtype=torch.bfloat16), rows, 2, runtime.rank)
        for n, shape in enumerate(((X, P), (P, Y)))
    )
    return gemm(*blocks, TensorGrid(groups))


def left_for_later(runtime, rows):
    """(dB at once, dB by the weight pass, whether the first backward had left it)."""
    groups, _ = on_grid(runtime, rows)
    columns, found = runtime.world // rows, []
    for function in (gemm, gemm_transposed):
        a, b, out = (
            block(seeded(*shape, seed=n), rows, columns, runtime.rank)
            for n, shape in enumerate(OPERANDS[function])
        )
        whole = b.clone().requires_grad_()
        function(a, whole, TensorGrid(groups)).backward(out)
        passes, weight = WeightPasses(), b.clone().requires_grad_()
        x = a.requires_grad_()
        made = function(x, weight, TensorGrid(groups), passes)
        with passes.collecting() as work:
            made.backward(out)
        left = weight.grad is None and x.grad is not None
        for step in work:
            step()
        found.append((whole.grad, weight.grad, left))
    return found


def test_a_weight_pass_makes_the_gradient_that_a_split_backward_leaves():
    for found in run_ranks(6, left_for_later, 2):
        for at_once, later, left in found:
            assert left
            torch.testing.assert_close(later, at_once)


def sent(runtime, rows):
    """Bytes that this rank sends in a forward and in a backward of AB and of AB^T, by axis."""
    groups, recorder = on_grid(runtime, rows)
    grid, columns, found = TensorGrid(groups), runtime.world // rows, []
    for function in (gemm, gemm_transposed):
        a, b, out = (
            block(seeded(*shape, seed=n), rows, columns, runtime.rank)
            for n, shape in enumerate(OPERANDS[function])
        )
        recorder.traffic = forward = Traffic()
        made = function(a.requires_grad_(), b.requires_grad_(), grid)
        recorder.traffic = backward = Traffic()
        made.backward(out)
        found.append([sum(one.bytes for one in way.sent) for way in (forward, backward)])
    return found


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 1)])
def test_ranks_send_each_panel_once_and_the_gradients_share_those_of_dy(rows, columns):
    """A gather along a row is (c - 1)/c of what it gathers, and so is a sum."""
    ranks = run_ranks(rows * columns, sent, rows)
    along = (columns - 1) / columns * 8
    down = (rows - 1) / rows * 8
    u, v = along * X / rows * P, down * P * Y / columns  # of matrices that a row or column gathers
    for n, (forward, backward) in enumerate([(u + v, 2 * u + 2 * v), (u + v, u + 2 * v)]):
        mean = [sum(found[n][way] for found in ranks) / len(ranks) for way in (0, 1)]
        assert mean == pytest.approx([forward, backward])
