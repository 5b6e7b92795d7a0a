"""Parses blends and splits of datasets as Megatron does."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mtcli.core.config.blend import SPLITS, Which, read_blend, read_split
from mtcli.core.config.schema import DataConfig

# Each weighted dataset is built this much longer than its share, as Megatron's
# mid_level_dataset_surplus: rounding may ask a few samples more of it.
SURPLUS = 0.005


class Blend(NamedTuple):
    """Datasets by prefix, and their normalised weights where any are given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str], field: str = "") -> Blend:
    """Parses `words` into a blend with normalised weights; see `read_blend`."""
    prefixes, weights = read_blend(words, field)
    return Blend(prefixes, None if weights is None else tuple(normalised(weights)))


def parse_split(text: str) -> tuple[float, float, float]:
    """Parses the normalised shares of train, valid and test; see `read_split`."""
    train, valid, test = normalised(read_split(text))
    return train, valid, test


def normalised(weights: Sequence[float]) -> list[float]:
    """Divides `weights` by their sum, in float64 and in numpy's order of summing, as Megatron
    does."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def split_range(split: str, which: Which, count: int) -> tuple[int, int]:
    """Returns the half-open range of `count` sequences that belongs to `which`."""
    bounds = list(accumulate((0.0, *parse_split(split))))
    owner = SPLITS.index(which)
    low, high = (int(round(bounds[i] * float(count))) for i in (owner, owner + 1))
    return low, high


def chosen(data: DataConfig, which: Which) -> tuple[Sequence[str], str]:
    """Returns the words of a run's training data or only validation set, and the split that applies
    to it."""
    if which == "valid":
        return (data.valid_words, "0,1,0") if data.valid else (data.train, data.split)
    # data.valid holds nothing back from data.train
    return data.train, "1,0,0" if data.valid else data.split


def shares_of(size: int, weights: Sequence[float], surplus: float = 0.0) -> list[int]:
    """Divides `size` samples among datasets: ceil(ceil(size * w) * (1 + surplus))."""
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]
