"""GEMMs of 16 bits on CPU against float64, and of everything else against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from mtcli.kernels import gemm
from mtcli.kernels.attention.attention import attention, attention_backward, sdpa
from mtcli.kernels.gemm import choose_gemm_dtype, linear, matmul, runs_in_float32

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of one result, relative
XEON = {"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}


def made(*shape, seed=0, dtype=torch.float16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def apart(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.fixture
def on(monkeypatch):
    """Lets products be chosen for a CPU that can do what it is called with."""
    monkeypatch.setattr(gemm, "_IN_FLOAT32", {torch.float16})

    def choose(can):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
        monkeypatch.setattr(gemm, "IS_INTEL", "Intel" in can.get("cpu_name", ""))
        choose_gemm_dtype()

    return choose


@pytest.mark.parametrize(
    ("can", "slow"),
    [
        (XEON, True),
        (XEON | {"amx_bf16": True}, False),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, False),
        ({"cpu_name": "AMD Ryzen", "avx2": True}, True),
        ({"architecture": "arm64", "neon": True, "bf16": True}, False),
        ({"architecture": "arm64", "neon": True, "bf16": False}, True),
    ],
)
def test_bfloat16_is_multiplied_in_float32_where_a_cpu_is_slow_at_it(on, can, slow):
    for _ in range(2):
        on(can)
        assert runs_in_float32(made(1, dtype=torch.bfloat16)) is slow
        assert runs_in_float32(made(1)) and not runs_in_float32(made(1, dtype=torch.float32))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("biased", [True, False])
def test_a_linear_layer_and_its_gradients_are_rounded_once_and_keep_16_bits(on, dtype, biased):
    on(XEON)
    operands = [made(2, 7, 500), made(33, 500, seed=1), made(33, seed=2)][: 3 if biased else 2]
    mine = [x.to(dtype).requires_grad_() for x in operands]
    exact = [x.detach().double().requires_grad_() for x in mine]
    grad, kept = made(2, 7, 33, seed=3).to(dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        found = linear(*mine)
    expected = F.linear(*exact)
    found.backward(grad)
    expected.backward(grad.double())
    assert kept == [dtype, dtype]
    assert found.dtype == dtype and apart(found, expected) < ROUNDING[dtype]
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad.dtype == dtype and apart(ours.grad, theirs.grad) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_batched_product_sums_in_float32_and_keeps_16_bits(on, dtype):
    on(XEON)
    mine = [made(2, 5, 3000).to(dtype), made(2, 3000, 9, seed=1).to(dtype)]
    exact = [x.double().requires_grad_() for x in mine]
    grad, kept = made(2, 5, 9, seed=2).to(dtype), []
    assert torch.equal(matmul(*mine), (mine[0].float() @ mine[1].float()).to(dtype))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.dtype) or x, lambda x: x):
        found = matmul(*(x.requires_grad_() for x in mine))
    found.backward(grad)
    expected = exact[0] @ exact[1]
    expected.backward(grad.double())
    assert kept == [dtype, dtype]
    assert apart(found, expected) < ROUNDING[dtype]
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad.dtype == dtype and apart(ours.grad, theirs.grad) < ROUNDING[dtype]


@pytest.mark.parametrize("tokens", [64, 600])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_attention_is_made_in_float32_and_rounded_once(on, dtype, tokens):
    on(XEON)
    q, k, v, grad = (made(2, 3, tokens, 16, seed=i).to(dtype) for i in range(4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True)
    expected.backward(grad.double())
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = sdpa(*mine, True)
    whole.backward(grad)
    part, lse = attention(q, k, v, True)
    of_part = attention_backward(grad, (q, k, v, part), lse, True)
    assert lse.dtype == torch.float32
    for found in (whole, part):
        assert found.dtype == dtype and apart(found, expected) < ROUNDING[dtype]
    for whole_s, part_s, theirs in zip(mine, of_part, exact, strict=True):
        for found in (whole_s.grad, part_s):
            assert found.dtype == dtype and apart(found, theirs.grad) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(on, dtype):
    on(XEON | {"amx_bf16": True})
    x, weight = made(7, 50).to(dtype), made(33, 50, seed=1).to(dtype)
    assert not runs_in_float32(x)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(matmul(x, weight.T), x @ weight.T)
