"""Attention on CPU by plain GEMMs, over blocks of heads whose scores stay in the cache.

Torch's CPU flash kernel multiplies by MKL, which leaves AMD's matrix units idle on short rows. Time
relative to torch's kernel, head_dim 64 (benchmarks/bench_attention.py), on one core of an AVX-512
EPYC: full rows of 256 and 512 tokens 0.90 forward and 0.75 backward in float32, 0.45 in bfloat16; a
ring's blocks of 64 and 128 keys 0.20 to 0.49 and 0.12 to 0.27. On an Intel Xeon float32 took 1.4 to
1.6 and 1.1 to 1.3, so kernels/limits.py treats no row as short there.
b sequences, h heads, n queries, m keys, d head width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mtcli.kernels import limits
from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.gemm import gemm_dtype, matmul

Heads = slice
# Scores between documents that take as long as what one document costs beside its GEMMs. On a core
# of an EPYC 13 documents of 20 tokens, 4 heads of 64, took 3.3 ms both ways, 5.5 one by one
# (benchmarks/bench_attention.py).
MASKED_SCORES = 24_000
IN_GRAPH_ROWS = 128  # tokens of rows whose scores a compiled graph may save for backward


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of [b, h, n, d] each; backward recomputes the probabilities.

    Scores and probabilities are in the dtype of GEMMs. Inside torch.compile it is a custom
    operator, or for short rows plain operations, which the graph fuses. Elsewhere it is an autograd
    Function, whose dispatch costs a tenth of an operator's.
    """
    if not torch.compiler.is_compiling():
        return _CpuAttention.apply(q, k, v, causal)
    if q.shape[2] <= IN_GRAPH_ROWS and gemm_dtype(q) == q.dtype:
        bias = _causal_bias(q[0], k[0], causal)
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + bias
        return torch.matmul(torch.softmax(scores, -1), v)
    return _op(q, k, v, causal)


def attend_by_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of one query a row, q [b, h, 1, d], and keys of fewer heads g.

    The queries of a group are rows of one GEMM, which reads its keys once. `mask` is bool
    [b, 1, 1, m]. For 32 and 4 heads of 64 and 512 keys a core of an EPYC took 0.16 ms instead of
    the 0.7 of torch's kernel, 1.1 instead of 6.1 for 8 rows, and as long for 64.
    """
    rows = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1)).squeeze(3)  # [b, g, h / g, d]
    scores = matmul(rows, k.transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return matmul(scores.softmax(-1), v).reshape(q.shape)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        saved = [_by_head(x) for x in (q, k, v)]
        out = torch.empty_like(saved[0])
        _forward(*saved, _causal_bias(*saved[:2], causal), out)
        ctx.save_for_backward(*saved, out)
        ctx.causal = causal
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = ctx.saved_tensors  # asked for once: activation checkpointing gives them once
        dq, dk, dv = gradients = [torch.empty_like(x) for x in saved[:3]]
        _backward(_by_head(grad), saved, _causal_bias(*saved[:2], ctx.causal), gradients)
        return dq.view(grad.shape), dk.view(grad.shape), dv.view(grad.shape), None


def cpu_attention_of_documents(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Sequence[int]
) -> Tensor:
    """`cpu_attention` of rows [b, h, s, d] divided, row by row, into documents of `lengths` tokens.

    One autograd function for all documents; short documents share GEMMs under a mask.
    """
    groups = document_groups(lengths, q.shape[1], q.shape[2])
    return _DocumentAttention.apply(q, k, v, causal, groups)


def document_groups(lengths: Sequence[int], heads: int, seq_len: int) -> list[list[int]]:
    """Groups consecutive documents of a row that are computed together: as long as the masked
    scores between two documents take less time than separate GEMMs."""
    groups: list[list[int]] = []
    tokens = end = 0  # of the last group, and where its row has come to
    for length in lengths:
        starts_row = end % seq_len == 0
        if not starts_row and 2 * heads * tokens * length < MASKED_SCORES:
            groups[-1].append(length)
            tokens += length
        else:
            groups.append([length])
            tokens = length
        end += length
    return groups


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, groups: Sequence[Sequence[int]]
    ) -> Tensor:
        saved = [_by_token(x) for x in (q, k, v)]
        out = torch.empty_like(saved[0])
        for lengths, (*group, mixed) in zip(groups, _split((*saved, out), groups), strict=True):
            _forward(*group, _document_bias(group[0], causal, lengths), mixed)
        ctx.save_for_backward(*saved, out)
        ctx.causal, ctx.groups = causal, groups
        return _by_row(out, len(q))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, rows = ctx.saved_tensors, len(grad)
        gradients = [torch.empty_like(saved[0]) for _ in range(3)]
        tensors = _split((_by_token(grad), *saved, *gradients), ctx.groups)
        for lengths, (grad_hnd, *group) in zip(ctx.groups, tensors, strict=True):
            bias = _document_bias(group[0], ctx.causal, lengths)
            _backward(grad_hnd, group[:4], bias, group[4:])
        return *(_by_row(x, rows) for x in gradients), None, None


def _split(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tokens of each group, from tensors [h, b * s, d]."""
    sizes = [sum(lengths) for lengths in groups]
    return zip(*(x.split(sizes, 1) for x in tensors), strict=True)


