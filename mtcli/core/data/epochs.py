"""Converts a run's epochs into steps, for data that is read example by example."""

import math
from functools import partial
from pathlib import Path

from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.bert.training_data import open_examples
from mtcli.core.data.best_fit import open_conversations


def with_steps(config: RunConfig, tokenizer: str | Path | None) -> RunConfig:
    """Sets the steps of a config from its epochs, if any, by reading its data; `tokenizer` is that
    of the initial weights.

    Raises MtcliError where the data is wrong, the warm-up is longer, or steps are set too.
    """
    read = open_conversations if config.data.format == "conversations" else open_examples
    opened = [partial(read, config, tokenizer)]
    if config.train.eval_every:
        of_sets = map(config.validating, config.data.valid_sets)
        opened += [partial(read, one, tokenizer, "valid") for one in of_sets]
    per_epoch = collect_errors(*opened)[0].epochs.steps_per_epoch
    if not config.train.epochs:
        return config
    steps = max(1, math.ceil(config.train.epochs * per_epoch))
    if "steps" in config.train.model_fields_set and config.train.steps != steps:
        message = f"epochs={config.train.epochs:g} are {steps} steps of this data, "
        message += f"and train.steps={config.train.steps}"
        raise wrong(message, "set one of them", "train.epochs")
    if config.optimizer.warmup_steps > steps:
        message = f"warmup_steps={config.optimizer.warmup_steps} is above the {steps} steps of "
        message += f"{config.train.epochs:g} epochs"
        raise wrong(message, f"0 to {steps}", "optimizer.warmup_steps")
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": train})
