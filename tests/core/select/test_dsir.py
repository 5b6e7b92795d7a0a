"""Importance resampling: what is chosen from a mixture is like the target."""

import math
from collections import Counter

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.data.subset import TokenSequences
from mtcli.core.select.dsir import BUCKETS, buckets_of, resample

SEQ_LEN = 24


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """(a mixture whose odd sequences are of the target's language, the target)."""
    folder, random = tmp_path_factory.mktemp("dsir"), np.random.default_rng(0)
    languages = [random.dirichlet(np.full(200, 0.1)) for _ in range(2)]
    draw = lambda which, count: random.choice(200, (count, SEQ_LEN), p=languages[which])  # noqa: E731
    mixed = np.stack([draw(0, 200), draw(1, 200)], 1).reshape(-1)
    write_dataset(folder / "mixed", [np.append(mixed, 0)], np.dtype("<u2"))
    write_dataset(folder / "target", [draw(1, 100).reshape(-1)], np.dtype("<u2"))
    return [TokenSequences([str(folder / name)], "1", SEQ_LEN) for name in ("mixed", "target")]


def test_what_is_chosen_is_of_the_targets_language(corpora):
    mixed, target = corpora
    told = []
    chosen = resample(mixed, target, 100, 1, told.append)
    assert len(set(chosen.tolist())) == 100
    assert (chosen % 2 == 1).mean() > 0.97
    assert sum(told) == 2 * len(mixed) + len(target)
    assert np.array_equal(chosen, resample(mixed, target, 100, 1, told.append))
    assert not np.array_equal(chosen, resample(mixed, target, 100, 2, told.append))


def test_scores_are_the_likelihood_ratios_of_hashed_bags(corpora):
    """Against counters of Python: with noise of any seed the mean rank follows them."""
    mixed, target = corpora
    counts = []
    for corpus in corpora:
        rows = corpus.rows(np.arange(len(corpus)))
        counts.append(Counter(buckets_of(rows).ravel().tolist()))
    total = [sum(count.values()) + BUCKETS for count in counts]

    def score(row):
        grams = buckets_of(row[None])[0].tolist()
        p, q = (
            [(count[gram] + 1) / size for gram in grams]
            for count, size in zip(counts, total, strict=True)
        )
        return sum(math.log(b / a) for a, b in zip(p, q, strict=True))

    scores = np.array([score(row) for row in mixed.rows(np.arange(len(mixed)))])
    noise = np.random.default_rng([3, 2]).gumbel(size=len(mixed))
    expected = np.argsort(-(scores + noise), kind="stable")[:50]
    assert np.array_equal(resample(mixed, target, 50, 3, lambda done: None), expected)


def test_ids_and_pairs_have_buckets_of_their_own():
    rows = np.array([[5, 7, 7]])
    found = buckets_of(rows)[0]
    assert found.shape == (5,) and found[1] == found[2]
    assert buckets_of(np.array([[7, 5]]))[0, 2] != buckets_of(np.array([[5, 7]]))[0, 2]
    spread = buckets_of(np.arange(50_000)[None])[0][:50_000]
    assert np.bincount(spread, minlength=BUCKETS).max() < 25  # 5 each, of random buckets
