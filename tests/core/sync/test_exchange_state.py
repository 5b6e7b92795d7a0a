"""State of an exchange goes through a checkpoint, whatever layout restores it."""

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, run_config
from trained import checkpoint_of, save_to

from mtcli.core.sync import methods
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.training.state import initialise, resume
from mtcli.core.training.step import Trainer


class Remembering(ReplicaExchange):
    """Keeps three times the weights that this rank updates, of every parameter."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = {name: torch.zeros_like(owned) for name, owned in self.inside.weights().items()}

    def state(self):
        return {f"error/{name}": kept for name, kept in self.kept.items()}


def capture(runtime, config, folder, exchange):
    methods.EXCHANGES["all_reduce"] = exchange  # of this forked process
    trainer = Trainer(config, runtime)
    initialise(trainer)
    if exchange is Remembering:
        for name, owned in trainer.strategy.weights().items():
            trainer.exchange.kept[name].copy_(3.0 * owned)
    save_to(folder, trainer)


def restored(runtime, config, folder):
    """Whether the state is three times the weights, and whether it is zero, in each parameter."""
    methods.EXCHANGES["all_reduce"] = Remembering
    trainer = Trainer(config, runtime)
    for kept in trainer.exchange.kept.values():
        kept.fill_(5.0)
    resume(trainer, checkpoint_of(folder, 0))
    pairs = [(trainer.exchange.kept[n], owned) for n, owned in trainer.strategy.weights().items()]
    return [(torch.equal(kept, 3.0 * owned), not kept.any()) for kept, owned in pairs]


@pytest.mark.parametrize(
    ("world", "parallel"), [(1, {}), (2, {"zero": 1}), (4, {"tp": 2, "pp": 2}), (2, {"cp": 2})]
)
def test_the_state_of_an_exchange_is_restored_on_any_layout(tmp_path, world, parallel):
    run_ranks(4, capture, run_config(GPT, parallel={"tp": 2, "zero": 1}), tmp_path, Remembering)
    for rank in run_ranks(world, restored, run_config(GPT, parallel=parallel), tmp_path):
        assert rank and all(equal for equal, _ in rank) and not all(zero for _, zero in rank)


def test_an_exchange_that_the_run_did_not_have_before_starts_at_zero(tmp_path):
    run_ranks(2, capture, run_config(GPT), tmp_path, ReplicaExchange)
    for rank in run_ranks(2, restored, run_config(GPT), tmp_path):
        assert rank and all(zero for _, zero in rank)
