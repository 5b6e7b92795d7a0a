"""The bytes that plan tells of data parallelism and of exchanges between replicas are those that a
run's ranks send, and an exchange keeps the memory that is planned."""

import pytest
from ranks import run_ranks
from tiny import BIASED, GPT, LLAMA, MOE, Samples, run_config
from workers import worker_config

from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.diloco import DiLoCoFacts
from mtcli.core.exchange.easgd import EasgdFacts
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.exchange.lsgd import LsgdFacts
from mtcli.core.exchange.methods import METHODS
from mtcli.core.plan.exchange import exchange_of, owned_sizes, sync_bytes_per_step
from mtcli.core.plan.workload import Workload
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

WIDE = GPT | {"num_layers": 2, "hidden_size": 64}
NARROW = {"precision": "bf16", "gradients": "bf16"}
GIANT = {"w": 10**9}


def counted(runtime, configs, steps):
    """Of each config what this rank sent in some steps, its elements of each parameter that its
    optimizer has, and the bytes of its exchange's state."""
    found = []
    for config in configs:
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        trainer.sync_traffic.taken()
        for _ in range(steps):
            trainer.train_step(loader)
        loader.close()
        elements = {name: master.numel() for name, master in trainer.optimizer.masters.items()}
        kept = sum(x.nbytes for x in trainer.exchange.buffers())
        found.append((trainer.sync_traffic.taken(), elements, kept))
    return found


def of_each(world, configs, steps):
    """Of each config (bytes that a rank sent in a step on average, elements and state by rank)."""
    for ranks in zip(*run_ranks(world, counted, configs, steps), strict=True):
        sent, elements, kept = zip(*ranks, strict=True)
        yield sum(sent) / world / max(1, steps), elements, kept


STEPS = {  # of one replica, by world
    2: [(GPT, {}), (GPT, {"tp": 2}), (GPT, {"zero": 1}, NARROW), (GPT, {"zero": 3}, NARROW)],
    4: [
        (LLAMA, {"cp": 2, "tp": 2, "zero": 1}),
        (GPT, {"pp": 2}),
        (MOE, {"ep": 2, "zero": 1}),
        (GPT, {"zero": 3, "pp": 2}),
        (MOE, {"zero": 3, "ep": 2}),
        (LLAMA, {"tp": 2}, NARROW),
    ],
}


@pytest.mark.parametrize("world", STEPS)
def test_a_step_sends_what_is_planned(world):
    configs = [
        run_config(model, parallel=parallel, train=train[0] if train else {"precision": "fp32"})
        for model, parallel, *train in STEPS[world]
    ]
    for config, (sent, *_) in zip(configs, of_each(world, configs, 1), strict=True):
        planned = sync_bytes_per_step(Workload.of(config, world))
        # each bucket's ring rounds down
        assert world * sent == pytest.approx(planned, rel=2e-3), config.parallel
        assert (sent > 0) == (world > 2 or config.parallel.tp == 1)


GRAPHS = [
    ("dmsgd", "ring", 0.0),
    ("decentlam", "star", 1.0),
    ("da_dmsgd", "grid", 0.0),
    ("awc_dmsgd", "hierarchical", 1.0),
    ("dmsgd", "full", 0.0),
    ("dmsgd", "one_peer_exponential", 0.0),
]


def decentralized(method, topology, clip):
    return run_config(
        GPT,
        optimizer={"name": "sgd", "momentum": 0.9, "clip": clip},
        sync={"method": method, "topology": topology},
        batch={"global_batch_size": 6},
    )


def test_decentralized_replicas_send_and_keep_what_is_planned():
    configs = [decentralized(*graph) for graph in GRAPHS]
    for config, (sent, _, kept) in zip(configs, of_each(6, configs, 2), strict=True):
        planned = exchange_of(Workload.of(config, 6), 0)
        assert sent == pytest.approx(planned.sent_bytes(), rel=0.01), config.sync
        assert max(kept) == pytest.approx(planned.state_bytes(), rel=0.01), config.sync
        assert bool(kept[0]) == config.overlaps_neighbours


def test_the_facts_of_a_graph_are_in_a_plan():
    work = Workload.of(decentralized("decentlam", "ring", 0.0), 4)
    assert exchange_of(work, 0).graph() == {"spectral_gap": pytest.approx(2 / 3), "neighbours": 2}


DILOCO = [
    ({}, {}),
    ({"period": 4, "fragments": 2, "outer_momentum": 0.0}, {}),
    ({"quantise": 4, "overlap_steps": 1}, {"precision": "bf16"}),
    ({"method": "local", "quantise": 8}, {}),
    ({"top_k": 1 / 32}, {}),
    ({"top_k": 1 / 32, "quantise": 2}, {"precision": "fp64"}),
]


