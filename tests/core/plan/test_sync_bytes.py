"""The bytes that plan tells of data parallelism are those that a run's ranks send."""

import pytest
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.plan.sync_bytes import sync_bytes_per_step
from mtcli.core.plan.workload import Workload
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer


def sent(runtime, config):
    """Bytes that this rank sends in a step."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    trainer.sync_traffic.taken()
    trainer.train_step(loader)
    return trainer.sync_traffic.taken()


@pytest.mark.parametrize(
    ("model", "world", "parallel"),
    [
        (GPT, 1, {}),
        (GPT, 2, {"tp": 2}),
        (GPT, 2, {}),
        (GPT, 4, {"zero": 1}),
        (LLAMA, 4, {"tp": 2}),
        (LLAMA, 4, {"cp": 2, "tp": 2, "zero": 1}),
        (GPT, 4, {"pp": 2}),
        (MOE, 4, {"ep": 2, "zero": 1}),
        (GPT, 2, {"zero": 3}),
        (GPT, 4, {"zero": 3, "pp": 2}),
        (MOE, 4, {"zero": 3, "ep": 2}),
    ],
    ids=str,
)
def test_a_step_sends_what_is_planned(model, world, parallel):
    config = run_config(model, parallel=parallel, train={"precision": "fp32"})
    measured = sum(run_ranks(world, sent, config))
    planned = sync_bytes_per_step(Workload.of(config, world))
    assert measured == pytest.approx(planned, rel=2e-3)  # each bucket's ring rounds down
    assert (measured > 0) == (world > parallel.get("tp", 1))
