"""Float8 operands against the formats' own tables, and their products against float64."""

import numpy as np
import pytest
import torch
from exact import distance, seeded

from mtcli.kernels import fp8
from mtcli.kernels.fp8 import (
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Fp8Operand,
    cast_float32,
    fp8_gemm,
    quantize,
    quantize_reference,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = 2.0**-9  # of one bfloat16 result, at most
SHAPE = (130, 200)  # whole blocks of 128, and parts
BLOCKS = {"whole": PER_TENSOR, "rows": PER_ROW, "strips": BLOCK_1X128, "squares": BLOCK_128X128}


def numbers(mantissa, bias, codes):
    """The magnitudes of a format's first codes: arXiv:2209.05433, table 1."""
    code = np.arange(codes)
    exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
    normal = (1 + rest / 2**mantissa) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, rest / 2**mantissa * 2.0 ** (1 - bias), normal)


TABLES = {E4M3: numbers(3, 7, 127), E5M2: numbers(2, 15, 124)}  # up to 448 and 57344


def nearest(x, table):
    """Each number's nearest in a table, and between two the one of the even code."""
    middle = (table[1:] + table[:-1]) / 2
    size = np.abs(x)
    code = np.searchsorted(middle, size)
    tie = (code < len(middle)) & (size == middle[np.minimum(code, len(middle) - 1)])
    return np.sign(x) * table[code + (tie & (code % 2 == 1))]


