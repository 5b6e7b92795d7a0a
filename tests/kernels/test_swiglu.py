from functools import partial

import pytest
import torch
from exact import cases_on, check, distance, seeded
from test_gelu import exact_gelu, tanh_gelu

from mtcli.kernels.swiglu import Clamp, swiglu, swiglu_backward_


def silu(x):
    return x / (1.0 + (-x).exp())


GATES = {"silu": silu, "gelu": exact_gelu, "gelu_tanh": tanh_gelu, "clamped": None}
CLAMP = Clamp(limit=2.5, alpha=1.3)  # which half of the numbers here pass


def formula(gate_up, gate="silu"):
    inner, up = gate_up.tensor_split(2, -1)
    if gate == "clamped":
        inner, up = inner.clamp(max=CLAMP.limit), up.clamp(-CLAMP.limit, CLAMP.limit)
        return (up + 1.0) * inner / (1.0 + (-CLAMP.alpha * inner).exp())
    return GATES[gate](inner) * up


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_and_its_gradients_are_the_formula(device, gate, subtests):
    ours, theirs = partial(swiglu, gate=gate, clamp=CLAMP), partial(formula, gate=gate)
    for shape, dtype in cases_on(device, [(1, 130), (7, 26), (3, 2, 130), (2, 4100)]):
        with subtests.test(f"{shape} {dtype}"):
            check(ours, theirs, [3.0 * seeded(*shape, device=device)], dtype)


def test_swiglu_of_no_rows_is_empty(device):
    assert swiglu(torch.empty(0, 8, device=device)).shape == (0, 4)


def test_swiglu_reads_rows_that_are_apart(device):
    check(
        lambda x: swiglu(x[::2, :10]),
        lambda x: formula(x[::2, :10]),
        [seeded(5, 12, device=device)],
        torch.float32,
    )
    check(
        lambda x: swiglu(x.t()),
        lambda x: formula(x.t()),
        [seeded(12, 5, device=device)],
        torch.float32,
    )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_a_gate_is_the_formula_too_and_keeps_its_input_alone(dtype, gate):
    ours, theirs = partial(swiglu, gate=gate, clamp=CLAMP), partial(formula, gate=gate)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ours(torch.ones(7, 26, dtype=dtype, requires_grad=True))
    assert [x.shape for x in kept] == [(7, 26)]
    bound = {torch.bfloat16: 1e-2}.get(dtype)  # silu(gate) is rounded too
    check(ours, theirs, [3.0 * seeded(7, 26)], dtype, tolerance=bound)
    check(lambda x: ours(x.t()), lambda x: theirs(x.t()), [seeded(26, 5)], torch.float32)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", [(7, 26), (2, 4100)])
def test_the_backward_makes_the_result_again(device, shape, gate):
    gate_up = (3.0 * seeded(*shape, device=device)).float()
    grad = seeded(shape[0], shape[1] // 2, seed=1, device=device).float()
    leaf = gate_up.cpu().double().requires_grad_()
    result = formula(leaf, gate)
    result.backward(grad.cpu().double())
    of_gate_up, again = swiglu_backward_(grad, gate_up, gate, CLAMP)
    assert distance(of_gate_up, leaf.grad) < 2e-6 and distance(again, result) < 2e-6
