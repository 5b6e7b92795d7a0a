"""Attention by torch's libraries: who is asked, with what, and on a GPU what comes of it.

Without a GPU an operator's work is done by softmax attention in float64, so that only what it is
called with, and what is made of its results, is the library's wrapper.
"""

import pytest
import torch
from exact import TOLERANCE, distance, seeded, softmax_attention, triangle
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.kernels import autotune
from mtcli.kernels.attention import library as attention_library
from mtcli.kernels.attention.attention import attention, attention_backward
from mtcli.kernels.attention.backends import sdpa_backends
from mtcli.kernels.attention.library import LIBRARIES
from mtcli.kernels.attention.merge import merge_

HEADS, N, M, D = (4, 2), 24, 40, 16  # query heads and groups, queries, keys, width
BOUND = 2 * TOLERANCE[torch.bfloat16]  # probabilities are rounded too


def dense(q, k, v, causal):
    return softmax_attention(q, k, v, triangle(q.shape[2]).to(q.device) if causal else None)


def gradients(grad, q, k, v, causal):
    """Those of q, k and v, in float64 and in closed form."""
    grad, q, k, v = (x.double() for x in (grad, q, k, v))
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    scores = q @ heads[0].mT / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(~triangle(q.shape[2]), float("-inf"))
    p, of_p = scores.softmax(-1), grad @ heads[1].mT
    of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) / q.shape[3] ** 0.5
    of_kv = (x.view(1, k.shape[1], -1, *k.shape[2:]) for x in (of_scores.mT @ q, p.mT @ grad))
    return of_scores @ heads[0], *(x.sum(2) for x in of_kv)


class FakeLibrary(TorchDispatchMode):
    """Stands for both libraries; `dims` are those of cuDNN's log-sum-exp."""

    def __init__(self, dims):
        super().__init__()
        self.dims, self.called = dims, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::_scaled_dot_product_")
        if name == function._schema.name:
            return function(*args, **(kwargs or {}))
        self.called.append(name)
        names = [x.name for x in function._schema.arguments]
        given = {x.name: x.default_value for x in function._schema.arguments}
        given |= dict(zip(names, args, strict=False)) | (kwargs or {})
        assert given["dropout_p"] == 0.0 and given["scale"] is None
        assert given.get("attn_bias") is None
        q, k, v, causal = (given[x] for x in ("query", "key", "value", "is_causal"))
        dims = self.dims if name.startswith("cudnn") else 3
        if not name.endswith("backward"):
            assert given.get("compute_log_sumexp", True) and not given["return_debug_mask"]
            out, lse = dense(q.double(), k.double(), v.double(), causal)
            lse = lse.float() if dims == 3 else lse.float()[..., None]
            return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None
        assert (given["max_q"], given["max_k"]) == (q.shape[2], k.shape[2])
        assert given["cum_seq_q"] is None is given["cum_seq_k"]
        exact = dense(q.double(), k.double(), v.double(), causal)
        assert distance(given["out"], exact[0]) < TOLERANCE[q.dtype]
        assert given["logsumexp"].dim() == dims and given["logsumexp"].is_contiguous()
        assert distance(given["logsumexp"].view(exact[1].shape), exact[1]) < 1e-6
        return tuple(x.to(q.dtype) for x in gradients(given["grad_out"], q, k, v, causal))


def made(keys, d=D, device="cpu"):
    (h, g), n = HEADS, N
    sizes = ((1, n, h, d), (1, keys, g, d), (1, keys, g, d), (1, n, h, d))
    return [seeded(*x, seed=i).bfloat16().to(device).transpose(1, 2) for i, x in enumerate(sizes)]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that writes down who was the fastest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    autotune._measured.cache_clear()

    def by(library, d, device):
        bucket = autotune.bucket_of(torch.bfloat16, attention_library.tuned_sizes(M, d))
        ops = ("attention", "attention_backward")
        autotune.save_table({op: {bucket: {"by": library}} for op in ops}, device)

    yield by
    autotune._measured.cache_clear()
    attention_library._cudnn_lse_dims.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "dims"), [("flash", 3), ("cudnn", 3), ("cudnn", 4)])
