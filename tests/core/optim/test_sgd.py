"""SGD against torch.optim.SGD, in double precision, with a factor on gradients as clipping has."""

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, Samples, run_config

from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer


def largest_differences(runtime, configs):
    return [largest_difference(runtime, config) for config in configs]


def largest_difference(runtime, config):
    """Of weights after three steps from torch's, which are given the same gradients."""
    trainer, o = Trainer(config, runtime), config.optimizer
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    weights = trainer.strategy.weights()
    theirs = {name: torch.nn.Parameter(x.clone()) for name, x in weights.items()}
    decayed = {name for name in theirs if trainer.optimizer.update_of(name).decays}
    kinds = [[p for n, p in theirs.items() if (n in decayed) == decays] for decays in (True, False)]
    decay = o.weight_decay, 0.0
    groups = [{"params": p, "weight_decay": d} for p, d in zip(kinds, decay, strict=True) if p]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=o.momentum, nesterov=o.nesterov)
    ours = trainer.optimizer.step

    def noting_gradients(gradients, lr, factor=1.0):
        """The step writes over what it is given."""
        for name, gradient in gradients.items():
            theirs[name].grad = gradient * factor
        ours(gradients, lr, factor)

    trainer.optimizer.step = noting_gradients
    for _ in range(3):
        step = trainer.train_step(loader)
        for group in sgd.param_groups:
            group["lr"] = step.lr
        sgd.step()
    pairs = [(weights[name], theirs[name]) for name in theirs]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


RULES = [
    {"momentum": 0.0},
    {"momentum": 0.9, "weight_decay": 0.0, "clip": 0.0},
    {"momentum": 0.9, "nesterov": True, "clip": 0.5},
]


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"zero": 1})])
def test_a_step_is_torchs(world, parallel):
    fields = {"parallel": parallel, "train": {"precision": "fp64"}}
    rules = [{"name": "sgd", "lr": 0.1} | rule for rule in RULES]
    configs = [run_config(GPT, optimizer=rule, **fields) for rule in rules]
    for differences in run_ranks(world, largest_differences, configs):
        assert max(differences) < 1e-13
