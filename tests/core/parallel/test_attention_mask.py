"""What a query sees, against its definition one pair of tokens at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from visibilities import VISIBILITIES, sees

from mtcli.core.mesh.visibility import Visibility
from mtcli.core.parallel.attention_mask import (
    AttentionMask,
    Documents,
    document_starts,
    restarted,
)

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def document_of(lengths):
    return [number for number, length in enumerate(lengths) for _ in range(length)]


@given(LENGTHS, VISIBILITIES, st.data())
def test_a_mask_is_of_the_same_document_and_within_the_layer_s_limits(lengths, visibility, data):
    documents = document_of(lengths)
    places = st.lists(st.integers(0, len(documents) - 1), min_size=1, max_size=8)
    queries, keys = data.draw(places), data.draw(places)
    rows = Documents(torch.tensor([documents, [0] * len(documents)]))
    mask = AttentionMask(visibility, rows).mask(torch.tensor(queries), torch.tensor(keys))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            near = sees(visibility, query, key)
            assert mask[0, 0, i, j] == (near and documents[query] == documents[key])
            assert mask[1, 0, i, j] == near


@pytest.mark.parametrize(
    ("visibility", "expected"),
    [
        (Visibility(right=None), None),
        (Visibility(), [[[[1, 1, 0], [1, 1, 1]]]]),
        (Visibility(3, 0), [[[[1, 1, 0], [0, 0, 1]]]]),
    ],
)
def test_without_documents_only_distance_counts(visibility, expected):
    mask = AttentionMask(visibility).mask(torch.tensor([1, 5]), torch.tensor([0, 1, 2]))
    assert mask is None if expected is None else mask.tolist() == expected


@given(LENGTHS, VISIBILITIES, st.booleans(), st.data())
def test_spans_are_the_same_as_the_mask_for_ascending_places(lengths, visibility, masked, data):
    size = sum(lengths)
    rows = torch.tensor([document_of(lengths), [0] * size])
    seen = AttentionMask(visibility, Documents(rows) if masked else None)
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
    assert Documents(rows).lengths == [lengths, [sum(lengths)]]
    expected = [place for length in lengths for place in range(length)]
    assert restarted(rows).tolist() == [expected, list(range(sum(lengths)))]


@given(st.lists(LENGTHS, min_size=1, max_size=4))
def test_documents_are_packed_from_their_first_tokens(rows):
    size = max(sum(row) for row in rows)
    rows = [[*row, *[1] * (size - sum(row))] for row in rows]
    starts, longest = document_starts(np.array([document_of(row) for row in rows]))
    lengths = np.diff(starts).tolist()
    flat = [length for row in rows for length in row]
    assert lengths == flat + [0] * (len(lengths) - len(flat)) and longest == max(flat)
    assert starts[0] == 0 and starts.dtype == np.int32
    assert len(flat) <= len(lengths) < 2 * len(flat) and len(lengths).bit_count() == 1
