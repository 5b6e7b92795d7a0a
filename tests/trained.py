"""A rank that trains some steps in memory, from the seed or a checkpoint, and saves."""

from tiny import Samples

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import save
from mtcli.core.config.loading import dump_toml
from mtcli.core.parallel.tree import make_tree
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, progress, resume, saved_replicas, shards
from mtcli.core.training.step import Trainer


def train_and_save(runtime, config, folder=None, start=0, stop=4):
    """The steps start + 1 .. stop, from folder's checkpoint of `start` or, at 0, from the seed.

    The last one is saved in the folder, where there is one.
    """
    trainer = Trainer(config, runtime)
    if start:
        resume(trainer, checkpoint_of(folder, start))
    else:
        initialise(trainer)
    assert trainer.step == start
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(stop - start)]
    loader.close()
    if folder:
        written = save_to(folder, trainer)
        assert written.name == f"step-{stop:08d}"
    return done


def save_to(folder, trainer, base=None):
    """Saves a trainer's state, of adapters with the record of their base, and removes no older
    checkpoint; every rank calls it."""
    return save(
        folder,
        trainer.step,
        shards(trainer),
        ranks=make_tree(trainer.groups.world),
        extra=progress(trainer, base=base).model_dump(),
        config_toml=dump_toml(trainer.config),
        tokenizer=None,
        keep=0,
        replicas=saved_replicas(trainer),
    )


def checkpoint_of(folder, step):
    """The checkpoint of a step."""
    return open_checkpoint(folder / f"step-{step:08d}")
