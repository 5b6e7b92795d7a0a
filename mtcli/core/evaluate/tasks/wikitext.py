"""Computes WikiText-103 perplexity: Megatron-LM's protocol, and lm-eval's word and byte level.

The corpus is text that was split into words and lost its spacing. Both protocols restore it
(detokenise), score the tokens that the model reads, and divide by the number of *original* tokens,
which makes models with different tokenizers comparable (arXiv:1909.08053, appendix E.1).
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.data.text_files import json_form, read_text
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import (
    Request,
    Score,
    overlapping_windows,
    rolling_windows,
)
from mtcli.core.evaluate.tasks.task import (
    PreparedTask,
    Record,
    Report,
    TaskOptions,
    exp,
    find_file,
)

MAX_WINDOW = 1024  # inputs per window, or the model's context where that is shorter
OVERLAP = 32  # tokens that a window advances by

Replacement = str | Callable[[re.Match[str]], str]


def _between(opening: str, closing: str) -> tuple[str, Replacement]:
    r"""Returns the rule that strips the space on the inner sides of a pair.

    Megatron-LM's `\(\s*([^\)]*?)\s*\)` scans to the end of the text for each unclosed `(`, in time
    quadratic in the number of brackets. This rule matches that remainder once, unchanged.
    """
    end = re.escape(closing)

    def strip(match: re.Match[str]) -> str:
        return f"{opening}{match[1].strip()}{closing}" if match[2] else match[0]

    return rf"{re.escape(opening)}([^{end}]*)({end}|\Z)", strip


# In this order, as in Megatron-LM and lm-eval. Their first rule after the possessive (contraction
# before a digit) is written so that it never matches; leaving it out gives their numbers.
# fmt: off
DETOKENISE = tuple((re.compile(pattern), replacement) for pattern, replacement in (
    (r"s '", "s'"),
    (r" @-@ ", "-"), (r" @,@ ", ","), (r" @\.@ ", "."),
    (r" : ", ": "), (r" ; ", "; "), (r" \. ", ". "), (r" ! ", "! "), (r" \? ", "? "),
    (r" , ", ", "),
    _between("(", ")"), _between("[", "]"), _between("{", "}"),
    _between('"', '"'), _between("'", "'"),
    (r"= = = =", "===="), (r"= = =", "==="), (r"= =", "=="),
    (r" ° ", "°"), (r" \n", "\n"), (r"\n ", "\n"), (r" N ", " 1 "), (r" 's", "'s"),
))
# fmt: on


class TextLengths(NamedTuple):
    """The lengths of a text that sums are divided by, and the number of overlapping windows."""

    num_tokens: int  # T: of the detokenised text
    num_original_tokens: int  # T_o: split on the single space, before detokenising
    window: int
    overlap: int
    num_windows: int  # requests of the overlapping protocol; the rest are rolling
    num_words: int
    num_bytes: int
    num_pages: int


def prepare_wikitext(path: Path, tokenizer: EvalTokenizer, options: TaskOptions) -> PreparedTask:
    """Prepares both protocols' requests; items are original tokens, `options.limit` of them.

    Raises MtcliError for an unreadable file, an overlap outside 1..window, or fewer than 2 tokens.
    """
    window = min(MAX_WINDOW, options.max_seq_len)
    overlap = min(OVERLAP, window) if options.overlap is None else options.overlap
    if not 1 <= overlap <= window:
        message = f"overlap {overlap} is not between 1 and the window of {window} tokens"
        raise wrong(message, f"the paper advances by {OVERLAP}", "--overlap")
    file = find_file(path, "*test*.tokens")
    text = read_text(file)
    if json_form(text):
        hint = "the test file of words, wiki.test.tokens, or any plain text"
        raise wrong(f"{file} is JSON, and no text of words", hint, "--task")
    original = text.strip().split(" ")[: options.limit]
    tokens = tokenizer.plain(detokenise(" ".join(original)))
    if len(tokens) < 2:
        message = f"{file} gives {len(tokens)} tokens, at least 2 are needed"
        raise wrong(message, "a longer file, or a larger --limit", "--task")
    overlapping = overlapping_windows(tokens, window, overlap)
    pages = split_pages(text if options.limit is None else " ".join(original))
    texts = (np.array(tokenizer.text(detokenise(page)), np.int64) for page in pages)
    rolling = [
        window
        for ids in texts
        for window in rolling_windows(ids, tokenizer.prefix_id, options.max_seq_len)
    ]
    counts = TextLengths(
        num_tokens=len(tokens),
        num_original_tokens=len(original),
        window=window,
        overlap=overlap,
        num_windows=len(overlapping),
        num_words=sum(len(re.split(r"\s+", page)) for page in pages),
        num_bytes=sum(len(page.encode()) for page in pages),
        num_pages=len(pages),
    )
    requests = overlapping + rolling
    return PreparedTask(
        num_items=len(original),
        requests=requests,
        report=partial(report_wikitext, counts),
        ends=list(range(1, len(requests) + 1)),
        hashes=[_hash(request) for request in requests],
        record=partial(_record, requests, len(overlapping)),
    )


def _hash(window: Request) -> str:
    """Hashes a window's tokens and its number of targets."""
    return sha256(b"%d " % window.num_targets + window.tokens.tobytes()).hexdigest()[:16]


def _record(
    requests: list[Request], num_windows: int, number: int, scores: Sequence[Score]
) -> Record:
    """Builds a window's line in the file of items: its protocol and log-likelihood."""
    name = f"window {number}" if number < num_windows else f"rolling {number - num_windows}"
    targets = requests[number].num_targets
    return {"id": name, "num_tokens": targets, "loglikelihoods": [scores[0].logprob]}


def detokenise(text: str) -> str:
    """Restores the original spacing of a text, by the rules of `DETOKENISE` in order."""
    for pattern, replacement in DETOKENISE:
        text = pattern.sub(replacement, text)
    return text


def split_pages(text: str) -> list[str]:
    """Splits articles at their ` = Title = ` lines: the documents of lm-eval's wikitext."""
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return [page for page in map("\n".join, pages) if page.strip()]


def report_wikitext(counts: TextLengths, scores: Sequence[Score]) -> Report:
    """Reports perplexities of both protocols, each with the sums and counts behind it.

    perplexity is exp(nll_sum / T_o), the paper's; adjusted_perplexity exp(nll_sum / (T_o - 1)), as
    Megatron-LM's tool prints it; token_perplexity exp(nll_sum / (T - 1)). The word and byte level
    come from rolling_nll_sum: each article alone, in disjoint windows, its first token included.
    """
    nll = -sum(score.logprob for score in scores[: counts.num_windows])
    rolling = -sum(score.logprob for score in scores[counts.num_windows :])
    return {
        "perplexity": exp(nll / counts.num_original_tokens),
        "adjusted_perplexity": exp(nll / max(1, counts.num_original_tokens - 1)),
        "token_perplexity": exp(nll / (counts.num_tokens - 1)),
        "nll_sum": nll,
        "num_tokens": counts.num_tokens,
        "num_original_tokens": counts.num_original_tokens,
        "window": counts.window,
        "overlap": counts.overlap,
        "word_perplexity": exp(rolling / counts.num_words),
        "byte_perplexity": exp(rolling / counts.num_bytes),
        "bits_per_byte": rolling / counts.num_bytes / math.log(2),
        "rolling_nll_sum": rolling,
        "num_words": counts.num_words,
        "num_bytes": counts.num_bytes,
        "num_pages": counts.num_pages,
    }
