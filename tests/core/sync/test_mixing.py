"""Mixes of tensors between ranks against a product with the dense matrix."""

import numpy as np
import pytest
import torch
from ranks import run_ranks

from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.topology import MixingGraph
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups
from mtcli.core.sync.mixing import mix_of

NAMES = ["ring", "symmetric_exponential", "grid", "star", "full"]
NAMES += ["one_peer_exponential", "hierarchical"]


def tensor_of(rank, size):
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(size))


def mixed(runtime, graphs, size):
    """W x of each graph and step, each mix started before the one before it has ended."""
    groups = make_groups(ParallelLayout(runtime.world, replicas=runtime.world), runtime.rank,
                         runtime.device)  # fmt: skip
    found, sizes, under_way = [], [], []
    for graph in graphs:
        for step in range(2 * graph.period):
            mix = mix_of(graph, groups.replicas, torch.empty(size, dtype=torch.float64))
            mix.x.copy_(tensor_of(runtime.rank, size) + step)
            mix.start(step)
            under_way.append(mix)
        sizes.append(sum(x.numel() for x in mix.buffers()))
        for mix in under_way[:-1]:
            mix.wait()
            found.append(mix.x.numpy())
        under_way = under_way[-1:]
    under_way[0].wait()
    return [*found, under_way[0].x.numpy()], sizes


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8])
def test_each_rank_has_its_row_of_the_matrix_s_product(n):
    size = 7  # which a machine's ranks do not divide
    graphs = [MixingGraph.of(SyncConfig(topology=name), n) for name in NAMES]
    graphs += [MixingGraph("hierarchical", n, n)]
    x = np.stack([tensor_of(rank, size).numpy() for rank in range(n)])
    expected = [
        np.array(graph.matrix(step)) @ (x + step)
        for graph in graphs
        for step in range(2 * graph.period)
    ]
    ranks = run_ranks(n, mixed, graphs, size)
    for rank, (found, _) in enumerate(ranks):
        for one, product in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, product[rank], rtol=1e-13, atol=1e-14)
    for i, graph in enumerate(graphs):
        most = max(sizes[i] for _, sizes in ranks)
        ceiling = -(-size // graph.machine_size) * graph.machine_size
        assert most == pytest.approx(graph.buffered_per_replica * ceiling)
