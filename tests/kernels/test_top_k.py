import pytest
import torch
from exact import check, seeded

from mtcli.kernels.top_k import TopKRouting, route, route_reference

CHOICES = {
    "softmax": (TopKRouting(2, True, True), 7),
    "softmax, as they are": (TopKRouting(3, True, False), 60),
    "sigmoid": (TopKRouting(2, False, True), 5),
    "sigmoid, as they are, of one": (TopKRouting(1, False, False), 1),
    "best groups by their best": (TopKRouting(3, True, True, groups=4, top_groups=2), 16),
    "best groups by their best two": (TopKRouting(4, False, True, groups=8, top_groups=3), 32),
    "groups that are no power of two": (TopKRouting(2, False, True, groups=3, top_groups=2), 9),
}


def formula(choice, experts):
    """Scores and weights of chosen experts."""

    def function(logits):
        if choice.softmax:
            scores = logits.exp() / logits.exp().sum(1, keepdim=True)
        else:
            scores = 1.0 / (1.0 + (-logits).exp())
        weights = scores.take_along_dim(experts, 1)
        if choice.normalize:
            weights = weights / weights.sum(1, keepdim=True)
        return scores, weights

    return function


def brute_force(scores, bias, choice):
    """[T, k]: one token at a time, in plain Python."""
    chosen = []
    for row in scores.tolist():
        judged = [score + b for score, b in zip(row, bias.tolist(), strict=True)]
        size, best = len(row) // choice.groups, 1 if choice.softmax else 2
        groups = [range(g * size, (g + 1) * size) for g in range(choice.groups)]
        groups.sort(key=lambda g: -sum(sorted((judged[e] for e in g), reverse=True)[:best]))
        allowed = [e for group in groups[: choice.top_groups] for e in group]
        chosen.append(sorted(allowed, key=lambda e: -judged[e])[: choice.top_k])
    return torch.tensor(chosen)


@pytest.mark.parametrize("biased", [False, True])
def test_the_best_experts_are_chosen_and_weights_and_gradients_are_the_formula(
    device, biased, subtests
):
    for name, (choice, num_experts) in CHOICES.items():
        logits = 2.0 * seeded(130, num_experts, device=device).float().double()
        bias = 0.5 * seeded(num_experts, seed=1).float().double() * biased
        given = bias.to(device).float() if biased else None
        scores = formula(choice, torch.zeros(130, 1, dtype=torch.int64))(logits.cpu())[0]
        expected = brute_force(scores, bias, choice)
        with subtests.test(name):
            assert torch.equal(route(logits.float(), given, choice)[2].cpu(), expected)
            check(
                lambda x, given=given, choice=choice: route(x, given, choice)[:2],
                formula(choice, expected),
                [logits],
                torch.float32,
            )


def test_of_equal_scores_the_first_are_chosen_and_one_that_is_no_number_is_best(device):
    logits = torch.zeros(3, 6, device=device)
    logits[1, 4], logits[2] = float("nan"), float("nan")
    experts = route(logits, None, TopKRouting(2, False, False))[2].tolist()
    assert experts == [[0, 1], [4, 0], [0, 1]]


def test_no_tokens_choose_nothing(device):
    scores, weights, experts = route(
        torch.empty(0, 6, device=device), None, TopKRouting(2, True, True)
    )
    assert (scores.shape, weights.shape, experts.shape) == ((0, 6), (0, 2), (0, 2))


def test_a_cpu_chooses_in_float64():
    scores, weights, _ = route_reference(seeded(3, 4), None, TopKRouting(2, True, True))
    assert scores.dtype == weights.dtype == torch.float64
