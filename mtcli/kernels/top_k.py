"""Top-k routing of a mixture of experts: from a router's logits to experts and their weights.

T tokens, E experts, k chosen. Scores are a softmax or sigmoids in float32 (float64 stays). A bias
is added for the choice alone (arXiv:2408.15664). With groups, experts are chosen within a token's
best groups alone (arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mtcli.kernels.custom_op import custom_op
from mtcli.kernels.triton_launch import cdiv, kernel, power_of_two, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

TILE = 2048  # scores that a program holds in registers


class TopKRouting(NamedTuple):
    """The options of a top-k router."""

    top_k: int
    softmax: bool  # else sigmoids
    normalize: bool  # weights of a token sum to 1
    groups: int = 1
    top_groups: int = 1


def route_reference(
    logits_TE: Tensor, bias_E: Tensor | None, options: TopKRouting
) -> tuple[Tensor, Tensor, Tensor]:
    """(scores [T, E], weights [T, k], experts [T, k], the best first)."""
    scores_TE = logits_TE.softmax(-1) if options.softmax else logits_TE.sigmoid()
    judged = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    experts = _allowed(judged, options).topk(options.top_k, -1).indices
    weights = scores_TE.gather(1, experts)
    if options.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return scores_TE, weights, experts


def _allowed(scores_TE: Tensor, options: TopKRouting) -> Tensor:
    """The scores, with -inf for experts outside a token's best groups."""
    if options.groups == 1:
        return scores_TE
    grouped = scores_TE.unflatten(-1, (options.groups, -1))
    best = min(1 if options.softmax else 2, grouped.shape[-1])
    strength = grouped.topk(best, -1).values.sum(-1)
    chosen = strength.topk(options.top_groups, -1).indices
    allowed = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, chosen, True)
    return grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)


@kernel()
def _within_best_groups(
    judged, TOP: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Scores, -inf outside a token's TOP groups; PAIRS: a group counts by the sum of its two best.

    Else by its best.
    """
    experts_per_group: tl.constexpr = E // GROUPS
    grouped = tl.reshape(judged, (TOKENS, GROUPS, experts_per_group))
    strength = tl.max(grouped, 2)
    if PAIRS:
        lane = tl.arange(0, experts_per_group)[None, None, :]
        is_other = lane != tl.argmax(grouped, 2)[:, :, None]
        strength += tl.max(tl.where(is_other, grouped, float("-inf")), 2)
    group, allowed = tl.arange(0, GROUPS)[None, :], tl.zeros((TOKENS, GROUPS), tl.int1)
    for _ in tl.static_range(TOP):
        best = group == tl.argmax(strength, 1)[:, None]
        allowed = allowed | best
        strength = tl.where(best, float("-inf"), strength)
    return tl.reshape(tl.where(allowed[:, :, None], grouped, float("-inf")), (TOKENS, E))


@kernel()
def _route(
    logits_ptr, bias_ptr, scores_ptr, weights_ptr, experts_ptr, tokens, EXPERTS: tl.constexpr,
    BIASED: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOKENS: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """SLOTS and E are powers of two of at least TOP and the number of experts."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    lane, slot = tl.arange(0, E)[None, :], tl.arange(0, SLOTS)[None, :]
    inside = (token < tokens) & (lane < EXPERTS)
    logits = tl.load(logits_ptr + token * EXPERTS + lane, mask=inside, other=float("-inf"))
    if SOFTMAX:
        top = tl.max(logits, 1)[:, None]
        parts = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top))
        sums = tl.sum(parts, 1)[:, None]
        scores = parts / tl.where(sums == 0.0, 1.0, sums)
    else:
        scores = tl.sigmoid(logits)
    tl.store(scores_ptr + token * EXPERTS + lane, scores, mask=inside)
    judged = scores
    if BIASED:
        judged += tl.load(bias_ptr + lane, mask=lane < EXPERTS, other=0.0)
    # NaN is chosen first, as by torch.topk, so that chosen lanes stay in range.
    judged = tl.where(judged != judged, float("inf"), judged)
    judged = tl.where(lane < EXPERTS, judged, float("-inf"))
    if GROUPS > 1:
        judged = _within_best_groups(judged, TOP_GROUPS, not SOFTMAX, TOKENS, E, GROUPS)
    # As int32 in the same order: a warp finds the largest of those in one instruction (redux).
    bits = judged.to(tl.int32, bitcast=True)
    left = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(left, 1)[:, None]
        expert = tl.min(tl.where(left == best, lane, E), 1)[:, None]
        chosen = tl.where(slot == i, expert, chosen)
        left = tl.where(lane == expert, -2147483648, left)
    at, inside = token * TOP + slot, (token < tokens) & (slot < TOP)
    tl.debug_barrier()  # scores that other threads have written
    weights = tl.load(scores_ptr + token * EXPERTS + chosen, mask=inside, other=0.0)
    if NORMALIZE:
        weights /= tl.where(token < tokens, tl.sum(weights, 1)[:, None], 1.0)
    tl.store(weights_ptr + at, weights, mask=inside)
    tl.store(experts_ptr + at, chosen, mask=inside)


