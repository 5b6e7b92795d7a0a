"""The bytes that plan counts for LSGD and EASGD are those that a run's metrics have."""

import pytest
from ranks import run_ranks
from tiny import GPT, Samples
from workers import worker_config

from mtcli.core.config.sync import SyncConfig
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.plan.exchange.leaders import EasgdCosts, LsgdCosts
from mtcli.core.plan.exchange.methods import METHODS
from mtcli.core.plan.exchange.share import ReplicaShare
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

STEPS = 9
GIANT = {"w": 10**9}
ROWS = {
    "lsgd": {"method": "lsgd", "period": 2, "global_period": 4},
    "lsgd, uneven periods": {"method": "lsgd", "period": 2, "global_period": 3, "group_size": 4},
    "lsgd, groups of one": {"method": "lsgd", "period": 2, "group_size": 1},
    "lsgd, no local pull": {"method": "lsgd", "period": 2, "global_period": 2, "pull": 0.0},
    "easgd": {"method": "easgd", "period": 2},
    "easgd, no pull": {"method": "easgd", "period": 2, "pull": 0.0},
}


def measured(runtime, config):
    """(bytes that a rank sent on average, elements that it owns, its bytes of state)."""
    import torch

    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    for _ in range(STEPS):
        trainer.train_step(loader)
    loader.close()
    total = torch.tensor([float(trainer.sync_traffic.taken())], dtype=torch.float64)
    owned = sum(x.numel() for x in trainer.optimizer.masters.values())
    kept = sum(x.nbytes for x in trainer.exchange.buffers())
    return all_reduce(total, trainer.groups.world).item() / runtime.world, owned, kept


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("name", ROWS)
def test_planned_bytes_are_those_that_leave(name, precision):
    sync, width = SyncConfig(**ROWS[name]), 8 if precision == "fp64" else 4
    found = run_ranks(4, measured, worker_config(GPT, ROWS[name], precision=precision))
    for total, owned, kept in found:
        planned = METHODS[sync.method](ReplicaShare(sync, STEPS, 4, {"w": owned}, width, width))
        assert total / STEPS == pytest.approx(planned.sent_bytes(), rel=0.01)
        assert kept == planned.state_bytes()


def test_a_worker_sends_what_the_paper_counts():
    """With all of many workers in one group a worker sends P / tau and P / tau_G parameters; EASGD
    2 P / tau (arXiv:1905.10395, section 4)."""
    lsgd = SyncConfig(method="lsgd", period=4, global_period=16, group_size=1000)
    assert LsgdCosts(ReplicaShare(lsgd, 1600, 1000, GIANT, 4, 4)).sent_bytes() == pytest.approx(
        4e9 / 4 + 4e9 / 16, rel=2e-3
    )
    easgd = SyncConfig(method="easgd", period=4)
    assert EasgdCosts(ReplicaShare(easgd, 1600, 1000, GIANT, 4, 4)).sent_bytes() == pytest.approx(
        2 * 4e9 / 4, rel=2e-3
    )
