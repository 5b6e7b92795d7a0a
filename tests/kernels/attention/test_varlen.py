"""Attention of packed documents, by a stand-in for FlashAttention's operators, which a CPU lacks.

The stand-in takes documents by their first tokens, as the operators are documented to; the oracle
takes a mask of pairs of tokens.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from exact import distance, seeded, softmax_attention

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.visibility import Visibility
from mtcli.core.parallel.attention_mask import AttentionMask, Documents, document_starts
from mtcli.core.parallel.context import attention_over
from mtcli.core.parallel.groups import make_groups
from mtcli.kernels.attention import varlen
from mtcli.kernels.attention.varlen import PackedDocuments, takes_documents
from mtcli.kernels.triton_launch import launch_mode

ROWS = [[3, 1, 8], [12], [5, 7]]
B, S, D = len(ROWS), 12, 8


def visible(left, right, n, device=None):
    """[n, n] pairs within FlashAttention's window, -1 of which is no limit."""
    ahead = torch.arange(n) - torch.arange(n)[:, None]
    near = (ahead <= right) | (right < 0)
    return near & ((ahead >= -left) | (left < 0))


def by_document(q, k, v, starts, left, right):
    """Attention of tokens [T, heads, d], a document at a time."""
    outs = []
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        heads = (x[first:end].transpose(0, 1)[None].double() for x in (q, k, v))
        mask = visible(left, right, end - first)
        outs.append(softmax_attention(*heads, mask)[0][0].transpose(0, 1))
    return torch.cat(outs)


def forward(q, k, v, starts, ends, longest, most, drop, causal, debug, **window):
    assert (starts is ends, longest == most, drop, debug) == (True, True, 0.0, False)
    assert starts.dtype == torch.int32 and longest == int(starts.diff().max())
    left, right = window["window_size_left"], window["window_size_right"]
    assert causal == ((left, right) == (-1, 0))
    out = by_document(q, k, v, starts, left, right)
    return out.to(q.dtype), q.new_zeros(q.shape[1], len(q)).float(), None, None, None


def backward(grad, q, k, v, out, lse, starts, ends, longest, most, drop, causal, *seed, **window):
    assert grad.is_contiguous() and grad.shape == q.shape == out.shape
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        sides = window["window_size_left"], window["window_size_right"]
        found = by_document(*leaves, starts, *sides)
        return tuple(x.to(q.dtype) for x in torch.autograd.grad(found, leaves, grad.double()))


@pytest.fixture
def flash(monkeypatch):
    stand_in = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(varlen, "_aten", stand_in)
    with launch_mode("fake"):
        yield


WINDOWS = [Visibility(), Visibility(right=None), Visibility(2, 0), Visibility(4, 2)]


def distances(device, groups, sees):
    """How far output and gradients of packed documents are from those of masked rows."""
    documents = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in ROWS])
    starts, longest = document_starts(documents.numpy())
    packed = PackedDocuments(torch.from_numpy(starts).to(device), longest)
    masking = AttentionMask(sees, Documents(documents.to(device), packed))
    heads = (4, groups, groups, 4)
    *leaves, grad = (seeded(B, n, S, D, seed=i).bfloat16() for i, n in enumerate(heads))
    mine = [x.to(device).transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    mine = [x.requires_grad_() for x in mine]
    axis = make_groups(ParallelLayout(1), 0, torch.device("cpu")).cp
    out = attention_over("ring")(*mine, axis, masking)
    out.backward(grad.to(device))
    exact = [x.double().requires_grad_() for x in leaves]
    left, right = (-1 if n is None else n for n in (sees.left, sees.right))
    same = documents[:, None, :, None] == documents[:, None, None]
    expected, _ = softmax_attention(*exact, same & visible(left, right, S))
    expected.backward(grad.double())
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]
    return [distance(ours, theirs) for ours, theirs in pairs]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("sees", WINDOWS)
def test_packed_documents_are_masked_rows(flash, groups, sees):
    assert max(distances("cpu", groups, sees)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("sees", WINDOWS)
def test_torchs_kernel_computes_what_the_stand_in_does(sees):
    assert takes_documents(torch.empty(1, 1, 2, D, dtype=torch.bfloat16, device="cuda"))
    assert max(distances("cuda", 2, sees)) < 8e-3


@pytest.mark.parametrize(
    ("taken", "shape", "dtype"),
    [
        (True, (64,), torch.bfloat16),
        (True, (256,), torch.float16),
        (False, (64,), torch.float32),
        (False, (68,), torch.bfloat16),
        (False, (264,), torch.bfloat16),
    ],
)
def test_flash_attention_takes_16_bits_in_rows_of_16_bytes(taken, shape, dtype):
    q = torch.empty(1, 1, 2, *shape, dtype=dtype)
    assert not takes_documents(q), "a CPU has no such kernel"
    with launch_mode("fake"):
        assert takes_documents(q) == taken
        torch.use_deterministic_algorithms(True)
        try:
            assert not takes_documents(q)
        finally:
            torch.use_deterministic_algorithms(False)


def test_torchs_operators_take_what_is_given():
    """Their schemas have the arguments by name and in order."""
    aten = torch.ops.aten
    names = [a.name for a in aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
                          "dropout_p", "is_causal", "return_debug_mask"]  # fmt: skip
    names = [a.name for a in aten._flash_attention_backward.default._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert names[6:14] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
                           "rng_state", "unused"]  # fmt: skip
    for operator in (aten._flash_attention_forward, aten._flash_attention_backward):
        options = {a.name for a in operator.default._schema.arguments if a.kwarg_only}
        assert {"window_size_left", "window_size_right"} <= options
    assert list(inspect.signature(forward).parameters)[-1] == "window"
