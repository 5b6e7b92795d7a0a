"""Attention over a cut context against softmax attention of the whole, written out on one rank."""

import itertools
import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from marks import slow_cases
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.visibility import Visibility
from mtcli.core.parallel import context
from mtcli.core.parallel.attention_mask import AttentionMask, Documents
from mtcli.core.parallel.context import attention_over, gather_sequence, in_sequence, zigzag
from mtcli.core.parallel.groups import make_groups
from mtcli.kernels.triton_launch import HAS_TRITON, interpreted

S, HEADS, WIDTH = 32, 8, 4  # chunks of 8 tokens on 2 ranks and of 4 on 4
ROWS = [
    [4, 12, 16],  # documents that end where chunks do
    [1, 1, 19, 2, 9],  # one that spans every rank, and some of one token
    [7, 25],
    [1] * S,  # nobody sees anything but itself: whole blocks are left out
]
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5}


CAUSAL, FULL = Visibility(), Visibility(right=None)
# Windows within a chunk and over several, and one of both sides.
WINDOWS = [Visibility(2, 0), Visibility(10, 0), Visibility(5, 3)]
CAPS = {WINDOWS[1]: 0.7}  # of scores, of those who have one


def documents_of(rows):
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])


def masking_of(visibility, documents):
    documents = None if documents is None else Documents(documents)
    return AttentionMask(visibility, documents, CAPS.get(visibility, 0.0))


def made(dtype, groups):
    """q, k, v and a gradient of the whole rows, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    heads = (HEADS, groups, groups, HEADS)
    return [torch.randn(len(ROWS), h, S, WIDTH, generator=generator, dtype=dtype) for h in heads]


def expected(tensors, visibility, documents):
    """(output, dq, dk, dv): one query at a time, by autograd, in float64."""
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    keys, values = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    rows = []
    for b in range(len(ROWS)):
        mixed = []
        for i in range(S):
            before, after = visibility.left, visibility.right
            seen = [j for j in range(S) if after is None or j - i <= after]
            seen = [j for j in seen if before is None or i - j <= before]
            if documents is not None:
                seen = [j for j in seen if documents[b, i] == documents[b, j]]
            scores = torch.einsum("hd,hmd->hm", q[b, :, i], keys[b][:, seen]) / WIDTH**0.5
            if cap := CAPS.get(visibility):
                scores = cap * (scores / cap).tanh()
            mixed.append(torch.einsum("hm,hmd->hd", scores.softmax(-1), values[b][:, seen]))
        rows.append(torch.stack(mixed, 1))
    out = torch.stack(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


@cache
def expected_once(case, visibility, masked):
    return expected(made(*case), visibility, documents_of(ROWS) if masked else None)


def attend(runtime, mode, visibility, documents, cases):
    """(output, dq, dk, dv) of this rank's tokens, for each case of `made`."""
    layout = ParallelLayout(runtime.world, cp=runtime.world)
    axis = make_groups(layout, runtime.rank, runtime.device).cp
    mine, found = zigzag(S, axis.size, axis.rank), []
    for case in cases:
        *leaves, grad = (x[:, :, mine] for x in made(*case))
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = attention_over(mode)(*leaves, axis, masking_of(visibility, documents))
        out.backward(grad)
        found.append([out.detach(), *(x.grad for x in leaves)])
    return found


MODES = ["ring", "all_gather", "a2a"]
WAYS = list(itertools.product(MODES, [CAUSAL, FULL, *WINDOWS], [False, True]))
CASES = [(dtype, groups) for dtype in CLOSE for groups in (HEADS, 4)]


def cases_of(visibility):
    return CASES[1:2] if visibility in WINDOWS else CASES


def attend_in_all_ways(runtime):
    """What `attend` found in each of WAYS: a mode, what queries see, whether of documents."""
    context.LEAST_BAND_BLOCK = 3  # or these rows would be one block
    masks = {masked: documents_of(ROWS) if masked else None for masked in (False, True)}
    return [attend(runtime, mode, sees, masks[m], cases_of(sees)) for mode, sees, m in WAYS]


@pytest.mark.parametrize("cp", [4, *slow_cases("3 s each", 1, 2)])
def test_values_and_every_gradient_are_those_of_the_whole(cp):
    ranks = run_ranks(cp, attend_in_all_ways)
    found_cases = [
        (way, number, case, sees, masked)
        for way, (_, sees, masked) in enumerate(WAYS)
        for number, case in enumerate(cases_of(sees))
    ]
    for way, number, case, visibility, masked in found_cases:
        whole = expected_once(case, visibility, masked)
        close = {"rtol": CLOSE[case[0]], "atol": CLOSE[case[0]]}
        for rank, found in enumerate(ranks):
            for mine, all_of_it in zip(found[way][number], whole, strict=True):
                part = all_of_it[:, :, zigzag(S, cp, rank)]
                torch.testing.assert_close(mine.double(), part, **close)


def attend_by_kernels(*given):
    with interpreted():
        return attend(*given)


@pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="no kernels interpreted"
)
@pytest.mark.parametrize(
    "way",
    [
        "ring",
        *slow_cases(
            "interpreted for 4 s", "all_gather", "ring window", "all_gather window", "ring sides"
        ),
    ],
)
def test_flash_kernels_have_the_values_and_gradients_of_the_whole(way):
    mode, *more = way.split()
    sees = {"window": WINDOWS[1], "sides": WINDOWS[2]}[more[0]] if more else CAUSAL
    documents, cases = documents_of(ROWS), [(torch.float32, 4)]
    whole = expected(made(*cases[0]), sees, documents)
    for rank, found in enumerate(run_ranks(2, attend_by_kernels, mode, sees, documents, cases)):
        for mine, all_of_it in zip(found[0], whole, strict=True):
            part = all_of_it[:, :, zigzag(S, 2, rank)]
            torch.testing.assert_close(mine.double(), part, rtol=2e-5, atol=2e-5)


def blocks_computed(runtime, visibility, documents):
    """How many hops of a ring this rank computed anything for."""
    import mtcli.core.parallel.context as subject

    calls = []
    subject.attention = lambda *given, real=subject.attention: calls.append(1) or real(*given)
    attend(runtime, "ring", visibility, documents, [(torch.float32, 4)])
    return len(calls)


def test_blocks_in_which_nobody_sees_a_key_are_left_out():
    apart = documents_of([[1] * S] * len(ROWS))
    assert run_ranks(4, blocks_computed, FULL, apart) == [1] * 4
    assert run_ranks(4, blocks_computed, FULL, torch.zeros_like(apart)) == [4] * 4


def test_a_window_computes_the_steps_of_a_ring_whose_chunks_it_reaches():
    # Of chunks of 4 tokens, a query sees its own and 1 before it; the last two are on rank 0.
    assert run_ranks(4, blocks_computed, Visibility(4, 0), None) == [2, 3, 3, 2]


@pytest.mark.parametrize("sees", [CAUSAL, FULL, *WINDOWS], ids=str)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_step_of_a_ring_leaves_out_halves_that_see_nothing_or_that_nothing_sees(cp, sees):
    before = S if sees.left is None else sees.left
    after = S if sees.right is None else sees.right
    half = S // cp // 2
    for rank, step in itertools.product(range(cp), repeat=2):
        i, j = zigzag(S, cp, rank)[:, None], zigzag(S, cp, (rank - step) % cp)
        visible = (i - before <= j) & (j <= i + after)
        chosen = context.visible_block(S // cp, step, SimpleNamespace(rank=rank, size=cp), sees)
        rows = visible.view(2, half, 2, half).any(3).any(1)
        expected = [[n for n in (0, 1) if rows.any(dim)[n]] for dim in (1, 0)]
        if chosen is None:
            assert expected == [[], []]
            continue
        *slices, is_full = chosen
        assert [list(range(S // cp)[part][::half]) for part in slices] == [
            [n * half for n in halves] for halves in expected
        ]
        assert is_full == bool(visible[slices[0], slices[1]].all())


LONG = 8192
CUTS = [3000, 1, 5191]


def long_ring(runtime, visibility, documents):
    axis = make_groups(ParallelLayout(2, cp=2), runtime.rank, runtime.device).cp
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 1, 1, LONG, 8, generator=generator)
    *leaves, grad = whole[:, :, :, zigzag(LONG, 2, axis.rank)]
    leaves = [x.requires_grad_() for x in leaves]
    out = attention_over("ring")(*leaves, axis, masking_of(visibility, documents))
    out.backward(grad)
    return [gather_sequence(x, axis).detach() for x in (out, *(x.grad for x in leaves))]


@pytest.mark.parametrize(
    ("cuts", "causal"), [([LONG], False), (CUTS, True)], ids=["row, full", "documents, causal"]
)
def test_a_ring_of_8192_tokens_is_torch_s_attention(cuts, causal):
    documents = documents_of([cuts]) if len(cuts) > 1 else None
    whole = torch.randn(4, 1, 1, LONG, 8, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in whole[:3]]
    parts = zip(*(x.split(cuts, 2) for x in leaves), strict=True)
    out = torch.cat([F.scaled_dot_product_attention(*x, is_causal=causal) for x in parts], 2)
    gradients = torch.autograd.grad(out, leaves, whole[3])
    for rank in run_ranks(2, long_ring, CAUSAL if causal else FULL, documents):
        for found, wanted in zip(rank, (out.detach(), *gradients), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_are_put_in_order_and_back_without_an_index_to_wait_for(cp, dim):
    axis, called = SimpleNamespace(size=cp), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.name())
            return function(*args, **(kwargs or {}))

    held = torch.cat([zigzag(S, cp, rank) for rank in range(cp)])
    whole = torch.arange(2.0 * S * S).view(2 * S, S).narrow(1 - dim, 0, 3).contiguous()
    whole = whole.narrow(dim, 0, S)
    x = whole.index_select(dim, held).requires_grad_()
    with Watch():
        ordered = in_sequence(x, axis, dim)
        back = ordered if cp == 1 else context._by_rank(ordered, axis, dim)
        (grad,) = torch.autograd.grad(back, x, x.detach())
    assert torch.equal(ordered, whole) and torch.equal(back, x) and torch.equal(grad, x)
    assert not [name for name in called if "index" in name or "sort" in name or "_to_copy" in name]