def test_the_library_that_was_measured_to_be_faster_does_the_work(
    device, measured, name, dims, causal
):
    if device.type == "cuda":
        pytest.skip("the libraries themselves do it below")
    measured(name, D, device)
    q, k, v, grad = made(N if causal else M)
    with FakeLibrary(dims) as library:
        out, lse = attention(q, k, v, causal)
        sliced = torch.cat([lse, lse], 2)[:, :, N:]  # as a ring's rectangle is
        found = attention_backward(grad, (q, k, v, out), sliced, causal)
    assert library.called[0] == f"{name}_attention"
    assert library.called[-1] == f"{name}_attention_backward"
    expected = dense(q.double(), k.double(), v.double(), causal)
    assert lse.dtype == torch.float32 and distance(lse, expected[1]) < 1e-6
    for mine, exact in zip(found, gradients(grad, q, k, v, causal), strict=True):
        assert distance(mine, exact) < TOLERANCE[torch.bfloat16]


def test_a_library_is_not_asked_for_heads_that_it_does_not_take(device, measured):
    measured("cudnn", 160, device)
    measured("flash", 20, device)
    for d, dtype in ((160, torch.bfloat16), (20, torch.bfloat16), (D, torch.float32)):
        q, k, *_ = made(M, d)
        q, k = q.to(device, dtype), k.to(device, dtype)
        assert attention_library.library_for("attention", q, k) is None
    measured("flash", 160, device)
    assert attention_library.library_for("attention", *made(M, 160, device)[:2]) is not None


def test_a_library_that_plans_is_not_asked_for_shapes_that_come_once(device, measured, monkeypatch):
    measured("cudnn", D, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, k, *_ = made(M, D)
    with sdpa_backends(torch.device("cuda"), repeats=False):
        assert attention_library.library_for("attention", q, k) is LIBRARIES["flash"]
    assert attention_library.library_for("attention", q, k) is LIBRARIES["cudnn"]


@pytest.mark.parametrize(
    ("capability", "d", "expected"),
    [((9, 0), 128, "cudnn"), ((9, 0), 256, "flash"), ((8, 0), 64, "flash"), ((9, 0), 20, None)],
)
def test_a_library_is_the_default_of_a_gpu_that_was_not_measured(
    monkeypatch, capability, d, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU that is not there")
    facts = autotune.DeviceFacts(".".join(map(str, capability)), 132)
    monkeypatch.setattr(autotune, "device_facts", lambda device: facts)
    autotune._measured.cache_clear()
    with FakeTensorMode():
        q, k = (torch.empty_like(x, device="cuda") for x in made(M, d)[:2])
        found = attention_library.library_for("attention_backward", q, k)
        assert found is LIBRARIES.get(expected)
        torch.use_deterministic_algorithms(True)
        try:
            assert attention_library.library_for("attention_backward", q, k) is None
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", LIBRARIES)
def test_torchs_operators_take_these_arguments_without_a_gpu(measured, name):
    with FakeTensorMode():
        q, k, v, grad = (torch.empty_like(x, device="cuda") for x in made(M))
        out, lse = LIBRARIES[name].forward(q, k, v, False)
        grads = LIBRARIES[name].backward(grad, (q, k, v, out), lse, False)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_give_softmax_attention_and_gradients_that_add_up_over_blocks(name, causal):
    library, d = LIBRARIES[name], 64
    q, k, v, grad = (x.contiguous() for x in made(N if causal else M, d, "cuda"))
    exact = dense(*(x.cpu().double() for x in (q, k, v)), causal)
    try:
        out, lse = library.forward(q, k, v, causal)
    except RuntimeError as error:
        pytest.skip(f"{name} is not for this GPU: {error}")
    assert distance(out, exact[0]) < BOUND and distance(lse, exact[1]) < 1e-5
    expected = gradients(grad.cpu(), *(x.cpu() for x in (q, k, v)), causal)
    if causal:
        found = library.backward(grad, (q, k, v, out), lse, True)
    else:
        merged, total = torch.zeros_like(out).float(), torch.full_like(lse, float("-inf"))
        blocks = [(k[:, :, at], v[:, :, at]) for at in (slice(0, 16), slice(16, None))]
        for block in blocks:
            merge_(merged, total, *library.forward(q, *block, False))
        assert distance(merged, exact[0]) < BOUND
        saved = [(q, *block, merged.bfloat16()) for block in blocks]
        parts = [library.backward(grad, each, total, False) for each in saved]
        of_q, *of_kv = zip(*parts, strict=True)
        found = (sum(of_q), *(torch.cat(x, 2) for x in of_kv))
    for mine, theirs in zip(found, expected, strict=True):
        assert distance(mine, theirs) < 2 * BOUND
