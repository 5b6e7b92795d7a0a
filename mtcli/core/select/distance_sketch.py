"""Sketches long vectors by a keyed random map that preserves their distances.

Element i of a vector is added with a random sign to one of width / COPIES buckets in each of COPIES
copies, all over sqrt(COPIES) (sparse Johnson-Lindenstrauss: Kane and Nelson, 2014). The expected
square of a sketch is that of the vector, and its relative standard deviation is at most
sqrt(2 / width). The map is a function of the seed and i: ranks sketch the elements that they hold,
and the sum over ranks is the sketch of the vector.
"""

import torch
from torch import Tensor

from mtcli.kernels.random import random_bits, stream_key

COPIES = 4


class Sketch:
    """The sketch of vectors of `size` elements: `width` numbers, or all where they are no more."""

    def __init__(self, size: int, width: int, seed: int) -> None:
        assert width % COPIES == 0, width
        self.is_exact = size <= width
        self.width = size if self.is_exact else width
        self.keys = [stream_key(seed, "select.sketch", copy) for copy in range(COPIES)]

    def add(self, out: Tensor, values: Tensor, first: int) -> None:
        """Adds the sketches of values [b, c], elements first .. first + c - 1, to out [b, width].

        Sums are in out's dtype.
        """
        count = values.shape[1]
        if self.is_exact:
            out[:, first : first + count] += values
            return
        index = torch.arange(first, first + count, device=values.device)
        scaled, buckets = values.to(out.dtype) * COPIES**-0.5, self.width // COPIES
        for copy, key in enumerate(self.keys):
            bits = random_bits(key, index)
            signs = 1.0 - 2.0 * (bits & 1).to(out.dtype)
            bucket = copy * buckets + ((bits >> 1) & (2**62 - 1)) % buckets
            out.index_add_(1, bucket, scaled * signs)
