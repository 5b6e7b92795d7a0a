"""Orders a blend's samples by greedy error diffusion, bit for bit as Megatron does."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.data.blend import normalised
from mtcli.core.runtime.compiled import compiled


class BlendOrder(NamedTuple):
    """Sample i of a blend is sample `sample[i]` (int64) of dataset `owner[i]` (int16)."""

    owner: np.ndarray
    sample: np.ndarray

    def fits(self) -> bool:
        """Says whether the arrays have the same length."""
        return [array.shape for array in self] == [(self.owner.size,)] * 2


def blend_indices(weights: Sequence[float], size: int) -> BlendOrder:
    """Chooses a dataset for each of `size` samples, and the index of the sample in the dataset.

    Sample i goes to the dataset that is furthest behind its share: argmax of w * max(i, 1) - drawn,
    the first where equal, in float64. A dataset of weight 0 is never chosen. Each pick depends on
    all previous ones, so this is a compiled loop: `python benchmarks/bench_blend.py` prints its
    picks per second.
    """
    if len(weights) > np.iinfo(np.int16).max:
        message = f"{len(weights)} datasets in a blend, and at most 32767 have a number"
        raise wrong(message, "preprocess several inputs into one dataset")
    order = BlendOrder(np.empty(size, np.int16), np.empty(size, np.int64))
    compiled(_pick, nogil=True)(np.array(normalised(weights)), *order)
    return order


def _pick(shares: np.ndarray, owner: np.ndarray, sample: np.ndarray) -> None:
    drawn = np.zeros(len(shares), np.int64)
    for i in range(len(owner)):
        step, furthest, most = float(max(i, 1)), 0, -np.inf
        for k in range(len(shares)):
            behind = shares[k] * step - drawn[k]
            if behind > most and shares[k] > 0:
                furthest, most = k, behind
        owner[i], sample[i] = furthest, drawn[furthest]
        drawn[furthest] += 1
