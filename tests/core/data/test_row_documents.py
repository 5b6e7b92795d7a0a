"""Which document a token of a row belongs to, against the index read by hand."""

import numpy as np
import pytest
from indexed_dataset import write_dataset

import mtcli.core.data.loader as batches_module
from mtcli.core.data.loader import Batches
from mtcli.core.data.prefetch import Prefetcher

SEQ_LEN, SAMPLES = 16, 400


def write_numbered(prefix, lengths, first):
    """A dataset whose tokens are first, first + 1, ... and so tell their place in the file; returns
    those that begin a sequence."""
    starts = first + np.cumsum([0, *lengths])
    sequences = [np.arange(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    write_dataset(prefix, sequences, np.dtype("<i4"))
    return {int(s[0]) for s in sequences if len(s)}


def by_hand(rows, starts):
    """The next document begins at every token that begins a sequence, the row's first excepted."""
    begins = np.isin(rows, sorted(starts))
    begins[:, 0] = False
    return begins.cumsum(1)


LENGTHS = {
    "short": [1, 2, 3, 1, 1, 5, 4] * 20,
    "empty ones too": [0, 0, 3, 0, 7, 0, 0, 0, 1, 40, 0],
    "longer than a row": [90, 70, 33, 16, 17, 15],
    "one sequence, many epochs": [23],
    "as long as rows": [16] * 12,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_document_of_a_row_is_a_sequence_of_the_index(tmp_path, lengths):
    starts = write_numbered(tmp_path / "data", lengths, 0)
    batches = Batches([str(tmp_path / "data")], "1", "train", SAMPLES, SEQ_LEN, 3)
    found = batches.documents(0, SAMPLES)
    assert found.dtype == np.int32 and found.shape == (SAMPLES, SEQ_LEN + 1)
    assert np.array_equal(found, by_hand(batches.batch(0, SAMPLES), starts))


@pytest.fixture
def blend(tmp_path):
    starts = write_numbered(tmp_path / "a", LENGTHS["short"], 0)
    starts |= write_numbered(tmp_path / "b", LENGTHS["longer than a row"], 100_000)
    words = ["0.6", str(tmp_path / "a"), "0.4", str(tmp_path / "b")]
    return Batches(words, "1", "train", SAMPLES, SEQ_LEN, 3), starts


def test_documents_of_a_blend_are_those_of_each_sample_s_own_dataset(blend):
    batches, starts = blend
    rows = batches.batch(0, SAMPLES)
    assert 0.3 < (rows[:, 0] >= 100_000).mean() < 0.5
    assert np.array_equal(batches.documents(0, SAMPLES), by_hand(rows, starts))


def test_any_way_of_asking_for_documents_gives_the_same(blend, monkeypatch):
    batches, _ = blend
    whole = batches.documents(0, SAMPLES)
    monkeypatch.setattr(batches_module, "WINDOW", 7)
    batches._window = None
    for start, count in ((0, SAMPLES), (3, 20), (6, 1), (7, 7), (399, 1), (5, 0)):
        assert np.array_equal(batches.documents(start, count), whole[start : start + count])


def test_the_prefetcher_carries_whatever_is_read(blend):
    batches, _ = blend
    with Prefetcher(batches.documents, [(0, 9), (40, 2)]) as ready:
        found = list(ready)
    assert np.array_equal(found[0], batches.documents(0, 9))
    assert np.array_equal(found[1], batches.documents(40, 2))
