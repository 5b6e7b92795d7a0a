"""Parses the words of the data section: blends of datasets and their splits, as Megatron's flags
have them."""

import math
import re
from collections.abc import Sequence
from typing import Literal

from mtcli.core.config.errors import wrong

Which = Literal["train", "valid", "test"]
SPLITS: tuple[Which, ...] = ("train", "valid", "test")


def read_blend(
    words: Sequence[str], field: str = ""
) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Parses words into (prefixes, their weights where given, with any sum).

    An odd number of words is all prefixes. An even number is pairs of weight and prefix if the
    first of every pair is a number, and prefixes if none is. Raises MtcliError for a mixture, and
    for invalid weights.
    """
    if not words:
        raise wrong("no data paths", 'give prefixes, or weights and prefixes: ["0.7", "a"]', field)
    firsts = [_number(word) for word in words[::2]]
    numbers = sum(first is not None for first in firsts)
    if len(words) % 2 or numbers == 0:
        return tuple(words), None
    if numbers < len(firsts):
        message = f"{numbers} of {len(firsts)} pairs begin with a weight: {' '.join(words)}"
        raise wrong(message, "give every prefix a weight before it, or none", field)
    weights = [first for first in firsts if first is not None]
    if min(weights) < 0 or not 0 < sum(weights) < math.inf:
        message = f"weights {weights} are not all >= 0 with a sum > 0"
        hint = "such as 7 and 3: shares, of any sum; leave out a dataset instead of a weight of 0"
        raise wrong(message, hint, field)
    return tuple(words[1::2]), tuple(weights)


def read_split(text: str, field: str = "") -> tuple[float, float, float]:
    """Parses the shares of train, valid and test, with any sum: "969,30,1", padded with zeros to
    three.

    Raises MtcliError for anything else.
    """
    try:
        shares = [float(word) for word in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    legal = 1 <= len(shares) <= 3 and 0 < sum(shares) < math.inf
    if not legal or re.search(r"-\s*[.0-9]|[a-zA-Z]", text):
        message = f'split "{text}" is not up to three numbers >= 0 with a sum > 0'
        raise wrong(message, '"969,30,1" gives 96.9 % to train, 3 % to valid, 0.1 % to test', field)
    train, valid, test = shares + [0.0] * (3 - len(shares))
    return train, valid, test


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
