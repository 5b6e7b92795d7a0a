"""The bytes that DiLoCo is planned to send and to keep are those that a run sends and keeps."""

import pytest
from ranks import run_ranks
from tiny import BIASED, GPT, MOE, Samples, run_config

from mtcli.core.config.sync import SyncConfig
from mtcli.core.plan.exchange.diloco import DiLoCoCosts
from mtcli.core.plan.exchange.methods import exchange_of, owned_sizes
from mtcli.core.plan.exchange.share import ReplicaShare
from mtcli.core.plan.workload import Workload
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

WIDE = GPT | {"num_layers": 2, "hidden_size": 64}
STEPS = 8
SYNCS = {
    "in full": ({}, {}),
    "twice a period": ({"period": 4, "fragments": 2, "outer_momentum": 0.0}, {}),
    "4 bits, overlapped": ({"quantise": 4, "overlap_steps": 1}, {"precision": "bf16"}),
    "8 bits, local": ({"method": "local", "quantise": 8}, {}),
    "largest": ({"top_k": 1 / 32}, {}),
    "largest, 2 bits": ({"top_k": 1 / 32, "quantise": 2}, {"precision": "fp64"}),
}


def measured(runtime, config):
    """(bytes that this rank sent in some steps, owned elements, bytes of the exchange's state)."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    for _ in range(STEPS):
        trainer.train_step(loader)
    loader.close()
    elements = {name: master.numel() for name, master in trainer.optimizer.masters.items()}
    kept = sum(x.nbytes for x in trainer.exchange.buffers())
    return trainer.sync_traffic.taken(), elements, kept


@pytest.mark.parametrize(("sync", "train"), SYNCS.values(), ids=SYNCS)
def test_planned_bytes_are_those_that_a_run_sends_and_keeps(sync, train):
    config = run_config(
        WIDE,
        sync={"method": "diloco", "period": 2} | sync,
        train=train | {"steps": STEPS},
        batch={"global_batch_size": 3},
    )
    ranks, work = run_ranks(3, measured, config), Workload.of(config, 3)
    assert ranks[0][1] == owned_sizes(work, 0)
    planned = exchange_of(work, 0)
    assert sum(count for count, *_ in ranks) / 3 / STEPS == pytest.approx(
        planned.sent_bytes(), rel=1e-6
    )
    assert [kept for *_, kept in ranks] == [planned.state_bytes()] * 3


def elements(runtime, config):
    trainer = Trainer(config, runtime)
    return {name: master.numel() for name, master in trainer.optimizer.masters.items()}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT, {"tp": 2, "pp": 2}),
        (GPT, {"zero": 1, "pp": 2}),
        (MOE, {"ep": 2, "zero": 1}),
        (BIASED, {"tp": 2, "ep": 2, "zero": 0}),
    ],
)
def test_owned_elements_are_the_mean_of_those_that_ranks_optimizers_have(model, parallel):
    sync = {"method": "diloco", "replicas": 1 if parallel.get("zero") else 0}
    config = run_config(model, parallel=parallel, sync=sync)
    found, work = run_ranks(4, elements, config), Workload.of(config, 4)
    stages = work.layout.pp
    for pp_rank in range(stages):
        members = found[pp_rank * 4 // stages : (pp_rank + 1) * 4 // stages]
        for name, planned in owned_sizes(work, pp_rank).items():
            mean = sum(sizes.get(name, 0) for sizes in members) / len(members)
            assert planned == pytest.approx(mean, rel=0.01, abs=1)


def test_a_run_that_ends_before_its_first_exchange_sends_nothing():
    sync = SyncConfig(method="diloco", period=8, fragments=2)
    sizes = {"blocks.0.w": 999, "blocks.1.w": 999}  # and one value more says who takes part
    shares = [ReplicaShare(sync, steps, 2, sizes, 4, 4) for steps in (3, 4, 7, 8, 11, 12)]
    exchanges = [DiLoCoCosts(share).sent_bytes() * share.steps / 8000 for share in shares]
    assert exchanges == [0.0, 0.5, 0.5, 1.0, 1.0, 1.5]
