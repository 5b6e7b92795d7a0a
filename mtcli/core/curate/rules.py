"""Length and symbol rules: Gopher's (arXiv:2112.11446, appendix A.1.1), over a batch at a time.

Words are what blanks divide, as in the paper. A document is told the first rule that it breaks.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from mtcli.core.curate.batch import IN_TOKEN, LETTERS, Batch, Tokens
from mtcli.core.curate.config import RulesConfig
from mtcli.core.curate.hashing import Array, token_hashes, unaligned

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("-", "*", "\u2022", "\u2023", "\u25e6", "\u00b7")
ELLIPSES = ("...", "\u2026")
LETTER = np.zeros(256, bool)
LETTER[list(LETTERS)] = True
LETTER[128:] = True
CONTINUED = slice(0x80, 0xC0)  # bytes of UTF-8 that begin no character
BEGINS = np.ones(256, bool)
BEGINS[CONTINUED] = False


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
    seen = np.frombuffer(data, np.uint8)
    inside = IN_TOKEN[seen] & BEGINS[seen]
    return _sums(inside, offsets)


def _sums(flags: Array, offsets: Array) -> Array:
    """Counts what is true from each offset to the next."""
    starts = np.minimum(offsets[:-1], flags.size - 1)
    return np.add.reduceat(flags, starts, dtype=np.int64) if starts.size else starts


def _with_letters(batch: Batch, tokens: Tokens) -> Array:
    """Counts words that have a letter [documents]."""
    if not tokens.starts.size:
        return np.zeros(len(batch.documents), np.int64)
    data, _ = batch.lowered
    letters = LETTER[np.frombuffer(data, np.uint8)]
    have = np.logical_or.reduceat(letters, tokens.starts)
    return np.bincount(tokens.owners, have, len(batch.documents))


def _stop_words(batch: Batch, tokens: Tokens) -> Array:
    """Counts which of STOP_WORDS each document has [documents]."""
    lengths = tokens.stops - tokens.starts
    short = np.flatnonzero(lengths <= max(map(len, STOP_WORDS)))
    some = tokens._replace(starts=tokens.starts[short], stops=tokens.stops[short])
    hashes, owners = batch.hashes_of(some), tokens.owners[short]
    count = np.zeros(len(batch.documents), np.int64)
    for word in STOP_WORDS:
        has = np.zeros(len(batch.documents), bool)
        has[owners[hashes == hash_of(word)]] = True
        count += has
    return count


def hash_of(word: str) -> np.uint64:
    """The hash that a batch gives a word."""
    data = word.encode()
    view = unaligned(data + bytes(16), len(data) + 8)
    return token_hashes(view, np.zeros(1, np.int64), np.full(1, len(data)))[0]


def _lines_and_symbols(batch: Batch) -> tuple[Array, Array, Array, Array]:
    """Shares of bullet lines and of lines that end in an ellipsis; hash signs; ellipses."""
    rows = np.zeros((4, len(batch.documents)))
    for index in batch.alive():
        text = batch.documents[index].text
        rows[2, index] = text.count("#")
        rows[3, index] = sum(map(text.count, ELLIPSES))
        may_bullet = any(bullet in text for bullet in BULLETS)
        if not (may_bullet or rows[3, index]):
            continue
        lines = [line.strip() for line in text.split("\n") if line and not line.isspace()]
        if lines:
            rows[0, index] = sum(line.startswith(BULLETS) for line in lines) / len(lines)
            rows[1, index] = sum(line.endswith(ELLIPSES) for line in lines) / len(lines)
    return rows[0], rows[1], rows[2], rows[3]
