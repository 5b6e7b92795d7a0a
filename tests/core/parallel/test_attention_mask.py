"""What a query sees, against its definition one pair of tokens at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.parallel.attention_mask import AttentionMask, restarted

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def document_of(lengths):
    return [number for number, length in enumerate(lengths) for _ in range(length)]


@given(LENGTHS, st.booleans(), st.data())
def test_a_mask_is_same_document_and_if_causal_not_later(lengths, causal, data):
    documents = document_of(lengths)
    places = st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=8)
    queries, keys = data.draw(places), data.draw(places)
    rows = torch.tensor([documents, [0] * len(documents)])
    mask = AttentionMask(causal, rows).mask(torch.tensor(queries), torch.tensor(keys))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            past = key <= query or not causal
            assert mask[0, 0, i, j] == (past and documents[query] == documents[key])
            assert mask[1, 0, i, j] == past


@pytest.mark.parametrize("causal", [True, False])
def test_without_documents_only_order_counts(causal):
    mask = AttentionMask(causal).mask(torch.tensor([1, 5]), torch.tensor([0, 1, 2]))
    assert mask is None if not causal else mask.tolist() == [[[[1, 1, 0], [1, 1, 1]]]]


@given(LENGTHS, st.booleans(), st.booleans(), st.data())
def test_spans_are_the_same_as_the_mask_for_ascending_places(lengths, causal, masked, data):
    size = sum(lengths)
    rows = torch.tensor([document_of(lengths), [0] * size])
    seen = AttentionMask(causal, rows if masked else None)
    some = st.sets(st.integers(0, size - 1), min_size=1).map(lambda x: torch.tensor(sorted(x)))
    queries, keys = data.draw(some), data.draw(some)
    first, end = (x[..., None] for x in seen.spans(queries, keys))
    places, mask = torch.arange(len(keys)), seen.mask(queries, keys)
    within = (places >= first) & (places < end)
    assert torch.equal(within, torch.ones_like(within) if mask is None else mask[:, 0])
    for ascending in (first, end):
        assert (ascending.diff(dim=1) >= 0).all()


@given(LENGTHS)
def test_lengths_and_positions_are_those_of_each_document(lengths):
    rows = torch.tensor([document_of(lengths), [0] * sum(lengths)], dtype=torch.int32)
    assert AttentionMask(True, rows).lengths == [lengths, [sum(lengths)]]
    expected = [place for length in lengths for place in range(length)]
    assert restarted(rows).tolist() == [expected, list(range(sum(lengths)))]
