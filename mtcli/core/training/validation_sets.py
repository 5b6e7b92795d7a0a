"""Evaluates a run on its validation sets, one after another, and names their losses.

A set's loss is in nats a label. Where PREFIX.json states the bytes of its text, it is also in bits
a byte, which models with different tokenizers share: nats * tokens / (bytes * ln 2), as if each
token stood for the data set's mean number of bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from mtcli.core.config.errors import collect_errors
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.indexed import stated_token_bytes
from mtcli.core.data.loader import RunData
from mtcli.core.parallel.groups import Groups
from mtcli.core.training.loader import MicroBatchLoader, open_loader


class Closes(Protocol):
    """A loader of one or several models."""

    def close(self) -> None:
        """Ends its readers."""


Loader = TypeVar("Loader", bound=Closes)


class SetLosses(NamedTuple):
    """A model's losses on the validation sets, by name; empty where there is one without a name."""

    by_set: Mapping[str, float]
    token_bytes: Mapping[str, float]  # mean bytes of a token, where known
    best_of: str | None

    @property
    def loss(self) -> float:
        """The loss that the run goes by: of the set train.best_of, or the mean over sets."""
        if self.best_of is not None:
            return self.by_set[self.best_of]
        return sum(self.by_set.values()) / len(self.by_set)

    def row(self) -> dict[str, float]:
        """The losses by their keys in a step's record."""
        bits = {
            name: self.by_set[name] / (count * math.log(2))
            for name, count in self.token_bytes.items()
        }
        named = {f"valid_loss/{name}": loss for name, loss in self.by_set.items() if name}
        in_bits = {f"valid_bits_per_byte/{name}".rstrip("/"): rate for name, rate in bits.items()}
        return {"valid_loss": self.loss} | named | in_bits


class ValidationSets(Generic[Loader]):
    """The loaders of a run's validation sets by name, of one model or of several."""

    def __init__(
        self, loaders: Mapping[str, Loader], token_bytes: Mapping[str, float], best_of: str | None
    ) -> None:
        self.loaders, self.token_bytes, self.best_of = loaders, token_bytes, best_of

    def evaluate(self, evaluate: Callable[[Loader], Sequence[float]]) -> list[SetLosses]:
        """Returns each model's losses; `evaluate` gives those of one set. Collective."""
        of_sets = [evaluate(loader) for loader in self.loaders.values()]
        return [
            SetLosses(dict(zip(self.loaders, losses, strict=True)), self.token_bytes, self.best_of)
            for losses in zip(*of_sets, strict=True)
        ]

    def close(self) -> None:
        """Ends the loaders' readers."""
        for loader in self.loaders.values():
            loader.close()


def open_validation(config: RunConfig, groups: Groups) -> dict[str, MicroBatchLoader]:
    """Opens the validation sets' loaders by name; none where train.eval_every is 0.

    Raises MtcliError with the problems of all.
    """
    names = list(config.data.valid_sets) if config.train.eval_every else []
    opened = (partial(open_loader, config.validating(n), groups, validation=True) for n in names)
    return dict(zip(names, collect_errors(*opened), strict=True))


def token_bytes(config: RunConfig, loaders: Mapping[str, MicroBatchLoader]) -> dict[str, float]:
    """Returns the mean bytes of a token of each set of text for which all its data sets state
    them."""
    if config.data.format != "tokens" or config.model.head != "lm":
        return {}
    means = {name: _mean_token_bytes(loader.batches) for name, loader in loaders.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean_token_bytes(batches: RunData) -> float | None:
    """Weights the data sets by the samples that come from each."""
    counts = zip(batches.prefixes, batches.drawn(0, len(batches)), strict=True)
    of_sets = [(stated_token_bytes(prefix), samples) for prefix, samples in counts if samples]
    total = 0.0
    for size, samples in of_sets:
        if size is None:
            return None
        total += size * samples
    return total / sum(samples for _, samples in of_sets)
