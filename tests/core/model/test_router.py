"""Routing against brute force: one token, one expert at a time, in plain Python."""

import math

import pytest
import torch
from tiny import MOE, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.inputs import make_inputs
from mtcli.core.model.router import Router
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers

B, S = 2, 12
CASES = {
    "softmax": {},
    "softmax, not rescaled": {"normalize_top_k": False},
    "sigmoid": {"router_score": "sigmoid"},
    "best 1 of 2 groups": {"router_groups": 2},
    "best 2 of 4 groups, sigmoid": {
        "router_groups": 4,
        "router_top_groups": 2,
        "router_score": "sigmoid",
    },
    "likeliest within capacity": {"capacity_factor": 0.75},
    "earliest within capacity": {"capacity_factor": 0.5, "drop_policy": "position"},
    "capacity of what a rank holds": {"capacity_factor": 0.75, "drop_scope": "sub_sequence"},
}
CASES |= {f"{case}, biased": CASES[case] | {"router_bias_update_rate": 0.1} for case in CASES}


def routed(changes):
    """(model, scores [T, E] by plain softmax or sigmoid, biases [E], what Router says)."""
    model = run_config(MOE | {"num_experts": 8, "top_k": 2} | changes).model
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    router = Router(
        "blocks.0.mlp.router", model, TensorParallelLayers(parameters(model), groups, torch.float64)
    )
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(B * S, model.hidden_size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        bias = torch.zeros(8)
        if router.bias is not None:  # more apart than scores can be, and far below them
            bias = router.bias.copy_(torch.randn(8, generator=generator) - 4.0)
    tokens = torch.zeros(B, S, dtype=torch.long)
    positions = torch.arange(S).remainder(3).expand(B, S)  # documents of 3 tokens: no capacity's
    inputs = make_inputs(model, torch.float64, tokens, positions=positions)
    logits = (x @ router.weight.T).tolist()
    scores = [_scores(row, model.router_score) for row in logits]
    return model, scores, bias.tolist(), router(x, inputs)[1]


def _scores(logits, kind):
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in logits]
    total = sum(math.exp(z) for z in logits)
    return [math.exp(z) / total for z in logits]


def _choices(scores, model):
    """The experts of one token, best first, within its best groups."""
    size = len(scores) // model.router_groups
    groups = [range(g * size, (g + 1) * size) for g in range(model.router_groups)]
    counted = 2 if model.router_score == "sigmoid" else 1  # DeepSeek-V3's and V2's strengths
    groups.sort(key=lambda g: -sum(sorted((scores[e] for e in g), reverse=True)[:counted]))
    allowed = [e for group in groups[: model.router_top_groups] for e in group]
    return sorted(allowed, key=lambda e: -scores[e])[: model.top_k]


def _kept(chosen, scores, model):
    """The (token, expert) pairs that fit, a set of tokens and an expert at a time."""
    if not model.capacity_factor:
        return {(t, e) for t, experts in enumerate(chosen) for e in experts}
    sets = [range(B * S)]
    if model.drop_scope == "full_sequence":
        sets = [range(b * S, (b + 1) * S) for b in range(B)]
    kept = set()
    for tokens in sets:
        limit = math.ceil(len(tokens) * model.top_k / model.num_experts * model.capacity_factor)
        for expert in range(model.num_experts):
            queue = [t for t in tokens if expert in chosen[t]]
            if model.drop_policy == "probs":
                queue.sort(key=lambda t: -scores[t][expert])
            kept |= {(t, expert) for t in queue[:limit]}
    return kept


@pytest.mark.parametrize("case", CASES)
def test_tokens_go_where_brute_force_sends_them(case):
    model, scores, bias, routing = routed(CASES[case])
    biased = [[s + b for s, b in zip(row, bias, strict=True)] for row in scores]
    chosen = [_choices(row, model) for row in biased]
    if any(bias):
        assert chosen != [_choices(row, model) for row in scores], "the case is a case"
    assert routing.experts.tolist() == chosen
    weights = [[row[e] for e in experts] for row, experts in zip(scores, chosen, strict=True)]
    if model.normalize_top_k:
        weights = [[w / sum(row) for w in row] for row in weights]
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(routing.weights.detach(), expected, rtol=1e-12, atol=1e-12)
    kept = _kept(chosen, scores, model)
    fits = [[(t, e) in kept for e in experts] for t, experts in enumerate(chosen)]
    assert fits == (routing.kept.tolist() if model.capacity_factor else [[True] * 2] * (B * S))
    assert model.capacity_factor or routing.kept is None
    dropped = B * S * model.top_k - len(kept)
    assert (dropped > 0) == (model.capacity_factor > 0)  # the case is a case
