import pytest
import torch
from exact import TOLERANCE, check, seeded
from torch._subclasses.fake_tensor import FakeTensorMode

from mtcli.kernels import grouped_gemm, triton_launch
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.grouped_gemm import add_by_expert, grouped_linear, grouped_linear_reference

CASES = {
    "ragged, odd": ([5, 0, 70, 1], 22, 19),
    "one row": ([0, 1], 16, 16),
    "more than a tile of each": ([67, 3, 130], 136, 130),
    "whole tiles of the inner size": ([9, 30, 66], 64, 24),
    "no rows of different experts": ([0, 0, 3], 8, 8),
    "as many rows of each": ([6, 6, 6], 22, 19),
    "no rows": ([0, 0], 8, 8),
}


def rows_of(counts, device="cpu"):
    """The numbers of rows as the router leaves them; None where all are the same."""
    return None if len(set(counts)) == 1 else torch.tensor(counts, device=device)


def formula(counts):
    def product(x, weight):
        expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return torch.einsum("nd,nfd->nf", x, weight[expert])

    return product


@pytest.mark.parametrize("case", CASES)
def test_each_expert_multiplies_its_rows_and_both_gradients_are_right(device, case):
    counts, inner, width = CASES[case]
    inputs = [
        seeded(sum(counts), inner, device=device),
        seeded(len(counts), width, inner, seed=1, device=device),
    ]
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter has no products in 16 bits
        dtypes += [torch.bfloat16, torch.float16]
    for dtype in dtypes:
        bound = 3 * TOLERANCE[dtype]  # the sums' own error is of both operands' rounding
        check(lambda x, w: grouped_linear(x, w, rows_of(counts, device)), formula(counts),
              inputs, dtype, tolerance=bound)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_expert_adds_its_bias_to_its_rows(device, case):
    counts, _, width = CASES[case]
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    inputs = [seeded(sum(counts), width, device=device), seeded(len(counts), width, device=device)]
    given = rows_of(counts, device)
    for ours in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        check(lambda x, b: add_by_expert(x, b, given), lambda x, b: x + b[experts], inputs, ours)


@pytest.mark.parametrize("case", ["ragged, odd", "as many rows of each"])
def test_torch_on_a_cpu_multiplies_the_same_rows(case):
    counts, inner, width = CASES[case]
    check(
        lambda x, w: grouped_linear_reference(x, w, rows_of(counts)),
        formula(counts),
        [seeded(sum(counts), inner), seeded(len(counts), width, inner, seed=1)],
        torch.float32,
    )


@pytest.mark.parametrize(
    ("rows_each", "tile", "of_weights"),
    [(8192, (128, 256), (128, 256)), (512, (128, 128), (128, 128)), (64, (64, 128), (128, 128))],
)
def test_fewer_rows_of_each_expert_take_smaller_tiles_and_weights_keep_large_ones(
    rows_each, tile, of_weights
):
    sizes = (rows_each, 1536, 2048)
    for kernel, expected in ((grouped_gemm._gemm, tile), (grouped_gemm._wgrad, of_weights)):
        config = kernel.default(*sizes, 2)
        assert (config["ROWS"], config["COLUMNS"]) == expected
        assert kernel.default(*sizes, 4) == grouped_gemm.CONFIGS[-1]
        assert kernel.default(rows_each, 1537, 2048, 2) == grouped_gemm.CONFIGS[-1]
        assert kernel.default(rows_each, 1536, 2050, 2)["COLUMNS"] == 256


