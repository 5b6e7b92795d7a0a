"""Rows of masked sentences: all of the text, each epoch once, the same by any other division."""

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.bert.masked_rows import MaskedRows
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.data.indexed import token_dtype, write_index

V, S = 200, 32
SPECIAL = SpecialTokens(2, 3, 4, 0, np.arange(V) >= 5, np.ones(V, bool))


@pytest.fixture
def prefix(tmp_path):
    """Documents of 1 to 6 sentences of 1 to 45 tokens, one of them empty."""
    random = np.random.default_rng(0)
    counts = [*random.integers(1, 7, 40), 0]
    lengths = random.integers(1, 46, sum(counts))
    sentences = [random.integers(5, V, n) for n in lengths]
    write_dataset(tmp_path / "data", sentences, token_dtype(V))
    dtype = token_dtype(V)
    write_index(tmp_path / "data.idx", dtype, lengths.astype(np.int32), np.array(counts, np.int32))
    return tmp_path / "data", sentences, counts


def opened(prefix, samples=1000, order=True, seed=5, split="1,0,0", which="train"):
    return MaskedRows([str(prefix)], split, which, samples, S, seed, SPECIAL, order)


def test_an_epoch_has_every_token_of_every_document_once_in_order(prefix):
    path, sentences, counts = prefix
    rows = opened(path)
    count = rows.packed[0].rows_of_epoch(0)
    read = rows.rows(0, count)
    assert read.tokens.shape == (count, S)
    texts = sorted(tuple(read.labels[read.labels >= 5].tolist()))
    assert texts == sorted(int(t) for sentence in sentences for t in sentence)
    # of each sample the spans name its sentences, in the order of the document
    spans = [span for sample in rows.sample_ids(0, count) for span in sample.spans]
    assert len(set(spans)) == len(spans)
    assert sum(n for _, _, n in spans) == sum(map(len, sentences))
    assert (read.tokens == 0).mean() < 0.35  # sentences of up to 29 tokens in rows of 32


def test_a_sequence_is_cls_a_sep_b_sep_with_types_documents_and_order(prefix):
    path, sentences, _ = prefix
    rows = opened(path)
    read, swaps = rows.rows(0, 60), []
    labels = iter(zip(read.classes, read.class_weights, read.firsts, strict=True))
    for number in range(60):
        dataset, items = rows._items(number)
        one = rows.sentences[dataset]
        cuts = np.flatnonzero(np.diff(one.document[items])) + 1
        for index, part in enumerate(np.split(items, cuts)):
            label, weight, first = next(labels)
            at = read.documents[number] == index
            text, types = read.labels[number][at], read.token_types[number][at]
            assert first == number * S + np.flatnonzero(at)[0] and text[0] == 2
            ends = np.flatnonzero(text == 3)
            assert len(ends) == 1 + int(weight) and ends[-1] == len(text) - 1
            assert np.array_equal(types, np.arange(len(text)) > ends[0])
            whole = np.concatenate([one.text(part[i : i + 1]) for i in range(len(part))])
            halves = [text[1 : ends[0]], text[ends[0] + 1 : -1]]
            assert np.array_equal(np.concatenate(halves[::-1] if label else halves), whole)
            assert weight == (len(part) > 1)
            swaps += [label] * int(weight)
    assert 0.3 < np.mean(swaps) < 0.7


def test_rows_depend_on_seed_and_number_alone(prefix):
    path, *_ = prefix
    whole = opened(path, samples=200).rows(0, 200)
    other = opened(path, samples=9999)
    for start in (0, 7, 150, 199):
        part = other.rows(start, 1)
        for name in ("tokens", "labels", "weights", "token_types", "documents"):
            assert np.array_equal(getattr(part, name)[0], getattr(whole, name)[start]), name
    assert not np.array_equal(opened(path, seed=6).rows(0, 5).tokens, whole.tokens[:5])
    epoch = other.packed[0].rows_of_epoch(0)
    assert not np.array_equal(other.rows(0, 5).labels, other.rows(epoch, 5).labels)


def test_splits_are_of_documents_and_an_empty_share_is_refused(prefix):
    path, _, counts = prefix
    valid = opened(path, split="3,1,0", which="valid")
    first = int(valid.sentences[0].sequence[0])
    assert first == sum(counts[: round(0.75 * len(counts))])
    with pytest.raises(MtcliError, match="which hold no token"):
        opened(path, split="1,0,0", which="valid")


def test_documents_of_one_sequence_have_no_order_to_learn(tmp_path):
    write_dataset(tmp_path / "flat", [np.arange(5, 25)] * 9, token_dtype(V))
    with pytest.raises(MtcliError, match="(?s)one sequence per document.*preprocess --sentences"):
        opened(tmp_path / "flat").require_order()
    assert opened(tmp_path / "flat", order=False).rows(0, 1).class_weights.sum() == 0


def test_an_id_that_the_tokenizer_lacks_is_refused(tmp_path):
    write_dataset(tmp_path / "wide", [np.array([7, V + 3])] * 9, token_dtype(V))
    with pytest.raises(MtcliError, match=f"has the id {V + 3}, and its tokenizer {V} ids"):
        opened(tmp_path / "wide", order=False).rows(0, 3)
