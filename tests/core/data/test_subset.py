"""Subsets of token data: which windows they are, in which order they come, what they weigh."""

import json
from collections import Counter

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.subset import (
    SourceRecord,
    Subset,
    SubsetBatches,
    TokenSequences,
    read_subset,
    write_subset,
)

SEQ_LEN = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(prefixes of data sets, the documents of each), some of them empty."""
    folder, random = tmp_path_factory.mktemp("subset"), np.random.default_rng(3)
    found = {}
    for name in "ab":
        texts = [random.integers(0, 500, n) for n in random.integers(0, 30, 40)]
        write_dataset(folder / name, texts, np.dtype("<u2"))
        found[str(folder / name)] = texts
    return found


def subset_of(sequences, indices, weights=None, **changes):
    names = zip(sequences.prefixes, sequences.counts, strict=True)
    sources = tuple(
        SourceRecord(prefix=name, sha256="", sampled="", candidates=count) for name, count in names
    )
    fields = {
        "method": "craig", "proxy": None, "seed": 0, "seq_len": SEQ_LEN, "format": "tokens",
        "num_candidates": sum(sequences.counts), "objective": None, "random_objective": None,
        "bound": None, "random_bound": None, "indices": tuple(indices),
        "weights": tuple(weights or [1.0] * len(indices)), "sources": sources, "model": None,
    }  # fmt: skip
    return Subset.model_validate(fields | changes)


def test_candidates_are_the_windows_of_the_training_part_in_the_files_order(data):
    sequences = TokenSequences(list(data), "75,25,0", SEQ_LEN)
    expected = []
    for texts in data.values():
        stream = np.concatenate(texts[:30])
        count = (len(stream) - 1) // SEQ_LEN
        expected += [stream[k * SEQ_LEN : (k + 1) * SEQ_LEN + 1] for k in range(count)]
    assert len(sequences) == len(expected)
    assert np.array_equal(sequences.rows(np.arange(len(expected))), expected)


def test_documents_and_spans_are_those_of_the_tokens(data):
    sequences = TokenSequences(list(data), "1", SEQ_LEN)
    texts = dict(data)
    everyone = np.arange(len(sequences))
    for candidate, row, of in zip(
        everyone, sequences.rows(everyone), sequences.documents(everyone), strict=True
    ):
        prefix = sequences.prefixes[sequences.source_of(candidate)]
        spans = sequences.spans(int(candidate))
        parts = [texts[prefix][number][at : at + count] for number, at, count in spans]
        assert np.array_equal(np.concatenate(parts), row)
        assert of.tolist() == [i for i, part in enumerate(parts) for _ in part]


def test_each_epoch_has_every_member_once_in_an_order_by_the_seed_alone(data):
    sequences = TokenSequences(list(data), "1", SEQ_LEN)
    indices = list(range(0, len(sequences), 3))
    count = len(indices)
    batches = [
        SubsetBatches(sequences, subset_of(sequences, indices), 4 * count, s) for s in (1, 2)
    ]
    whole = batches[0].batch(0, 4 * count)
    wanted = Counter(row.tobytes() for row in sequences.rows(np.array(indices)))
    for epoch in range(4):
        rows = whole[epoch * count : (epoch + 1) * count]
        assert Counter(row.tobytes() for row in rows) == wanted
    assert not np.array_equal(whole[:count], whole[count : 2 * count])
    assert not np.array_equal(whole, batches[1].batch(0, 4 * count))
    again = SubsetBatches(sequences, subset_of(sequences, indices[::-1]), 9 * count, 1)
    parts = [again.batch(start, 5) for start in range(0, 4 * count - 5, 5)]
    assert np.array_equal(np.concatenate(parts), whole[: 5 * len(parts)])


def test_losses_weigh_what_the_file_says_with_a_mean_of_one(data):
    sequences = TokenSequences(list(data), "1", SEQ_LEN)
    weights = {2: 1.0, 5: 7.0, 30: 4.0, len(sequences) - 1: 12.0}
    subset = subset_of(sequences, weights, list(weights.values()))
    batches = SubsetBatches(sequences, subset, 8, 1)
    found = batches.loss_weights(0, 8)
    assert found.shape == (8, SEQ_LEN) and found.dtype == np.float32
    for row, weight in zip(batches.batch(0, 8), found, strict=True):
        (index,) = [i for i in weights if np.array_equal(sequences.rows(np.array([i]))[0], row)]
        assert weight.tolist() == pytest.approx([weights[index] / 6.0] * SEQ_LEN)
    assert batches.drawn(0, 8) == [6, 2]
    assert [sample.prefix for sample in batches.sample_ids(0, 8)].count(sequences.prefixes[1]) == 2


def test_what_a_file_holds_is_read_back(data, tmp_path):
    subset = subset_of(TokenSequences(list(data), "1", SEQ_LEN), [3, 1, 2], [1.0, 2.5, 3.0])
    write_subset(tmp_path / "s.json", subset)
    assert read_subset(tmp_path / "s.json") == subset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [1, 1]}, "indices have to be distinct"),
        ({"indices": [1]}, "1 indices and 2 weights"),
        ({"indices": []}, "0 indices and 2 weights"),
        ({"indices": [1, 10**6]}, "index 1000000 of"),
        ({"weights": [1.0, 0.0]}, "weights.1: Input should be greater than 0"),
        ({"weights": [1.0, "x"]}, "weights.1: Input should be a valid number"),
        ({"kind": "other"}, "kind: Input should be 'mtcli subset'"),
        ({"seq_len": None}, "seq_len: Input should be a valid integer"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_subset_is_refused_by_its_field(data, tmp_path, changes, message):
    fields = subset_of(TokenSequences(list(data), "1", SEQ_LEN), [1, 2]).model_dump() | changes
    (tmp_path / "s.json").write_text(json.dumps(fields))
    with pytest.raises(MtcliError, match=f"s.json is no subset: .*{message}"):
        read_subset(tmp_path / "s.json")


def test_members_beyond_the_training_part_are_refused(data):
    sequences = TokenSequences(list(data), "1", SEQ_LEN)
    subset = subset_of(sequences, [0, sequences.counts[0] - 1])
    smaller = TokenSequences(list(data), "50,50,0", SEQ_LEN)
    message = f"has candidate {sequences.counts[0] - 1} of .* training part has {smaller.counts[0]}"
    with pytest.raises(MtcliError, match=message):
        SubsetBatches(smaller, subset, 8, 1)


def test_data_shorter_than_a_sequence_is_refused_with_both_numbers(tmp_path):
    write_dataset(tmp_path / "short", [np.arange(8)], np.dtype("<u2"))
    with pytest.raises(MtcliError, match="has 8 tokens in the train part .* with its labels 9"):
        TokenSequences([str(tmp_path / "short")], "1", SEQ_LEN)