def _by_token(x: Tensor) -> Tensor:
    """[b, h, s, d] -> [h, b * s, d], contiguous."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def _by_row(x: Tensor, rows: int) -> Tensor:
    return x.unflatten(1, (rows, -1)).transpose(0, 1)


def cpu_attention_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of q [b, h, n, d] over k and v [b, h, m, d], as `attention`."""
    shape = q.shape
    q, k, v = (_by_head(x) for x in (q, k, v))
    out, lse, bias = torch.empty_like(q), q.new_empty(q.shape[:2]), _causal_bias(q, k, causal)
    for heads in _blocks(q, k):
        scores = _scores(q[heads], k[heads], bias)
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        torch.bmm(scores, v[heads], out=out[heads])
        out[heads].div_(total)
        lse[heads] = total.log_().add_(top)[..., 0]
    return out.view(shape), lse.view(shape[:3])


def cpu_attention_backward(
    grad: Tensor, saved: tuple[Tensor, ...], lse: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v for a block of keys, given output and log-sum-exp over all keys."""
    shapes = [x.shape for x in saved[:3]]
    q, k, v, out = (_by_head(x) for x in saved)
    bias, lse = _causal_bias(q, k, causal), lse.reshape(*q.shape[:2], 1)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _gradients(
        _by_head(grad),
        (q, k, v, out),
        lambda heads: _scores(q[heads], k[heads], bias).sub_(lse[heads]).exp_(),
        grads,
    )
    return tuple(x.view(shape) for x, shape in zip(grads, shapes, strict=True))


def _forward(q_hnd: Tensor, k_hmd: Tensor, v_hmd: Tensor, bias: Tensor, out: Tensor) -> None:
    """Writes attention's output to `out` [h, n, d]."""
    for heads in _blocks(q_hnd, k_hmd):
        values = v_hmd[heads].to(bias.dtype)
        _bmm(_softmax(q_hnd[heads], k_hmd[heads], bias), values, out[heads])


def _backward(
    grad_hnd: Tensor, saved: Sequence[Tensor], bias: Tensor, gradients: Sequence[Tensor]
) -> None:
    q, k, _, _ = saved
    _gradients(grad_hnd, saved, lambda heads: _softmax(q[heads], k[heads], bias), gradients)


def _gradients(
    grad: Tensor,
    saved: Sequence[Tensor],
    probabilities: Callable[[Heads], Tensor],
    gradients: Sequence[Tensor],
) -> None:
    """FlashAttention's backward (arXiv:2205.14135, appendix B.4), a block of heads at a time."""
    q, k, v, out = saved
    dq, dk, dv = gradients
    wide = gemm_dtype(q)
    for heads in _blocks(q, k):
        p = probabilities(heads)
        g, mixed, values = (x[heads].to(wide) for x in (grad, out, v))
        _bmm(p.transpose(1, 2), g, dv[heads])
        ds = torch.bmm(g, values.transpose(1, 2))
        ds.sub_((g * mixed).sum(-1, keepdim=True)).mul_(p).mul_(q.shape[-1] ** -0.5)
        _bmm(ds, k[heads].to(wide), dq[heads])
        _bmm(ds.transpose(1, 2), q[heads].to(wide), dk[heads])
        # Before the next block allocates its own.
        del p, ds


def _bmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a b of each head to `out`, rounded if that is narrower."""
    if a.dtype == out.dtype:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _softmax(q_hnd: Tensor, k_hmd: Tensor, bias: Tensor) -> Tensor:
    scores = _scores(q_hnd, k_hmd, bias)
    return torch.softmax(scores, -1, out=scores)


def _scores(q_hnd: Tensor, k_hmd: Tensor, bias: Tensor) -> Tensor:
    q, k = q_hnd.to(bias.dtype), k_hmd.to(bias.dtype)
    return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)


def _causal_bias(q_hnd: Tensor, k_hmd: Tensor, causal: bool) -> Tensor:
    """[n, m] or [1, 1]: -inf where a key comes after the query, else 0, in the scores' dtype."""
    wide = gemm_dtype(q_hnd)
    if not causal:
        return q_hnd.new_zeros(1, 1, dtype=wide)
    shape = q_hnd.shape[1], k_hmd.shape[1]
    return q_hnd.new_full(shape, float("-inf"), dtype=wide).triu(1)


def _document_bias(x_hnd: Tensor, causal: bool, lengths: Sequence[int]) -> Tensor:
    """`_causal_bias` of a group, -inf also where a key is of another document."""
    bias = _causal_bias(x_hnd, x_hnd, causal)
    if len(lengths) == 1:
        return bias
    document = torch.repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))
    return torch.where(document[:, None] == document, bias, float("-inf"))


