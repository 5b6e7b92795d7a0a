"""Bounds the cost of an untrusted tokenizer.json before it is loaded, and catches panics of the
library.

A normaliser may make gigabytes out of a letter. For many invalid definitions, and for patterns that
take too long on a text, the library panics: Rust writes a report to stderr and raises an exception
that `except Exception` does not catch. The definition alone bounds growth, in bytes out per byte
in; where that bound is too large to be useful, `require_measured` measures texts.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import parse_json, shown

MAX_IDS = 1 << 24  # the largest vocabularies have a million; libraries allocate by the largest id
MAX_TOKEN_BYTES = 1 << 14
MAX_STEPS = 1024  # of a sequence of normalisers, and of a template
MAX_WORD = 10_000  # letters of a word, which WordPiece takes the square of
# XLNet's normalisers might make 1,500 bytes of one; what they make of a text is measured.
MAX_GROWTH = {"normalizer": 1 << 20, "pre_tokenizer": 16, "decoder": 64}
REAL_GROWTH = 4  # of any text as a whole: every space to three bytes, and more
FREE_BYTES = 64 << 20  # that any text may become
WINDOW_BYTES = 4 << 20  # normalised at a time where growth is measured
# Of one byte at most, where no content decides it: the longest decomposition of Unicode (U+FDFA).
GROWTH = {"NFKC": 11, "NFKD": 11, "NFC": 3, "NFD": 3, "BertNormalizer": 6, "Lowercase": 2}
GROWTH |= {"ByteLevel": 3, "Metaspace": 5, "ByteFallback": 3}
ONE_SILENCE = RLock()  # of the process's stderr: a second thread would put back the first's silence
OTHER = "use the tokenizer of the model itself, or another"
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def bounded(definition: str) -> tuple[str, float]:
    """Returns (the definition without batch and training settings, its normaliser's growth).

    Padding, truncation and dropout are removed, as they change ids by chance or length;
    transformers sets the first two per call. Raises MtcliError for an invalid definition, or one
    without a bound.
    """
    try:
        table = parse_json(definition)
        if not isinstance(table, dict):
            raise ValueError("it holds no object")
        growth = _checked(table)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise wrong(f"not a tokenizer definition: {error}", OTHER) from None
    settings = [key for key in ("padding", "truncation") if table.get(key)]
    model = table["model"] if isinstance(table.get("model"), dict) else {}
    if not settings and not model.get("dropout"):
        return definition, growth
    table |= dict.fromkeys(settings)
    if model.get("dropout"):
        model["dropout"] = None
    return json.dumps(table, ensure_ascii=False), growth


def require_measured(normalizer: Any, growth: float, text: str) -> None:
    """Raises MtcliError where a normaliser would make far more of a text than of any real one.

    Measures a window at a time, and only where the bound `growth` does not settle it.
    """
    size = len(text) if text.isascii() else len(text.encode())
    if growth <= REAL_GROWTH or growth * size <= FREE_BYTES:
        return
    step, output_bytes = max(1, int(WINDOW_BYTES / (4 * growth))), 0
    for start in range(0, len(text), step):
        output_bytes += len(normalizer.normalize_str(text[start : start + step]).encode())
        if output_bytes > max(FREE_BYTES, REAL_GROWTH * size):
            where = f"of the first {min(start + step, len(text)):,} letters of a text"
            raise wrong(f"the tokenizer's normalizer makes {output_bytes:,} bytes {where}", OTHER)


@contextmanager
def no_panics(what: str) -> Iterator[None]:
    """Turns any error of a Rust library into an MtcliError that names `what` failed.

    Drops the library's report on stderr, with all else that this process writes there meanwhile.
    """
    try:
        with _silent():
            yield
    except MtcliError:
        raise
    except BaseException as error:
        # A panic is no Exception, and its class cannot be imported; all else is a bare Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise wrong(f"{what}: {lines[0][:200]}", OTHER) from None


@contextmanager
def _silent() -> Iterator[None]:
    with ONE_SILENCE:
        try:
            stderr = os.dup(2)
        except OSError:  # it was closed, as by `2>&-`
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _checked(table: dict[str, Any]) -> float:
    """Bounds the growth of the normaliser. Raises MtcliError where the bound is too large."""
    growth = {part: _growth(table.get(part)) for part in MAX_GROWTH}
    for part, most in MAX_GROWTH.items():
        if growth[part] > most:
            message = f"the tokenizer's {part} may make {growth[part]:.3g} bytes out of one"
            raise wrong(f"{message}, and {most} is the most", OTHER)
    _require_template(table.get("post_processor"))
    model = table.get("model") or {}
    require_tokens(model.get("vocab"))
    _require_short("model", [model.get(key) for key in ("unk_token", *AFFIXES)])
    if (model.get("max_input_chars_per_word") or 0) > MAX_WORD:
        longest = model["max_input_chars_per_word"]
        raise wrong(f"the tokenizer's words have {shown(longest)} letters, over {MAX_WORD}", OTHER)
    added = table.get("added_tokens") or []
    _require_ids([token.get("id") for token in added])
    _require_short("added tokens", [token.get("content") for token in added])
    # These are normalised when the definition is loaded.
    normalised = sum(len(token.get("content") or "") for token in added if token.get("normalized"))
    if growth["normalizer"] * normalised > FREE_BYTES:
        grown = f"{growth['normalizer']:.3g} bytes out of each of {normalised:,} letters"
        raise wrong(f"the tokenizer's normalizer may make {grown} of added tokens", OTHER)
    return growth["normalizer"]


def _growth(step: Any) -> float:
    """Bounds the bytes that a normaliser, pre-tokeniser or decoder makes of one byte."""
    if not isinstance(step, dict):
        return 1
    kind = step.get("type")
    if kind == "Sequence":
        steps = next((value for value in step.values() if isinstance(value, list)), [])
        if len(steps) > MAX_STEPS:
            said = f"the tokenizer has {len(steps)} steps in a sequence, over {MAX_STEPS}"
            raise wrong(said, OTHER)
        return prod(map(_growth, steps), start=1.0)
    if kind == "Replace":
        pattern, content = step.get("pattern"), len(step.get("content", "").encode())
        fixed = len(pattern.get("String", "").encode()) if isinstance(pattern, dict) else 0
        return max(1.0, content / fixed) if fixed else 1.0 + content  # a pattern may match nothing
    if kind == "Prepend":
        return 1 + len(step.get("prepend", "").encode())
    if kind == "Precompiled":
        return _longest_of_charsmap(step.get("precompiled_charsmap"))
    return GROWTH.get(kind, 1) if isinstance(kind, str) else 1


def _longest_of_charsmap(text: Any) -> int:
    """Returns the length of the longest replacement in sentencepiece's character map: a trie, then
    texts."""
    if not isinstance(text, str):
        return 1
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its precompiled_charsmap is not base64: {error}") from None
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *map(len, texts))


def _require_template(processor: Any) -> None:
    """Bounds a template's pieces: even without special tokens it may repeat a text."""
    if not isinstance(processor, dict):
        return
    for inner in processor.get("processors") or ():
        _require_template(inner)
    single = processor.get("single") or ()
    texts = sum("Sequence" in piece for piece in single)
    special = (processor.get("special_tokens") or {}).values()
    longest = max((len(token.get("ids", ())) for token in special), default=0)
    if texts > 1 or max(len(single), longest) > MAX_STEPS:
        counts = f"{len(single)} pieces, {texts} of them the text, and special tokens of"
        raise wrong(f"the tokenizer's template has {counts} {longest} ids", OTHER)


def require_tokens(vocab: Any) -> None:
    """Raises MtcliError where a vocabulary has ids or tokens that are too large."""
    if isinstance(vocab, dict):
        _require_ids(list(vocab.values()))
        _require_short("vocabulary", list(vocab))
    elif isinstance(vocab, list):  # Unigram's: tokens with scores, whose places are ids
        _require_short("vocabulary", [pair[0] for pair in vocab if isinstance(pair, list) and pair])


def _require_ids(ids: list[Any]) -> None:
    largest = max((token for token in ids if isinstance(token, int)), default=0)
    if largest >= MAX_IDS:
        raise wrong(f"the tokenizer has the id {largest}, and {MAX_IDS - 1} is the most", OTHER)


def _require_short(what: str, texts: list[Any]) -> None:
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > MAX_TOKEN_BYTES:
        message = f"the tokenizer's {what} has a token of {longest:,} letters"
        raise wrong(f"{message}, and {MAX_TOKEN_BYTES:,} is the most", OTHER)
