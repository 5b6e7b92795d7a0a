"""Blends and splits against megatron-core's parser, helper and builder."""

from itertools import product

import numpy as np
import pytest

from mtcli.core.config.blend import SPLITS
from mtcli.core.config.errors import MtcliError
from mtcli.core.data.blend import parse_blend, parse_split, split_range
from mtcli.core.data.blend_order import blend_indices
from mtcli.core.data.loader import Batches


@pytest.mark.parametrize(
    "weights", [[0.5, 0.5], [0.7, 0.3], [3, 1, 2], [0.1] * 10, [1e-3, 0.999], [5, 0, 1], [7.0]]
)
def test_blend_order_is_megatrons(weights):
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import normalize

    size = 5000
    owner, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(owner, sample, normalize(weights), len(weights), size, False)
    ours = blend_indices(weights, size)
    assert np.array_equal(ours[0], owner)
    assert np.array_equal(ours[1], sample)
    assert (ours[0].dtype, ours[1].dtype) == (np.int16, np.int64)


def one_by_one(weights, size):
    """The loop in Python: int and float of the interpreter, no numpy but for the normalisation."""
    shares = [float(x) for x in np.array(weights, np.float64) / np.sum(np.array(weights, float))]
    owners, samples, drawn = [], [], [0] * len(shares)
    for i in range(size):
        behind = [share * max(i, 1) - count for share, count in zip(shares, drawn, strict=True)]
        owner = behind.index(max(behind))
        owners.append(owner)
        samples.append(drawn[owner])
        drawn[owner] += 1
    return owners, samples


@pytest.mark.parametrize("seed", range(6))
def test_a_compiled_order_is_that_of_a_loop_in_python(seed):
    random = np.random.default_rng(seed)
    sets = int(random.integers(1, 40))
    kinds = [random.random(sets), random.integers(1, 5, sets), 10 ** random.uniform(-7, 0, sets)]
    weights = kinds[seed % 3].astype(float) * (random.random(sets) > 0.1)
    weights[0] = 1.0
    order = blend_indices(weights.tolist(), 6000)
    owners, samples = one_by_one(weights.tolist(), 6000)
    assert order.owner.tolist() == owners and order.sample.tolist() == samples


def test_a_blend_is_ordered_where_compiled_code_cannot_be_kept(monkeypatch):
    import numba

    expected, compiled, asked = blend_indices([0.3, 0.7], 100), numba.njit, []

    def refusing(cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("no locator available")
        return compiled(**options)

    monkeypatch.setattr(numba, "njit", refusing)
    assert all(map(np.array_equal, blend_indices([0.3, 0.7], 100), expected))
    assert asked == [True, False]


def test_a_dataset_of_weight_0_gives_no_sample():
    owner, sample = blend_indices([0.0, 3.0, 0.0, 1.0], 8)
    assert owner.tolist() == [1, 3, 1, 1, 1, 3, 1, 1]
    assert sample.tolist() == [0, 0, 1, 2, 3, 1, 4, 5]


def test_splits_are_megatrons():
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    for split in ("969,30,1", "90,5,5", "1", "0.5, 0.25", "1,1,1", "99,0,1"):
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        for count, (which, bounds) in product(
            (1, 3, 25, 150, 1001, 99999), zip(SPLITS, matrix, strict=True)
        ):
            low, high = split_range(split, which, count)
            if bounds is None:
                assert low == high, (split, which, count)
            else:
                expected = tuple(int(round(b * float(count))) for b in bounds)
                assert (low, high) == expected, (split, which, count)


def test_words_are_prefixes_or_pairs():
    assert parse_blend(["a"]) == (("a",), None)
    assert parse_blend(["a", "b"]) == (("a", "b"), None)
    assert parse_blend(["0.3", "b", "c"]) == (("0.3", "b", "c"), None)
    assert parse_blend(["3", "a", "1", "b"]) == (("a", "b"), (0.75, 0.25))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no data paths"),
        (["0.3", "a", "b", "c"], "1 of 2 pairs begin with a weight: 0.3 a b c"),
        (["-1", "a", "2", "b"], r"weights \[-1.0, 2.0\] are not all >= 0 with a sum > 0"),
        (["0", "a"], r"weights \[0.0\] are not all >= 0"),
        (["nan", "a"], r"weights \[nan\] are not all >= 0"),
    ],
)
def test_words_that_are_no_blend_are_refused(words, message):
    with pytest.raises(MtcliError, match=message):
        parse_blend(words)


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a,b", "-1,2", "1..2,3"])
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(MtcliError, match="is not up to three numbers >= 0"):
        parse_split(split)


def test_too_many_datasets_are_refused():
    with pytest.raises(MtcliError, match="32768 datasets in a blend, and at most 32767"):
        blend_indices([1.0] * 32768, 1)


def megatron_blend(words, split, sizes, seq_len, seed, cache):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    class Tokens:
        eod, pad, vocab_size, unique_identifiers = 0, -1, None, {"class": "Tokens"}

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=get_blend_from_list(words),
        split=split,
        tokenizer=Tokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        num_dataset_builder_threads=1,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@pytest.mark.parametrize("weights", [("0.7", "0.2", "0.1"), ("1", "1", "1"), None])
def test_a_blend_is_megatrons_token_by_token(make_dataset, tmp_path, weights):
    made = [make_dataset(f"d{i}", 60 + 10 * i, 70, seed=i) for i in range(3)]
    prefixes = [prefix for prefix, _ in made]
    words = (
        prefixes if weights is None else [w for p in zip(weights, prefixes, strict=True) for w in p]
    )
    sizes = [100, 20, 10] if weights is None else [300, 40, 10]
    theirs = megatron_blend(words, "80,10,10", sizes, 24, 99, tmp_path)
    for which, size, other in zip(SPLITS, sizes, theirs, strict=True):
        size = min(size, len(other))
        ours = Batches(words, "80,10,10", which, size, 24, 99).batch(0, size)
        for i in range(size):
            assert np.array_equal(ours[i, :-1], other[i]["tokens"].numpy()), (which, i)
            assert np.array_equal(ours[i, 1:], other[i]["labels"].numpy()), (which, i)