def test_a_frozen_weight_gets_no_gradient(device):
    x, weight = seeded(8, 4, device=device).float(), seeded(2, 3, 4, device=device).float()
    x.requires_grad_()
    grouped_linear(x, weight, rows_of([3, 5], device)).sum().backward()
    expected = torch.cat([weight[0].sum(0).expand(3, 4), weight[1].sum(0).expand(5, 4)])
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "dtype", "by_torch"),
    [
        ((9, 0), torch.bfloat16, True),
        ((9, 0), torch.float16, False),  # which torch's does not take
        ((8, 0), torch.bfloat16, False),
        ((10, 0), torch.bfloat16, False),
    ],
)
def test_a_hopper_that_was_not_measured_takes_torchs_grouped_products(
    monkeypatch, capability, dtype, by_torch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_launch, "fastest_backend", lambda *_: None)
    monkeypatch.setattr(triton_launch, "HAS_TRITON", True)
    chosen = {True: "_torch_gemms", False: "_triton_gemms"}[by_torch]
    monkeypatch.setattr(grouped_gemm, chosen, lambda ends: chosen)
    with FakeTensorMode():
        x = torch.empty(64, 32, dtype=dtype, device="cuda")
        weight, counts = x.new_empty(4, 16, 32), torch.empty(4, dtype=torch.int64, device="cuda")
        assert grouped_gemm.grouped_gemms(x, weight, counts) == chosen


def test_torchs_grouped_products_are_those_of_each_expert(device, monkeypatch):
    """torch's own, which a GPU takes where they were measured to be faster."""
    monkeypatch.setattr(grouped_gemm, "prefers_kernel", lambda *_: False)
    counts = [5, 0, 70, 21]
    inputs = [seeded(96, 24, device=device), seeded(4, 16, 24, seed=1, device=device)]
    called = []
    multiply = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: called.append(a) or multiply(*a, **k))
    rows = rows_of(counts, device)
    check(lambda x, w: grouped_linear(x, w, rows), formula(counts), inputs, torch.bfloat16)
    assert len(called) == 3


@pytest.mark.parametrize("owners", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "case", ["ragged, odd", "more than a tile of each", "as many rows of each"]
)
def test_the_weights_gradient_is_added_to_the_rows_of_its_owners(device, case, owners):
    """The first one overwrites what is there, NaN too; what is beside the rows stays as it is."""
    counts, inner, width = CASES[case]
    rows = len(counts) * width
    each = -(-rows // owners)
    memory = torch.full((owners, 5 + each * inner + 3), torch.nan, device=device)
    blocks = memory[:, 5:-3].view(owners, each, inner)
    sink = GradientSink(blocks, rows, iter([0, 1]).__next__)
    weight = seeded(len(counts), width, inner, seed=1, device=device).float().requires_grad_()
    expected = torch.zeros(len(counts), width, inner, dtype=torch.float64, device=device)
    for seed in (2, 3):
        x = seeded(sum(counts), inner, seed=seed, device=device).float()
        grad = seeded(sum(counts), width, seed=seed + 2, device=device).float()
        grouped_linear(x, weight, rows_of(counts, device), sink).backward(grad)
        runs = zip(grad.double().split(counts), x.double().split(counts), strict=True)
        expected += torch.stack([g.T @ of_expert for g, of_expert in runs])
    assert weight.grad is None
    written = blocks.reshape(-1, inner)
    torch.testing.assert_close(
        written[:rows].double(), expected.flatten(0, 1), rtol=1e-5, atol=2e-5
    )
    assert written[rows:].isnan().all()
    assert memory[:, :5].isnan().all() and memory[:, -3:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("owners", [1, 3])
def test_gradients_in_16_bits_are_added_in_float32_on_a_gpu(owners):
    counts, device = [67, 0, 130], torch.device("cuda")
    blocks = torch.zeros(owners, -(-3 * 136 // owners), 64, device=device)
    sink = GradientSink(blocks, 3 * 136, iter([0, 1]).__next__)
    weight = seeded(3, 136, 64, seed=1, device=device).bfloat16().requires_grad_()
    x, grad = seeded(197, 64, device=device), seeded(197, 136, seed=4, device=device)
    x, grad = x.bfloat16(), grad.bfloat16()
    for _ in range(2):
        grouped_linear(x, weight, rows_of(counts, device), sink).backward(grad)
    runs = zip(grad.double().split(counts), x.double().split(counts), strict=True)
    expected = 2 * torch.stack([g.T @ of_expert for g, of_expert in runs]).flatten(0, 1)
    written = blocks.reshape(-1, 64)[: 3 * 136].double()
    torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-4)