@kernel()
def _route_backward(
    of_scores_ptr, of_weights_ptr, scores_ptr, weights_ptr, experts_ptr, out_ptr, tokens,
    EXPERTS: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP: tl.constexpr,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """out: the gradient of the logits, of all experts first and then of the chosen ones."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    lane, slot = tl.arange(0, E)[None, :], tl.arange(0, SLOTS)[None, :]
    inside, at = (token < tokens) & (slot < TOP), token * TOP + slot
    chosen = token * EXPERTS + tl.load(experts_ptr + at, mask=inside, other=0)
    chosen_scores = tl.load(scores_ptr + chosen, mask=inside, other=0.0)
    of_chosen = tl.load(of_weights_ptr + at, mask=inside, other=0.0)
    if NORMALIZE:
        # A normalized weight is its score over the sum of the chosen scores.
        weights = tl.load(weights_ptr + at, mask=inside, other=0.0)
        total = tl.where(token < tokens, tl.sum(chosen_scores, 1)[:, None], 1.0)
        of_chosen = (of_chosen - tl.sum(weights * of_chosen, 1)[:, None]) / total
    at = token * EXPERTS + lane
    everywhere = (token < tokens) & (lane < EXPERTS)
    scores = tl.load(scores_ptr + at, mask=everywhere, other=0.0)
    of_scores = tl.load(of_scores_ptr + at, mask=everywhere, other=0.0)
    of_chosen_scores = of_chosen + tl.load(of_scores_ptr + chosen, mask=inside, other=0.0)
    if SOFTMAX:
        shared = tl.sum(scores * of_scores, 1)[:, None]
        shared += tl.sum(chosen_scores * of_chosen, 1)[:, None]
        out = scores * (of_scores - shared)
        of_chosen_logits = chosen_scores * (of_chosen_scores - shared)
    else:
        out = of_scores * scores * (1.0 - scores)
        of_chosen_logits = of_chosen_scores * chosen_scores * (1.0 - chosen_scores)
    tl.store(out_ptr + at, out, mask=everywhere)
    tl.debug_barrier()
    tl.store(out_ptr + chosen, of_chosen_logits, mask=inside)


def route(
    logits_TE: Tensor, bias_E: Tensor | None, options: TopKRouting
) -> tuple[Tensor, Tensor, Tensor]:
    """`route_reference`, on a GPU in one launch each way; of equal scores the first is chosen.

    Bytes moved: 8 * T * E forward, 12 * T * E backward.
    """
    experts, groups = logits_TE.shape[-1], options.groups
    # The kernel reshapes a row into groups, which takes powers of two.
    powers = experts == power_of_two(experts) and groups == power_of_two(groups)
    if runs_triton(logits_TE) and (groups == 1 or (powers and experts > groups)):
        return _route_op(logits_TE, bias_E, *options)
    return route_reference(logits_TE, bias_E, options)


def _config(experts: int) -> dict[str, int]:
    lanes = power_of_two(experts)
    return {"TOKENS": max(1, TILE // lanes), "EXPERTS": experts, "E": lanes}


def _fake(logits: Tensor, bias: Tensor | None, top_k: int, *inputs: Any) -> tuple[Tensor, ...]:
    weights = logits.new_empty(len(logits), top_k)
    scores = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return scores, weights, torch.empty_like(weights, dtype=torch.int64)


@custom_op(
    "route(Tensor logits, Tensor? bias, int top_k, bool softmax, bool normalize, int groups,"
    " int top_groups) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    saved=lambda outputs, *inputs: (*outputs, *inputs[3:5]),
    backward=lambda of_scores, of_weights, _, *saved: _route_backward_op(
        of_scores, of_weights, list(saved[:3]), *saved[3:]
    ),
)
def _route_op(logits, bias, top_k, softmax, normalize, groups, top_groups):
    logits, (tokens, experts) = logits.float().contiguous(), logits.shape
    scores, weights = torch.empty_like(logits), logits.new_empty(tokens, top_k)
    chosen, config = torch.empty_like(weights, dtype=torch.int64), _config(experts)
    pointers = (logits, logits if bias is None else bias, scores, weights, chosen)
    flags = {"BIASED": bias is not None, "SOFTMAX": softmax, "NORMALIZE": normalize, "TOP": top_k}
    flags |= {"SLOTS": power_of_two(top_k), "GROUPS": groups, "TOP_GROUPS": top_groups}
    if tokens:
        _route[(cdiv(tokens, config["TOKENS"]),)](*pointers, tokens, **flags, **config)
    return scores, weights, chosen


@custom_op(
    "route_backward(Tensor of_scores, Tensor of_weights, Tensor[] kept, bool softmax,"
    " bool normalize) -> Tensor"
)
def _route_backward_op(of_scores, of_weights, saved, softmax, normalize):
    scores, weights, chosen = saved
    of_scores, of_weights = of_scores.contiguous(), of_weights.contiguous()
    (tokens, experts), out = scores.shape, torch.empty_like(scores)
    config = _config(experts)
    pointers = (of_scores, of_weights, scores, weights, chosen, out)
    flags = {"SOFTMAX": softmax, "NORMALIZE": normalize, "TOP": weights.shape[1]}
    flags["SLOTS"] = power_of_two(weights.shape[1])
    if tokens:
        grid = (cdiv(tokens, config["TOKENS"]),)
        _route_backward[grid](*pointers, tokens, **flags, **config)
    return out