def _by_head(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _blocks(q_hnd: Tensor, k_hmd: Tensor) -> list[Heads]:
    """Blocks of heads whose [n, m] scores fill an L2 cache."""
    step = limits.block_rows(q_hnd.shape[1] * k_hmd.shape[1] * gemm_dtype(q_hnd).itemsize)
    return limits.row_slices(len(q_hnd), step)


def _like(x: Tensor) -> Tensor:
    """An empty output like x [b, h, n, d]; for one sequence with x's own strides."""
    return torch.empty_like(_by_head(x)).view(x.shape)


@custom_op(
    "attention_in_blocks(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor",
    fake=lambda q, *inputs: _like(q),
    saved=lambda out, q, k, v, causal: (q, k, v, out, causal),
    backward=lambda grad, *saved: _backward_op(grad, *saved),
)
def _op(q, k, v, causal):
    out = torch.empty_like(_by_head(q))
    q_hnd, k_hmd = _by_head(q), _by_head(k)
    _forward(q_hnd, k_hmd, _by_head(v), _causal_bias(q_hnd, k_hmd, causal), out)
    return out.view(q.shape)


@custom_op(
    "attention_in_blocks_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out,"
    " bool causal) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, q, k, v, *inputs: (_like(q), _like(k), _like(v)),
)
def _backward_op(grad, q, k, v, out, causal):
    saved = tuple(_by_head(x) for x in (q, k, v, out))
    dq, dk, dv = gradients = [torch.empty_like(x) for x in saved[:3]]
    _backward(_by_head(grad), saved, _causal_bias(*saved[:2], causal), gradients)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
