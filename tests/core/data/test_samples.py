"""The three indices against megatron-core's GPTDataset, number by number."""

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.data.indexed import Indexed
from mtcli.core.data.loader import Batches
from mtcli.core.data.samples import build_samples


class Tokens:
    """What GPTDataset asks of a tokenizer."""

    eod, pad, vocab_size, unique_identifiers = 0, -1, None, {"class": "Tokens"}


def megatron(prefix, owned, num_samples, seq_len, seed):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        split="1,0,0",
        tokenizer=Tokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=f"{prefix}.megatron",
    )
    indices = np.arange(owned.start, owned.stop, dtype=np.int32)
    return GPTDataset(IndexedDataset(prefix), prefix, indices, num_samples, Split.train, config)


CASES = [
    # documents, longest, samples, seq_len, seed: E = 1, exactly fits, last epoch apart or not
    (40, 50, 10, 16, 1),
    (40, 50, None, 16, 2),
    (40, 50, 70, 16, 3),
    (40, 50, 110, 16, 4),
    (3, 5, 1000, 7, 5),
    (1, 400, 17, 128, 6),
    (200, 3, 333, 33, 1234),
    (40, 50, 61, 16, 7),
]


@pytest.mark.parametrize(("count", "longest", "num_samples", "seq_len", "seed"), CASES)
def test_indices_are_megatrons(make_dataset, count, longest, num_samples, seq_len, seed):
    prefix, _ = make_dataset(count=count, longest=longest, seed=seed)
    owned = range(count // 5, count)
    theirs = megatron(prefix, owned, num_samples, seq_len, seed)
    ours = build_samples(Indexed(prefix).lengths, owned, num_samples, seq_len, seed)
    for mine, other in zip(
        ours, (theirs.document_index, theirs.sample_index, theirs.shuffle_index), strict=True
    ):
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("seed", range(8))
def test_indices_are_megatrons_for_random_sizes(make_dataset, seed):
    random = np.random.default_rng(seed)
    count, longest = int(random.integers(1, 60)), int(random.integers(2, 90))
    num_samples, seq_len = int(random.integers(1, 400)), int(random.integers(2, 70))
    prefix, _ = make_dataset(count=count, longest=longest, seed=seed)
    theirs = megatron(prefix, range(count), num_samples, seq_len, seed)
    ours = build_samples(Indexed(prefix).lengths, range(count), num_samples, seq_len, seed)
    assert np.array_equal(ours.documents, theirs.document_index)
    assert np.array_equal(ours.rows, theirs.sample_index)
    assert np.array_equal(ours.order, theirs.shuffle_index)


def test_batches_hold_the_tokens_of_megatrons_items(make_dataset):
    prefix, _ = make_dataset(count=60, longest=80)
    theirs = megatron(prefix, range(60), 200, 32, 5)
    ours = Batches([prefix], "1,0,0", "train", 200, 32, 5).batch(0, 200)
    for i in range(200):
        item = theirs[i]
        assert np.array_equal(ours[i, :-1], item["tokens"].numpy())
        assert np.array_equal(ours[i, 1:], item["labels"].numpy())


@pytest.mark.parametrize("num_samples", [100, 178, 179, 180, 181, 200])
def test_the_last_epoch_is_apart_below_80_percent_as_megatrons(tmp_path, num_samples):
    # 1601 tokens are 100 samples of 16 and one more token: 80 of the second epoch is the limit.
    prefix = str(tmp_path / "data")
    write_dataset(prefix, [[7] * n for n in [40] * 40 + [1]], np.dtype("<u2"))
    theirs = megatron(prefix, range(41), num_samples, 16, 3)
    ours = build_samples(Indexed(prefix).lengths, range(41), num_samples, 16, 3)
    assert np.array_equal(ours.documents, theirs.document_index)
    assert np.array_equal(ours.order, theirs.shuffle_index)


def test_empty_sequences_are_stepped_over_as_megatrons_helper_does():
    from megatron.core.datasets import helpers

    for seed in range(12):
        random = np.random.default_rng(seed)
        lengths = random.integers(0, 4, 30).astype(np.int32)
        found = build_samples(lengths, range(30), 40, 5, seed)
        epochs, per_epoch = len(found.documents) // 30, int(lengths.sum())
        rows = helpers.build_sample_idx(lengths, found.documents, 5, epochs, per_epoch, True, True)
        assert np.array_equal(found.rows, rows), seed


def longer(lengths, num_samples, planned, seq_len=7, seed=3):
    return build_samples(lengths, range(len(lengths)), num_samples, seq_len, seed, planned)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_made_longer_goes_on_after_the_epochs_it_was_planned_with(seed):
    """What was planned stays, element by element; each epoch after it is shuffled by its number."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, int(random.integers(1, 30))).astype(np.int32)
    planned = int(random.integers(1, 200))
    first = longer(lengths, planned, None)
    per_epoch, count = int(lengths.sum()), len(lengths)
    epochs = len(first.documents) // count
    found = longer(lengths, planned + int(random.integers(1, 500)), planned)
    assert np.array_equal(found.documents[: len(first.documents)], first.documents)
    assert np.array_equal(found.order[: len(first)], first.order)
    assert np.array_equal(found.rows[: len(first) + 1], first.rows)
    for epoch in range(epochs, len(found.documents) // count):
        order = np.random.RandomState([3, epoch])
        part = found.documents[epoch * count : (epoch + 1) * count]
        assert np.array_equal(part, order.permutation(count))
        begin, end = ((n * per_epoch - 1) // 7 for n in (epoch, epoch + 1))
        assert np.array_equal(found.order[begin:end], begin + order.permutation(end - begin))


@pytest.mark.parametrize("planned", [10, 70, 85, 110])
def test_a_run_made_longer_twice_or_shorter_again_has_one_order(planned):
    lengths = np.full(40, 11, np.int32)
    samples = {n: longer(lengths, n, planned) for n in (5, 10, 70, 85, 110, 300, 500)}
    longest = samples[500]
    for found in samples.values():
        assert np.array_equal(found.order, longest.order[: len(found)])
        assert np.array_equal(found.documents, longest.documents[: len(found.documents)])
