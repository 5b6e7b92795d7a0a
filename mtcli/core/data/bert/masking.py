"""Masks rows for a masked language model.

Chooses n-grams of whole words, n of 1 to 3 with P ~ 1/n, until 15 % of the tokens are chosen; of
those 80 % become [MASK], 10 % a random token and 10 % stay (arXiv:1810.04805, section 3.1; n-grams
as in arXiv:1909.11942, section 4.1). S tokens of a row, W words.
"""

import numpy as np

from mtcli.core.config.model import MASKED_SHARE
from mtcli.core.data.bert.special_tokens import SpecialTokens

LENGTHS = np.array([1, 2, 3])  # of an n-gram, in words
CHANCES = (1 / LENGTHS) / (1 / LENGTHS).sum()  # 6/11, 3/11, 2/11
MASKED, RANDOM = 0.8, 0.1  # of the chosen ones; the rest stay


def mask(
    tokens_S: np.ndarray, special: SpecialTokens, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the row with replaced tokens [S] int64, the mask of tokens to predict [S] bool)."""
    chosen_S = choose(tokens_S, special, random)
    chosen = np.flatnonzero(chosen_S)
    fate = random.random_sample(len(chosen))
    plain = special.plain
    drawn = plain[random.randint(len(plain), size=len(chosen))]
    seen_S = tokens_S.copy()
    seen_S[chosen] = np.where(
        fate < MASKED, special.mask, np.where(fate < MASKED + RANDOM, drawn, tokens_S[chosen])
    )
    return seen_S, chosen_S


def choose(
    tokens_S: np.ndarray, special: SpecialTokens, random: np.random.RandomState
) -> np.ndarray:
    """Chooses n-grams of whole words that neither overlap nor contain special tokens: bool [S].

    15 % of the tokens, rounded to the nearest number; at least one word where there is any.
    """
    first_W, end_W = words(tokens_S, special)
    chosen_S = np.zeros(len(tokens_S), bool)
    budget = max(1, round(MASKED_SHARE * int((end_W - first_W).sum())))
    lengths_W = random.choice(LENGTHS, size=len(first_W), p=CHANCES)
    apart_W = end_W[:-1] != first_W[1:]  # words with a special token between them
    left = budget
    for word in random.permutation(len(first_W)).tolist():
        if left <= 0:
            break
        last = min(word + lengths_W[word], len(first_W)) - 1
        while last > word and (end_W[last] - first_W[word] > left or apart_W[word:last].any()):
            last -= 1  # a shorter one, where the longer has no room
        span = slice(first_W[word], end_W[last])
        count = span.stop - span.start
        if not chosen_S[span].any() and (count <= left or left == budget):
            chosen_S[span] = True
            left -= count
    return chosen_S


def words(tokens_S: np.ndarray, special: SpecialTokens) -> tuple[np.ndarray, np.ndarray]:
    """Finds (first token [W], one after the last [W]) of each word; no word has special tokens."""
    plain_S = special.is_plain[tokens_S]
    before_S = np.concatenate([[False], plain_S[:-1]])
    first_W = np.flatnonzero(plain_S & (special.begins_word[tokens_S] | ~before_S))
    after_S = np.concatenate([plain_S[1:], [False]])
    ends = np.flatnonzero(plain_S & ~after_S) + 1  # of runs without a special token
    end_W = np.minimum(
        np.append(first_W[1:], len(tokens_S)), ends[np.searchsorted(ends, first_W + 1)]
    )
    return first_W, end_W
