"""Applies length and symbol rules, Gopher's (arXiv:2112.11446, appendix A.1.1), to a batch at a
time.

Words are divided by blanks, as in the paper. A document is dropped for the first rule that it
breaks.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mtcli.core.curate.batch import BLANKS, LETTERS, Batch
from mtcli.core.curate.config import RulesConfig
from mtcli.core.curate.hashing import PACKED, Array, unaligned

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
PACKED_STOP_WORDS = np.array(
    [int.from_bytes(word.encode(), "little") for word in STOP_WORDS], np.uint64
)
BULLETS = frozenset("-*\u2022\u2023\u25e6\u00b7")
ELLIPSES = ("...", "\u2026")
KINDS = np.array([0 if byte in BLANKS else 1 for byte in range(256)], np.uint8)
KINDS[list(LETTERS)] = 2
KINDS[128:] = 2
FAR = 16  # bytes of a word in which a letter is looked for


def make_rules(config: RulesConfig) -> Callable[[Batch], None]:
    """Builds the stage that drops documents which break a rule."""
    _rules(config, Batch([]))  # loads the loop before workers fork
    return partial(_rules, config)


def _rules(config: RulesConfig, batch: Batch) -> None:
    for reason, broken in _broken(config, batch).items():
        for index in np.flatnonzero(broken).tolist():
            batch.drop(index, "rules", reason)


def _broken(config: RulesConfig, batch: Batch) -> dict[str, Array]:
    """Tests each rule on all documents: bool [documents] by rule, in the order of the report."""
    from mtcli.core.curate.word_loops import count_words

    data, offsets = batch.lowered
    codes = np.frombuffer(data, np.uint8)
    eights = unaligned(data, len(data) - PACKED)
    counts = count_words(codes, eights, offsets, KINDS, FAR, PACKED_STOP_WORDS)
    words, size, lettered, heard = counts.T
    some = np.maximum(words, 1)
    characters = np.array([len(document.text) for document in batch.documents], np.int64)
    continued = np.diff(offsets) - 1 - characters  # bytes of UTF-8 that begin no character
    length = (size - continued) / some
    bullets, ellipsis_lines, hashes, ellipses = _lines_and_symbols(batch)
    return {
        "too few words": words < config.min_words,
        "too many words": words > config.max_words,
        "short words": (length < config.min_word_length) & (words > 0),
        "long words": length > config.max_word_length,
        "too many hash signs": hashes / some > config.max_symbol_ratio,
        "too many ellipses": ellipses / some > config.max_symbol_ratio,
        "bullet lines": bullets > config.max_bullet_lines,
        "lines that end in an ellipsis": ellipsis_lines > config.max_ellipsis_lines,
        "too few words with letters": (
            (lettered / some < config.min_alphabetic_words) & (words > 0)
        ),
        "too few stop words": np.bitwise_count(heard) < config.min_stop_words,
    }


def _lines_and_symbols(batch: Batch) -> Array:
    """Computes [4, documents]: the shares of bullet lines and of lines that end in an ellipsis, and
    the numbers of hash signs and ellipses."""
    rows = []
    for document in batch.documents:
        text = document.text
        ellipses = text.count(ELLIPSES[0]) + text.count(ELLIPSES[1])
        several = text.split("\n") if "\n" in text else (text,)
        lines = [line for line in map(str.strip, several) if line]
        some = len(lines) or 1
        bullets = sum([line[0] in BULLETS for line in lines]) / some
        ends = sum([line.endswith(ELLIPSES) for line in lines]) / some if ellipses else 0.0
        hashes = text.count("#") if "#" in text else 0  # most have none, which is told sooner
        rows.append((bullets, ends, hashes, ellipses))
    return np.array(rows, float).reshape(-1, 4).T