def test_diloco_sends_and_keeps_what_is_planned():
    configs = [
        run_config(
            WIDE,
            sync={"method": "diloco", "period": 2} | sync,
            train=train | {"steps": 8},
            batch={"global_batch_size": 3},
        )
        for sync, train in DILOCO
    ]
    for config, (sent, elements, kept) in zip(configs, of_each(3, configs, 8), strict=True):
        work = Workload.of(config, 3)
        planned = exchange_of(work, 0)
        assert elements[0] == owned_sizes(work, 0)
        assert sent == pytest.approx(planned.sent_bytes(), rel=1e-6), config.sync
        assert list(kept) == [planned.state_bytes()] * 3, config.sync


ALONE = [
    {"sync": {"method": "diloco", "replicas": 1}},
    {"sync": {"method": "easgd", "replicas": 1}, "optimizer": {"name": "sgd"}},
    {"sync": {"method": "dmsgd", "replicas": 1}, "optimizer": {"name": "sgd", "clip": 0.0}},
]


def test_one_replica_keeps_what_is_planned():
    configs = [run_config(WIDE, **sections) for sections in ALONE]
    for config, (_, _, kept) in zip(configs, of_each(2, configs, 1), strict=True):
        planned = exchange_of(Workload.of(config, 2), 0)
        assert planned.sent_bytes() == 0.0
        assert [*kept] == [planned.state_bytes()] * 2 and planned.state_bytes() > 0, config.sync


def test_owned_elements_are_the_mean_of_those_that_ranks_optimizers_have():
    layouts = [
        (GPT, {"tp": 2, "pp": 2}),
        (GPT, {"zero": 1, "pp": 2}),
        (MOE, {"ep": 2, "zero": 1}),
        (BIASED, {"tp": 2, "ep": 2, "zero": 0}),
    ]
    configs = []
    for model, parallel in layouts:
        sync = {"method": "diloco", "replicas": 1 if parallel.get("zero") else 0}
        configs.append(run_config(model, parallel=parallel, sync=sync))
    for config, (_, elements, _) in zip(configs, of_each(4, configs, 0), strict=True):
        work = Workload.of(config, 4)
        stages = work.layout.pp
        for pp_rank in range(stages):
            members = elements[pp_rank * 4 // stages : (pp_rank + 1) * 4 // stages]
            for name, planned in owned_sizes(work, pp_rank).items():
                mean = sum(sizes.get(name, 0) for sizes in members) / len(members)
                assert planned == pytest.approx(mean, rel=0.01, abs=1)


def test_a_run_that_ends_before_its_first_exchange_sends_nothing():
    sync = SyncConfig(method="diloco", period=8, fragments=2)
    sizes = {"blocks.0.w": 999, "blocks.1.w": 999}  # and one value more says who takes part
    shares = [ReplicaShare(sync, steps, 2, sizes, 4) for steps in (3, 4, 7, 8, 11, 12)]
    exchanges = [DiLoCoFacts(share).sent_bytes() * share.steps / 8000 for share in shares]
    assert exchanges == [0.0, 0.5, 0.5, 1.0, 1.0, 1.5]


WORKERS = [
    ({"method": "lsgd", "period": 2, "global_period": 4}, "fp64"),
    ({"method": "lsgd", "period": 2, "global_period": 3, "group_size": 4}, "bf16"),
    ({"method": "lsgd", "period": 2, "group_size": 1}, "bf16"),
    ({"method": "lsgd", "period": 2, "global_period": 2, "pull": 0.0}, "bf16"),
    ({"method": "easgd", "period": 2}, "fp64"),
    ({"method": "easgd", "period": 2, "pull": 0.0}, "bf16"),
]


def test_workers_of_leaders_and_a_centre_send_and_keep_what_is_planned():
    configs = [worker_config(GPT, sync, precision=precision) for sync, precision in WORKERS]
    found = of_each(4, configs, 5)
    for (fields, precision), (sent, elements, kept) in zip(WORKERS, found, strict=True):
        sync, width = SyncConfig(**fields), 8 if precision == "fp64" else 4
        owned = {"w": sum(elements[0].values())}
        planned = METHODS[sync.method](ReplicaShare(sync, 5, 4, owned, width))
        assert sent == pytest.approx(planned.sent_bytes(), rel=0.01), sync
        assert set(kept) == {planned.state_bytes()}, sync


def test_a_worker_sends_what_the_paper_counts():
    """With all of many workers in one group a worker sends P / tau and P / tau_G parameters; EASGD
    2 P / tau (arXiv:1905.10395, section 4)."""
    lsgd = SyncConfig(method="lsgd", period=4, global_period=16, group_size=1000)
    assert LsgdFacts(ReplicaShare(lsgd, 1600, 1000, GIANT, 4)).sent_bytes() == pytest.approx(
        4e9 / 4 + 4e9 / 16, rel=2e-3
    )
    easgd = SyncConfig(method="easgd", period=4)
    assert EasgdFacts(ReplicaShare(easgd, 1600, 1000, GIANT, 4)).sent_bytes() == pytest.approx(
        2 * 4e9 / 4, rel=2e-3
    )