def made(seed=0, shape=SHAPE):
    """bfloat16 of many magnitudes: 2**-30 to 2**30 by row."""
    x = seeded(*shape, seed=seed) * torch.exp2(torch.linspace(-30, 30, shape[0]))[:, None]
    return x.bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_scaled_to_the_format_s_largest_number_and_rounded_to_its_nearest(kind, dtype):
    x, block, table = made(), BLOCKS[kind], TABLES[dtype]
    found = quantize(x, block, dtype)
    exact = x.float().numpy()
    rows, columns = (have or all for have, all in zip(block, SHAPE, strict=True))
    for i in range(0, SHAPE[0], rows):
        for j in range(0, SHAPE[1], columns):
            part = np.s_[i : i + rows, j : j + columns]
            largest = np.float32(np.abs(exact[part]).max())
            scaled = exact[part] * (np.float32(table[-1]) / largest)
            assert np.array_equal(found.values[part].float().numpy(), nearest(scaled, table))
            scale = float(found.scales[i // rows, j // columns])
            assert scale == pytest.approx(largest / table[-1], rel=1e-6)
            assert np.abs(found.values[part].float().numpy()).max() == table[-1]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_code_is_decoded(dtype):
    codes = torch.arange(len(TABLES[dtype]), dtype=torch.uint8)
    table = torch.from_numpy(TABLES[dtype]).float()
    assert torch.equal(cast_float32(codes.view(dtype)), table)
    assert torch.equal(cast_float32((codes + 128).view(dtype)), -table)


PAIRS = {
    "tensorwise": (PER_TENSOR, PER_TENSOR),
    "rowwise": (PER_ROW, PER_ROW),
    "weights": (BLOCK_1X128, BLOCK_128X128),
    "gradients of weights": (BLOCK_1X128, BLOCK_1X128),
}


def whole(x: Fp8Operand):
    """What an operand stands for, in float64."""
    rows, columns = (have or all for have, all in zip(x.block, x.values.shape, strict=True))
    scales = np.kron(x.scales.numpy(), np.ones((rows, columns)))
    values = x.values.float().numpy().astype(np.float64)
    return torch.from_numpy(values * scales[: values.shape[0], : values.shape[1]])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_product_is_that_of_its_operands_rounded_once_and_near_that_of_wide_ones(pair, dtype):
    x, weight = seeded(70, 300).bfloat16(), (0.02 * seeded(144, 300, seed=1)).bfloat16()
    a, b = quantize(x, PAIRS[pair][0], dtype), quantize(weight, PAIRS[pair][1], E4M3)
    y = fp8_gemm(a, b)
    assert y.dtype == torch.bfloat16
    assert distance(y, whole(a) @ whole(b).T) < ROUNDING
    # A rounding is at most half a last place, so 2**-4 of e4m3 and 2**-3 of e5m2; evenly spread
    # over the place and its binade the root of its square's mean is 0.41 of that.
    expected = 0.41 * ((2.0**-3 if dtype == E5M2 else 2.0**-4) ** 2 + 2.0**-8) ** 0.5
    apart = distance(y, x.double() @ weight.double().T)
    assert 0.85 * expected < apart < 1.15 * expected


def test_transposed_operands_are_those_of_their_copies():
    x = made()
    for block in BLOCKS.values():
        for found, copied in zip(
            quantize_reference(x.T, block, E4M3),
            quantize_reference(x.T.contiguous(), block, E4M3),
            strict=True,
        ):
            assert torch.equal(found.float(), copied.float())
        assert quantize(x.T, block, E4M3).values.is_contiguous()


def test_zeros_stay_zeros_and_what_is_not_finite_spreads_over_its_block():
    zeros = torch.zeros(4, 256, dtype=torch.bfloat16)
    for block in BLOCKS.values():
        assert not fp8_gemm(quantize(zeros, block, E5M2), quantize(zeros, block, E4M3)).any()
    weight = quantize(seeded(16, 256).bfloat16(), PER_ROW, E4M3)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        x[2, 5] = bad
        y = fp8_gemm(quantize(x, PER_ROW, E4M3), weight)
        assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("block", [PER_TENSOR, PER_ROW])
def test_rows_that_the_library_s_product_needs_besides_are_not_in_its_result(block):
    a, b = (quantize(seeded(n, 40, seed=n).bfloat16(), block, E4M3) for n in (7, 20))
    assert distance(fp8._scaled_mm(a, b, False), whole(a) @ whole(b).T) < ROUNDING


def test_the_smallest_gradients_keep_their_precision():
    x = (seeded(8, 256) * 2.0**-90).bfloat16()
    a = quantize(x, PER_ROW, E5M2)
    assert distance(whole(a), x.double()) < 2.0**-3


KERNEL_SHAPES = [SHAPE, (33, 2100), (3, 5)]  # the second's rows are more than a program's


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_kernel_quantizes_to_the_bits_of_the_reference(device, kind, monkeypatch, subtests):
    monkeypatch.setattr(fp8, "quantize_reference", None)  # is not what runs
    ways = [(False, E4M3), (True, E5M2), (True, E4M3), (False, E5M2)]
    for transposed, dtype in ways if device.type == "cuda" else ways[:2]:
        for shape in KERNEL_SHAPES:
            x = made(shape=shape)
            x = x.T if transposed else x
            expected, scales = quantize_reference(x, BLOCKS[kind], dtype)
            with subtests.test(f"{dtype} {shape} {transposed=}"):
                found = quantize(x.to(device), BLOCKS[kind], dtype)
                assert torch.equal(found.scales.cpu(), scales)
                assert torch.equal(found.values.float().cpu(), expected.float())


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_kernel_spreads_what_is_not_finite_over_its_block(device, kind):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(3, 256, dtype=torch.bfloat16, device=device)
        x[1, 5] = bad
        found = quantize(x, BLOCKS[kind], E4M3)
        values, scales = quantize_reference(x.cpu(), BLOCKS[kind], E4M3)
        torch.testing.assert_close(found.scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.values.float().isnan().cpu(), values.float().isnan())
        assert found.scales.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256, 70, 5])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_gpu_s_product_is_the_emulated_one(pair, rows):
    dtypes = (E5M2 if pair == "tensorwise" else E4M3, E4M3)
    columns = rows if pair == "gradients of weights" else 384
    x = seeded(128 if columns == rows else rows, columns).bfloat16()
    weight = seeded(256, columns, seed=1).bfloat16()
    here, there = (
        [quantize(t.to(device), block, dtype)
         for t, block, dtype in zip((x, weight), PAIRS[pair], dtypes, strict=True)]
        for device in ("cpu", "cuda")
    )  # fmt: skip
    for ours, theirs in zip(there, here, strict=True):
        assert torch.equal(ours.values.float().cpu(), theirs.values.float())
        assert torch.equal(ours.scales.cpu(), theirs.scales)
    assert distance(fp8_gemm(*there), fp8_gemm(*here)) < ROUNDING
    assert distance(fp8_gemm(*there, use_fast_accum=True), fp8_gemm(*here)) < 2 * ROUNDING
