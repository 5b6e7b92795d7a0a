"""Mixing matrices: for any number of replicas doubly stochastic, and known ones by hand."""

import itertools

import numpy as np
import pytest

from mtcli.core.config.sync import ONE_SIDED, SyncConfig
from mtcli.core.exchange.topology import MixingGraph, grid_shape

NAMES = ["ring", "symmetric_exponential", "grid", "star", "full"]
NAMES += ["one_peer_exponential", "hierarchical"]
COUNTS = [*range(1, 19), 24, 25, 31, 32, 64]


def graph_of(name, n, **fields):
    return MixingGraph.of(SyncConfig(method="dsgd", topology=name, **fields), n)


def matrices(graph):
    return [np.array(graph.matrix(step)) for step in range(graph.period)]


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_is_doubly_stochastic_and_each_keeps_some_of_its_own(name):
    for n in COUNTS:
        for w in matrices(graph_of(name, n)):
            assert w.shape == (n, n) and w.min() >= 0.0 and w.diagonal().min() > 0.0
            np.testing.assert_allclose(w.sum(0), 1.0, rtol=1e-13)
            np.testing.assert_allclose(w.sum(1), 1.0, rtol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_the_matrices_that_are_not_symmetric_are_those_that_the_config_knows(name):
    for n in COUNTS:
        uneven = any(np.abs(w - w.T).max() > 1e-15 for w in matrices(graph_of(name, n)))
        assert uneven == (name in ONE_SIDED and n > 2), n


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_takes_from_those_that_send_to_it(name):
    for n, i in [(count, i) for count in COUNTS for i in range(count)]:
        graph = graph_of(name, n)
        for step, w in enumerate(matrices(graph) * 2):  # they begin again after a period
            others = np.arange(n) != i
            assert graph.senders(i, step) == np.flatnonzero((w[i] > 0) & others).tolist()
            assert graph.receivers(i, step) == np.flatnonzero((w[:, i] > 0) & others).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_spectral_gap_is_that_of_the_product_of_a_period_by_singular_values(name):
    for n in COUNTS[1:]:
        graph = graph_of(name, n)
        product = np.linalg.multi_dot([*matrices(graph), np.eye(n), np.eye(n)])
        rho = np.linalg.norm(product - 1.0 / n, 2) ** (1.0 / graph.period)
        if rho < 1e-3:  # an exact average, up to the root of rounding
            assert graph.spectral_gap == pytest.approx(1.0, abs=1e-3)
        else:
            assert graph.spectral_gap == pytest.approx(1.0 - rho, rel=1e-9)


def test_the_gap_of_a_grid_too_large_for_its_matrix_is_that_of_its_matrix():
    graph = graph_of("grid", 33 * 32)
    values = np.linalg.eigvalsh(np.array(graph.matrix()))
    assert graph.spectral_gap == pytest.approx(1.0 - values[-2], rel=1e-4)


def test_gaps_have_their_closed_forms():
    for n in (8, 1000, 20_011):
        ring = 2.0 / 3.0 * (1.0 - np.cos(2.0 * np.pi / n))
        assert graph_of("ring", n).spectral_gap == pytest.approx(ring, rel=1e-6)
        assert graph_of("star", n).spectral_gap == pytest.approx(1.0 / n)
    path = 2.0 / 3.0 * (1.0 - np.cos(np.pi / 2003))  # a grid of a prime number has one row
    assert graph_of("grid", 2003).spectral_gap == pytest.approx(path, rel=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_one_peer_a_step_averages_exactly_after_log2_n_steps(n):
    graph = graph_of("one_peer_exponential", n)
    assert graph.period == n.bit_length() - 1 and graph.most_neighbours == 1
    product = np.eye(n)
    for w in matrices(graph):
        product = w @ product
    np.testing.assert_allclose(product, 1.0 / n, rtol=1e-13)


def test_known_matrices():
    third, half, quarter = 1 / 3, 1 / 2, 1 / 4
    assert graph_of("ring", 2).matrix() == [[half, half], [half, half]]
    ring = [[third if abs(i - j) in (0, 1, 4) else 0.0 for j in range(5)] for i in range(5)]
    np.testing.assert_allclose(graph_of("ring", 5).matrix(), ring)
    star = [[quarter] * 4] + [[quarter] + [0.75 * (i == j) for j in (1, 2, 3)] for i in (1, 2, 3)]
    np.testing.assert_allclose(graph_of("star", 4).matrix(), star)
    around = graph_of("symmetric_exponential", 40)  # 1 and 4 and 16 away, on both sides
    assert around.senders(0) == [1, 4, 16, 24, 36, 39] and around.row(0)[16] == pytest.approx(1 / 7)
    square = graph_of("grid", 9)
    assert square.senders(4) == [1, 3, 5, 7] and square.senders(0) == [1, 3]
    # A corner has 3 in its neighbourhood, an edge 4, the centre 5.
    assert square.row(0) == pytest.approx({0: 0.5, 1: 0.25, 3: 0.25})
    assert square.row(1) == pytest.approx({0: 0.25, 1: 0.3, 2: 0.25, 4: 0.2})


def test_a_hierarchy_averages_in_a_machine_and_mixes_machines():
    graph = graph_of("hierarchical", 12, machine_size=2)
    above = np.array(graph_of("symmetric_exponential", 6).matrix())
    np.testing.assert_allclose(graph.matrix(), np.kron(above, np.full((2, 2), 0.5)))
    assert graph_of("hierarchical", 12).machine_size == 3
    assert graph_of("hierarchical", 7).machine_size == 1  # of a prime number there is no other
    assert graph_of("ring", 12).machine_size == 1


def test_a_grid_is_as_square_as_its_number_allows():
    assert [grid_shape(n) for n in (1, 6, 7, 16, 24)] == [(1, 1), (2, 3), (1, 7), (4, 4), (4, 6)]


def test_what_a_replica_sends_is_the_mean_number_of_receivers_or_that_of_a_ring():
    for name, n in itertools.product(["ring", "symmetric_exponential", "grid", "star"], COUNTS):
        graph = graph_of(name, n)
        receivers = [len(graph.receivers(i)) for i in range(n)]
        assert graph.sent_per_replica == pytest.approx(sum(receivers) / n)
        assert graph.most_neighbours == max(receivers)
    assert graph_of("full", 8).sent_per_replica == 2 * 7 / 8
    # 6 machines of 4: 1/4 to each of 3 mates, twice, and to 2 of the other machines.
    graph = graph_of("hierarchical", 24, machine_size=4)
    assert graph.sent_per_replica == pytest.approx(2 * 3 / 4 + graph.machines.most_neighbours / 4)
