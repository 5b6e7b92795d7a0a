"""Where decentralized methods end on quadratics, against closed forms: arXiv:2104.11981, section 4.

The bias of DSGD is O(lr^2). Momentum multiplies it by 1 / (1 - b)^2, but not DecentLaM's.
"""

import numpy as np
import pytest
from marks import slow
from quadratics import bias, limit, problem, trained
from ranks import run_ranks

from mtcli.core.exchange.topology import MixingGraph

LR, STEPS = 0.1, 260
CASES = [
    ("dsgd", "ring", 0.0, LR),
    ("decentlam", "ring", 0.5, LR),
    ("decentlam", "star", 0.8, LR),
    ("dmsgd", "ring", 0.5, LR),
    ("dmsgd", "ring", 0.8, LR),
    ("awc_dmsgd", "ring", 0.5, LR),
    ("da_dmsgd", "ring", 0.5, LR),
]


@pytest.fixture(scope="module")
def points():
    """x [steps + 1, replicas, size] of each case."""
    ranks = run_ranks(4, trained, CASES, STEPS)
    return [np.stack([rank[i] for rank in ranks], 1) for i in range(len(CASES))]


@slow("thousands of steps of small problems, 5 s")
def test_each_method_ends_at_its_fixed_point(points):
    for case, found in zip(CASES, points, strict=True):
        method, topology, momentum, lr = case
        matrix = np.array(MixingGraph(topology, 4).matrix())
        np.testing.assert_allclose(found[-1], limit(method, matrix, momentum, lr), atol=1e-8)


@slow("the same steps")
def test_momentum_multiplies_the_bias_of_all_but_decentlam(points):
    biases = {case[:3]: bias(found[-1]) for case, found in zip(CASES, points, strict=True)}
    plain = biases["dsgd", "ring", 0.0]
    assert plain > 1e-4
    assert biases["decentlam", "ring", 0.5] == pytest.approx(plain, rel=1e-6)
    assert biases["dmsgd", "ring", 0.5] > 2.0 * plain
    assert biases["dmsgd", "ring", 0.8] > 8.0 * plain


def test_the_factor_is_1_over_1_less_momentum_squared_as_the_learning_rate_falls():
    matrix = np.array(MixingGraph("ring", 8).matrix())
    plain = bias(limit("dsgd", matrix, 0.0, 1e-5))
    for method in ("dmsgd", "awc_dmsgd"):
        for momentum in (0.5, 0.8, 0.9):
            factor = bias(limit(method, matrix, momentum, 1e-5)) / bias(
                limit(method, matrix, 0.0, 1e-5)
            )
            assert factor == pytest.approx(1.0 / (1.0 - momentum) ** 2, rel=0.01)
    assert plain == pytest.approx(bias(limit("decentlam", matrix, 0.9, 1e-5)))


@slow("the same steps")
def test_the_mean_of_replicas_moves_as_momentum_sgd_on_their_mean_gradient(points):
    """Whatever W: x+ = x - lr g + b (x - x-), of the means, with each gradient at its replica."""
    a, b = problem(4)
    for (_, _, momentum, lr), found in zip(CASES, points, strict=True):
        for step in range(1, 40):
            gradients = np.einsum("nij,nj->ni", a, found[step]) - b
            before, now, after = found[step - 1 : step + 2].mean(1)
            expected = now - lr * gradients.mean(0) + momentum * (now - before)
            np.testing.assert_allclose(after, expected, atol=1e-13)
