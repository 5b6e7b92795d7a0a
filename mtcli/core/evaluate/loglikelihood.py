"""Builds requests for the log-likelihood of a continuation after a context.

Every task is a flat list of `Request`s and the model is one function, `Scorer.score`; this module
does not depend on how the model is sharded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtcli.core.config.errors import wrong

Ids = NDArray[np.int64]


class Request(NamedTuple):
    """A request to score the last `num_targets` of `tokens` [n], each given the tokens before
    it."""

    tokens: Ids
    num_targets: int


class Score(NamedTuple):
    """The sum of the targets' log-probabilities (nats), and whether all were the argmax."""

    logprob: float
    is_greedy: bool


def request(context: Sequence[int], continuation: Sequence[int]) -> Request:
    """Builds the request for log P(continuation | context), both as token ids."""
    tokens = np.fromiter((*context, *continuation), np.int64, len(context) + len(continuation))
    return Request(tokens, len(continuation))


def fit(requests: Sequence[Request], max_seq_len: int, vocab_size: int) -> list[Request]:
    """Truncates requests from the left to max_seq_len inputs, as lm-eval does.

    Raises MtcliError where a request scores nothing, has nothing to condition on, scores more
    targets than the model has positions, or holds an id outside the vocabulary.
    """
    fitted = []
    for index, (tokens, num_targets) in enumerate(requests):
        scores = f"request {index} scores"
        if num_targets < 1:
            raise wrong(f"{scores} {num_targets} tokens", "its continuation must not be empty")
        if len(tokens) <= num_targets:
            hint = "the first token needs one before it: give the context a prefix token"
            raise wrong(f"{scores} all of its {len(tokens)} tokens", hint)
        if num_targets > max_seq_len:
            message = f"{scores} {num_targets} tokens, the model reads {max_seq_len}"
            raise wrong(message, "evaluate a model with a longer max_seq_len")
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            message = f"request {index} holds token id {outside.max()}"
            hint = "use the tokenizer that the model was trained with"
            raise wrong(f"{message}, the model's vocab_size is {vocab_size}", hint)
        fitted.append(Request(tokens[-(max_seq_len + 1) :], num_targets))
    return fitted


def overlapping_windows(tokens: Ids, window: int, overlap: int) -> list[Request]:
    """Builds Megatron-LM's windows: `window` inputs, advanced by `overlap`, each target scored
    once.

    Window i starts at i * overlap. The first one scores all of its targets, every later one its
    last `overlap`, or fewer at the end of the text: len(tokens) - 1 targets in all, as nothing
    precedes the first token (arXiv:1909.08053, appendix E.1).
    """
    assert 1 <= overlap <= window, (overlap, window)
    num_targets = len(tokens) - 1
    done = min(window, num_targets)
    windows = [Request(tokens[: done + 1], done)] if done > 0 else []
    while done < num_targets:
        start = done + overlap - window
        end = min(start + window, num_targets)
        windows.append(Request(tokens[start : end + 1], end - done))
        done = end
    return windows


def rolling_windows(tokens: Ids, prefix_id: int, max_seq_len: int) -> list[Request]:
    """Builds the windows of lm-eval's loglikelihood_rolling: disjoint targets, the first after
    `prefix_id`.

    Every window but the first has max_seq_len inputs, so the last one has the longest context.
    """
    tokens = np.concatenate([np.array([prefix_id], np.int64), tokens])
    num_targets = len(tokens) - 1
    windows = []
    for done in range(0, num_targets, max_seq_len):
        end = min(done + max_seq_len, num_targets)
        start = max(0, end - max_seq_len)
        windows.append(Request(tokens[start : end + 1], end - done))
    return windows
