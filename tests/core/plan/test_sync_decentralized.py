"""Planned bytes and memory of decentralized replicas against what runs count and allocate."""

import pytest
from ranks import run_ranks
from tiny import GPT, Samples, run_config

from mtcli.core.plan.exchange.decentralized import graph_facts
from mtcli.core.plan.exchange.methods import exchange_of
from mtcli.core.plan.workload import Workload
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

RUNS = [
    ("dmsgd", "ring", 0.0),
    ("decentlam", "star", 1.0),
    ("da_dmsgd", "grid", 0.0),
    ("awc_dmsgd", "hierarchical", 1.0),
    ("dmsgd", "full", 0.0),
    ("dmsgd", "one_peer_exponential", 0.0),
]


def config_of(method, topology, clip):
    return run_config(
        GPT,
        optimizer={"name": "sgd", "momentum": 0.9, "clip": clip},
        sync={"method": method, "topology": topology},
        batch={"global_batch_size": 6},
    )


def counted(runtime, configs):
    """For each config (bytes that this rank sent in 2 steps, those that it keeps)."""
    found = []
    for config in configs:
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        trainer.sync_traffic.taken()
        for _ in range(2):
            trainer.train_step(loader)
        loader.close()
        kept = sum(x.nbytes for x in trainer.exchange.buffers())
        found.append((trainer.sync_traffic.taken(), kept))
    return found


@pytest.mark.parametrize("world", [6])
def test_planned_bytes_and_memory_are_those_of_a_run(world):
    configs = [config_of(*run) for run in RUNS]
    ranks = run_ranks(world, counted, configs)
    for i, config in enumerate(configs):
        sent = sum(rank[i][0] for rank in ranks) / (2 * world)
        planned = exchange_of(Workload.of(config, world), 0)
        assert sent == pytest.approx(planned.sent_bytes(), rel=0.01)
        kept = max(rank[i][1] for rank in ranks)
        assert kept == pytest.approx(planned.state_bytes(), rel=0.01)
    assert [bool(kept) for _, kept in ranks[0]] == [
        config.overlaps_neighbours for config in configs
    ]


def test_the_facts_of_a_graph_are_in_a_plan():
    facts = graph_facts(config_of("decentlam", "ring", 0.0).sync, 4)
    assert facts == {"spectral_gap": pytest.approx(2 / 3), "neighbours": 2}
