"""Windows: every target once, with the context that Megatron's tool and lm-eval give it."""

import math

import numpy as np
import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mtcli.core.evaluate.loglikelihood import overlapping_windows, rolling_windows


def scored(windows):
    """What each scored target was predicted from: {end of context: (context, target)}."""
    return [
        (tuple(tokens[:end].tolist()), int(tokens[end]))
        for tokens, num_targets in windows
        for end in range(len(tokens) - num_targets, len(tokens))
    ]


def megatron_tool(tokens, window, overlap):
    """The tool's own bookkeeping: padded windows and a loss mask, as algorithms.md 1.3 gives it."""
    targets = len(tokens) - 1
    sequences = max(1, math.ceil(max(targets - overlap, 0) / overlap) + 1)
    found = []
    for i in range(sequences):
        piece = list(tokens[i * overlap : i * overlap + window + 1])
        mask = [1] * len(piece) + [0] * (window + 1 - len(piece))
        mask = mask[1:]
        if i > 0 and overlap != window:
            mask[:-overlap] = [0] * (window - overlap)
        found += [
            (tuple(map(int, piece[: j + 1])), int(piece[j + 1]))
            for j in range(window)
            if mask[j] and j + 1 < len(piece)
        ]
    return found


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 11, 12, 13, 40, 41, 42])
@pytest.mark.parametrize("window, overlap", [(8, 3), (8, 1), (8, 8), (9, 4)])
def test_overlapping_windows_score_what_megatrons_tool_scores(length, window, overlap):
    tokens = np.arange(100, 100 + length)
    windows = overlapping_windows(tokens, window, overlap)
    assert scored(windows) == megatron_tool(tokens, window, overlap)
    assert sorted(target for _, target in scored(windows)) == list(range(101, 100 + length))
    assert max(len(w.tokens) for w in windows) <= window + 1


def test_one_token_gives_no_window():
    assert overlapping_windows(np.array([5]), 8, 3) == []


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 15, 16, 17, 40])
def test_rolling_windows_are_those_of_lm_eval(length):
    tokens = list(range(100, 100 + length))
    theirs = [
        (context + continuation, len(continuation))
        for context, continuation in map(
            make_disjoint_window, get_rolling_token_windows(tokens, 7, 8, 1)
        )
    ]
    ours = rolling_windows(np.array(tokens, np.int64), 7, 8)
    assert [(w.tokens.tolist(), w.num_targets) for w in ours] == theirs
