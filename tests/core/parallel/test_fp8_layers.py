"""Linear layers in float8: three gradients against float64, cuts against one rank, and who says no.

Sizes are whole blocks of 128 on two ranks, so that blockwise scales are the same blocks on both.
"""

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel import fp8
from mtcli.core.parallel.fp8 import fp8_gemms, require_fp8
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import ColumnLinear, RowLinear, TensorParallelLayers
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.kernels import fp8 as kernels
from mtcli.kernels.gemm import LinearFunction

T, D, H = 256, 256, 512  # tokens, columns, inner columns
SCALINGS = ["rowwise", "blockwise", "tensorwise"]
E4M3, E5M2 = 0.026, 0.051  # the root of a rounding's mean square: 0.41 of half a last place
ONCE = 2.0**-9  # a rounding to bfloat16


def seeded(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).bfloat16()


def apart(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def operands(rows=H, columns=D, tokens=T):
    """x, weight, bias, gradient."""
    return (
        seeded(tokens, columns, seed=1),
        seeded(rows, columns, seed=2, scale=0.02),
        seeded(rows, seed=3),
        seeded(tokens, rows, seed=4, scale=1e-6),
    )


def linear(scaling, work=None):
    """The layer of x, weight and bias, whose weight pass is among `work`."""
    defer = work and work.gradient
    return lambda *given: LinearFunction.apply(*given, fp8_gemms(scaling), defer)


def backward(linear, x, weight, bias, grad):
    """(y, gradients of x, weight and bias)."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_and_its_gradients_are_off_by_the_rounding_of_float8_operands(scaling):
    given = operands(tokens=200)
    found = backward(linear(scaling), *given)
    exact = backward(F.linear, *(t.double() for t in given))
    rounding = [E4M3, E5M2 if scaling == "tensorwise" else E4M3]
    expected = [(E4M3**2 + one**2) ** 0.5 for one in (rounding[0], rounding[1], rounding[1])]
    found[0], exact[0] = found[0] - given[2], exact[0] - given[2].double()
    for ours, theirs, bound in zip(found, exact, expected, strict=False):
        assert ours.dtype == torch.bfloat16
        assert 0.85 * bound < apart(ours, theirs) < 1.15 * bound
        part = (ours.double() * theirs).sum() / theirs.square().sum()
        assert float(part) == pytest.approx(1.0, abs=0.15 * bound), "nothing is scaled"
    assert apart(found[3], exact[3]) < ONCE


WIDE, SHORT = torch.float8_e5m2, torch.float8_e4m3fn
ROWS, PER_TENSOR = (kernels.PER_ROW, SHORT), (kernels.PER_TENSOR, SHORT)
BLOCK_1X128, BLOCK_128X128 = (kernels.BLOCK_1X128, SHORT), (kernels.BLOCK_128X128, SHORT)
CUTS = {  # of y = x w, of x's gradient g w and of w's gradient g x: (blocks, format) of both
    "rowwise": [ROWS] * 6,
    "blockwise": [BLOCK_1X128, BLOCK_128X128, BLOCK_1X128, BLOCK_128X128, BLOCK_1X128, BLOCK_1X128],
    "tensorwise": [PER_TENSOR, PER_TENSOR, *[(kernels.PER_TENSOR, WIDE), PER_TENSOR] * 2],
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_operand_is_cut_and_rounded_as_its_scaling_says(monkeypatch, scaling):
    cuts = []

    def noted(x, block, dtype):
        cuts.append((block, dtype))
        return kernels.quantize(x, block, dtype)

    monkeypatch.setattr(fp8, "quantize", noted)
    backward(linear(scaling), *operands())
    assert cuts == CUTS[scaling]


def test_a_split_backward_multiplies_the_same():
    given = operands()
    work = WeightPasses()
    x, weight, bias = (t.clone().requires_grad_() for t in given[:3])
    y = linear("rowwise", work)(x, weight, bias)
    with work.collecting() as pending:
        y.backward(given[3])
    assert weight.grad is None
    for run in pending:
        run()
    expected = backward(linear("rowwise"), *given)
    for ours, theirs in zip([y, x.grad, weight.grad, bias.grad], expected, strict=True):
        assert torch.equal(ours, theirs)


SIZES = [  # scaling, rows, columns, tokens: one that float8 does not take, or nothing to multiply
    ("rowwise", 40, 64, 32),
    ("rowwise", 64, 40, 32),
    ("tensorwise", 64, 40, 32),
    ("blockwise", 128, 192, 32),
    ("blockwise", 192, 128, 32),
    ("rowwise", 64, 64, 0),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_that_float8_does_not_take_is_multiplied_in_bfloat16(size):
    scaling, *shape = size
    given = operands(*shape)
    found = backward(linear(scaling), *given)
    for ours, theirs in zip(found, backward(F.linear, *given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-8)


def layer(runtime, kind, scaling):
    """(this rank's y, gradients of its x and weight) of a column or row layer."""
    table = {
        "up.weight": Parameter("up.weight", (H, D), ("tp", None), "normal", 0),
        "down.weight": Parameter("down.weight", (D, H), (None, "tp"), "residual", 0),
    }
    groups = make_groups(ParallelLayout(runtime.world, tp=runtime.world), runtime.rank, "cpu")
    build = TensorParallelLayers(table, groups, torch.bfloat16, gemms=fp8_gemms(scaling))
    x, weight, _, grad = operands() if kind == "up" else operands(D, H)
    name, module = f"{kind}.weight", (ColumnLinear if kind == "up" else RowLinear)(kind, build)
    box = table[name].box(groups.layout, runtime.rank)
    module.weight.data.copy_(weight[box.slices])
    tp, rank = groups.tp.size, groups.tp.rank
    inner = (lambda t: t.chunk(tp, 1)[rank]) if tp > 1 else lambda t: t
    mine = build.my_tokens(x) if kind == "up" else inner(x)
    x = mine.clone().contiguous().requires_grad_()
    y = module(x)
    y.backward(inner(grad) if kind == "up" else build.my_tokens(grad))
    return y.detach(), x.grad, module.weight.grad


def both_layers(runtime, scaling):
    return [layer(runtime, kind, scaling) for kind in ("up", "down")]


@pytest.mark.parametrize("scaling", ["rowwise", "blockwise"])
def test_a_cut_layer_is_the_whole_one_where_its_scales_are_the_same(scaling):
    """Along a contraction that tp cuts a row has a scale per rank; blocks are the same blocks."""
    ((up, down),) = run_ranks(1, both_layers, scaling)
    ups, downs = zip(*run_ranks(2, both_layers, scaling), strict=True)
    joined = [
        torch.cat(parts, dim) for parts, dim in zip(zip(*ups, strict=True), (1, 0, 0), strict=True)
    ]
    assert torch.equal(joined[0], up[0]), "of columns: y,"
    assert torch.equal(joined[2], up[2]), "and the weight's gradient"
    near = 2 * ONCE if scaling == "blockwise" else 2 * E4M3
    assert apart(joined[1], up[1]) < near, "x's gradient is a sum of two rounded ones"
    joined = [
        torch.cat(parts, dim)
        for parts, dim in zip(zip(*downs, strict=True), (0, 1, 1), strict=True)
    ]
    assert torch.equal(joined[1], down[1]), "of rows: x's gradient,"
    assert torch.equal(joined[2], down[2]), "and the weight's"
    assert apart(joined[0], down[0]) < near


@pytest.mark.parametrize(
    ("scaling", "capability", "message"),
    [
        ("rowwise", (8, 0), "takes a GPU of compute capability 8.9 or more, and A100 has 8.0"),
        ("blockwise", (8, 9), "takes a GPU of compute capability 9.0, and A100 has 8.9"),
        ("blockwise", (10, 0), "takes a GPU of compute capability 9.0, and A100 has 10.0"),
        ("blockwise", (9, 0), None),
        ("rowwise", (10, 0), None),
        ("tensorwise", (8, 9), None),
    ],
)
def test_a_gpu_without_float8_products_is_refused(monkeypatch, scaling, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if message is None:
        require_fp8(torch.device("cuda"), scaling)
        return
    with pytest.raises(MtcliError, match=message):
        require_fp8(torch.device("cuda"), scaling)
    require_fp8(torch.device("cpu"), scaling)


@pytest.mark.parametrize(
    ("scaling", "cuda", "refused"),
    [("blockwise", "12.8", True), ("blockwise", "12.9", False), ("blockwise", "13.0", False),
     ("rowwise", "12.8", False), ("tensorwise", "12.8", False)],
)  # fmt: skip
def test_squares_of_an_older_cuda_are_refused_with_both_versions(
    monkeypatch, scaling, cuda, refused
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if not refused:
        return require_fp8(torch.device("cuda"), scaling)
    with pytest.raises(MtcliError) as caught:
        require_fp8(torch.device("cuda"), scaling)
    (problem,) = caught.value.problems
    said = "fp8_scaling='blockwise' takes CUDA 12.9 or more, and torch was built with 12.8"
    assert problem.message == said and problem.field == "train.fp8_scaling"
    assert problem.hint.endswith("or train.fp8_scaling = 'rowwise'")
