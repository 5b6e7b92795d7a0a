"""What a layer's queries see, against each pair of positions."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import BERT, GPT, run_config
from visibilities import BANDS, VISIBILITIES, sees

from mtcli.core.mesh.visibility import PositionRange, Visibility, layer_visibility, mean_keys

SPANS = st.builds(lambda first, size: PositionRange(first, first + size), *[st.integers(1, 12)] * 2)


def seen_pairs(visibility, queries, keys):
    return [sees(visibility, i, j) for i, j in product(range(*queries), range(*keys))]


@given(VISIBILITIES, SPANS, SPANS)
def test_some_and_all_are_those_of_the_pairs(visibility, queries, keys):
    pairs = seen_pairs(visibility, queries, keys)
    assert visibility.sees_some(queries, keys) == any(pairs)
    assert visibility.sees_all(queries, keys) == all(pairs)


@given(VISIBILITIES, SPANS, st.integers(1, 40))
def test_the_keys_of_queries_reach_from_the_first_that_any_sees_to_the_last(
    visibility, queries, length
):
    pairs = product(range(*queries), range(length))
    seen = [j for i, j in pairs if sees(visibility, i, j)]
    first, end = visibility.keys_of(queries, length)
    assert not seen or (first, end) == (min(seen), max(seen) + 1)


@given(VISIBILITIES, st.integers(2, 12), st.integers(0, 9))
def test_a_kind_is_that_of_the_pairs_of_tokens_wherever_they_begin(visibility, size, first):
    pairs = seen_pairs(visibility, *[(first, first + size)] * 2)
    causal = [j <= i for i, j in product(range(size), repeat=2)]
    kinds = {"all": all(pairs), "causal": pairs == causal}
    assert visibility.kind(size, first) == next(
        (kind for kind, is_it in kinds.items() if is_it), "band"
    )


@given(BANDS, st.integers(1, 12))
def test_mean_keys_are_the_pairs_but_for_half_of_a_row_s_width(visibility, size):
    pairs = seen_pairs(visibility, (0, size), (0, size))
    assert visibility.mean_keys(size) == pytest.approx(sum(pairs) / size, abs=0.5)


@pytest.mark.parametrize(
    ("limits", "keys"),
    [((None, 0), 512), ((None, None), 1024), ((255, 0), 256 - 32), ((1023, 0), 512)],
)
def test_mean_keys_are_half_of_a_causal_row_and_a_window_s_but_where_it_begins(limits, keys):
    assert Visibility(*limits).mean_keys(1024) == keys


@pytest.mark.parametrize(
    ("limits", "keys"),
    [((None, 0), 64), ((None, None), 64), ((7, 0), 8), ((8, 8), 17), ((99, 0), 64)],
)
def test_the_full_square_is_cut_by_a_window_alone(limits, keys):
    assert Visibility(*limits).widest(64) == keys


def test_layers_are_causal_or_see_all_as_the_model_says():
    causal, full = (run_config(model).model for model in (GPT, BERT))
    assert {layer_visibility(causal, layer).kind(8) for layer in range(4)} == {"causal"}
    assert {layer_visibility(full, layer).kind(8) for layer in range(2)} == {"all"}
    assert mean_keys(causal, 8) == 4.0 and mean_keys(causal, 8, full_square=True) == 8.0
    assert mean_keys(full, 8) == 8.0 and mean_keys(causal, 0) == 0.0
