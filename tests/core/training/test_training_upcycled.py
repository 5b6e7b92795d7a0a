"""Training goes on from a dense checkpoint as a mixture of experts, on any layout.

The oracles are the dense model's own loss and the one-rank run, in float64.
"""

import pytest
import torch
from ranks import run_ranks
from tiny import LLAMA, Samples, run_config

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.loading import dump_toml
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.upcycle import upcycled
from mtcli.core.convert.upcycle_recipe import recipe_of
from mtcli.core.parallel.tree import ALONE as NO_PEERS
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, load_weights
from mtcli.core.training.step import Trainer

STEPS = 6
BALANCED = "sequence_aux_loss_coeff=0.01"
CASES = {
    f"num_experts=4,top_k=2,{BALANCED}": [(2, {"tp": 2, "ep": 2})],
    f"num_experts=8,top_k=4,granularity=2,{BALANCED}": [
        (2, {"ep": 2, "zero": 3}),
        (4, {"tp": 2, "pp": 2, "etp": 2}),
    ],
}
MODEL = LLAMA | {"num_layers": 2, "init_std": 0.1}
ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))


def config_of(model, parallel):
    train = {"steps": STEPS, "precision": "fp64", "matmul": "strict"}
    optimizer = {"lr": 1e-2, "warmup_steps": 1}
    return run_config(model, parallel=parallel, train=train, optimizer=optimizer)


def losses_of(runtime, config, folder):
    """Losses of a run whose weights come from a checkpoint."""
    trainer = Trainer(config, runtime)
    load_weights(trainer, open_checkpoint(folder))
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    losses = [trainer.train_step(loader).loss for _ in range(STEPS)]
    loader.close()
    return losses


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense checkpoint and the losses of going on with it."""
    config = config_of(MODEL, {})
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    pieces = []
    for name, weight in trainer.stages[0].named_parameters():
        shape = trainer.table[name].shape  # without the padding of the vocabulary
        kept = weight.detach()[: shape[0]] if len(shape) == 2 else weight.detach()  # no padding
        whole = kept.reshape(shape)
        pieces.append(Shard(name, whole, (0,) * len(shape), shape))
    about = {"extra": {}, "config_toml": dump_toml(config), "tokenizer": None, "keep": 0}
    root = tmp_path_factory.mktemp("dense")
    folder = save(root, 1, pieces, ranks=NO_PEERS, **about)
    return folder, losses_of(ALONE, config, folder)


@pytest.mark.parametrize(("recipe", "layouts"), CASES.items(), ids=["whole", "slices"])
def test_a_run_starts_at_the_dense_loss_falls_and_is_the_same_on_every_layout(
    dense, tmp_path, recipe, layouts
):
    folder, dense_losses = dense
    source = open_checkpoint(folder)
    found = upcycled(source, recipe_of(recipe, source.model))
    to_mtcli(found, tmp_path / "moe", *parse_layout(""), WriteOptions())
    fields = found.model.model_dump(exclude_none=True)
    alone = losses_of(ALONE, config_of(fields, {}), tmp_path / "moe")
    assert alone[0] == pytest.approx(dense_losses[0], rel=1e-12)
    assert abs(alone[-1] - dense_losses[-1]) > 1e-6, "experts have parted"
    assert alone[-1] < alone[0] - 0.1
    for world, parallel in layouts:
        config = config_of(fields, parallel)
        for losses in run_ranks(world, losses_of, config, tmp_path / "moe"):
            assert losses == pytest.approx(alone, rel=1e-10)
