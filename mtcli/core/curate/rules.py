"""Length and symbol rules: Gopher's (arXiv:2112.11446, appendix A.1.1), over a batch at a time.

Words are what blanks divide, as in the paper. A document is told the first rule that it breaks.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mtcli.core.curate.batch import LETTERS, Batch, Tokens
from mtcli.core.curate.config import RulesConfig
from mtcli.core.curate.hashing import MASKS, Array, unaligned

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
PACKED_STOP_WORDS = [np.uint64(int.from_bytes(word.encode(), "little")) for word in STOP_WORDS]
BULLETS = frozenset("-*\u2022\u2023\u25e6\u00b7")
ELLIPSES = ("...", "\u2026")
LETTER = np.zeros(256, bool)
LETTER[list(LETTERS)] = True
LETTER[128:] = True
FAR = 16  # bytes of a word in which a letter is looked for


def make_rules(config: RulesConfig) -> Callable[[Batch], None]:
    """The stage: drops what breaks a rule."""
    return partial(_rules, config)


def _rules(config: RulesConfig, batch: Batch) -> None:
    for reason, broken in _broken(config, batch).items():
        for index in np.flatnonzero(broken):
            batch.drop(index, "rules", reason)


def _broken(config: RulesConfig, batch: Batch) -> dict[str, Array]:
    """Whether each document breaks each rule [documents], in the order they are told."""
    tokens = batch.tokens
    words = tokens.counts
    some = np.maximum(words, 1)
    length = _characters(batch, tokens) / some
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
            (_with_letters(batch, tokens) / some < config.min_alphabetic_words) & (words > 0)
        ),
        "too few stop words": _stop_words(batch, tokens) < config.min_stop_words,
    }


def _characters(batch: Batch, tokens: Tokens) -> Array:
    """Characters in the words of each document [documents]."""
    data, offsets = batch.lowered
    totals = np.concatenate([[0], np.cumsum(tokens.stops - tokens.starts)])
    sizes = totals[tokens.bounds[1:]] - totals[tokens.bounds[:-1]]
    if data.isascii():
        return sizes
    characters = np.array([len(document.text) for document in batch.documents], np.int64)
    return sizes - (np.diff(offsets) - 1 - characters)  # bytes of UTF-8 that begin no character


def _with_letters(batch: Batch, tokens: Tokens) -> Array:
    """Counts words that have a letter among their first FAR bytes [documents]."""
    data, _ = batch.lowered
    seen = np.frombuffer(data, np.uint8)
    has = LETTER[seen[tokens.starts]]
    left = np.flatnonzero(~has)
    for place in range(1, FAR):
        left = left[tokens.starts[left] + place < tokens.stops[left]]
        found = LETTER[seen[tokens.starts[left] + place]]
        has[left[found]] = True
        left = left[~found]
    totals = np.concatenate([[0], np.cumsum(has)])
    return totals[tokens.bounds[1:]] - totals[tokens.bounds[:-1]]


def _stop_words(batch: Batch, tokens: Tokens) -> Array:
    """Counts which of STOP_WORDS each document has [documents]."""
    data, _ = batch.lowered
    lengths = tokens.stops - tokens.starts
    short = np.flatnonzero(lengths <= max(map(len, STOP_WORDS)))
    words = unaligned(data, len(data) - 8)[tokens.starts[short]] & MASKS[lengths[short]]
    owners = tokens.owners[short]
    count = np.zeros(len(batch.documents), np.int64)
    for packed in PACKED_STOP_WORDS:
        has = np.zeros(len(batch.documents), bool)
        has[owners[words == packed]] = True
        count += has
    return count


def _lines_and_symbols(batch: Batch) -> tuple[Array, Array, Array, Array]:
    """Shares of bullet lines and of lines that end in an ellipsis; hash signs; ellipses."""
    rows = np.zeros((4, len(batch.documents)))
    for index in batch.alive():
        text = batch.documents[index].text
        ellipses = sum(map(text.count, ELLIPSES))
        rows[2:, index] = text.count("#"), ellipses
        several = text.split("\n") if "\n" in text else (text,)
        lines = [line for line in map(str.strip, several) if line]
        if lines:
            rows[0, index] = sum([line[0] in BULLETS for line in lines]) / len(lines)
            if ellipses:
                rows[1, index] = sum(line.endswith(ELLIPSES) for line in lines) / len(lines)
    return rows[0], rows[1], rows[2], rows[3]
