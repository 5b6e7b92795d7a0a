"""Compressed values: what few bits keep, in exactly the bytes that are said."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.payload import BLOCK, CHUNK, Payload
from mtcli.core.sync.compression import (
    MAGNITUDES,
    compress,
    decompress,
    nearest_index,
    pack,
    unpack,
)

LENGTHS = st.integers(1, 3 * CHUNK)
BITS = st.sampled_from([2, 4, 8])


def of(length, bits=0, top_k=0.0):
    return Payload.of(SyncConfig(method="diloco", quantise=bits, top_k=top_k), length)


def normal(length, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=length).astype(np.float32))


def there_and_back(x, form):
    payload = compress(x, form)
    assert payload.dtype == torch.uint8 and len(payload) == sum(form.sizes(len(x)))
    return decompress(payload, form, len(x))


@given(st.integers(1, 12), st.integers(1, 70), st.integers(0, 2**32))
def test_packed_bits_are_those_of_one_long_number(bits, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, count)
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    packed = pack(torch.from_numpy(codes), bits)
    assert bytes(packed.tolist()) == number.to_bytes(-(-count * bits // 8), "little")
    assert unpack(packed, bits, count).tolist() == codes.tolist()


def nearest(x, bits):
    """The nearest of a block's magnitudes, by the tables of the formats."""
    scale = np.abs(x).max()
    levels = np.arange(128) / 127 if bits == 8 else np.array([0, *(2.0 ** np.arange(-6, 1))])
    distance = np.abs(np.abs(x)[:, None] / scale - levels)
    return distance.min(1) * scale


@given(LENGTHS, st.sampled_from([4, 8]), st.integers(0, 99))
def test_a_value_becomes_the_nearest_of_its_block_s_levels(length, bits, seed):
    x = normal(length, seed)
    form = of(length, bits)
    assert form.columns <= BLOCK
    lost = (x - there_and_back(x, form)).abs().numpy()
    blocks = np.split(x.numpy(), range(form.columns, length, form.columns))
    least = np.concatenate([nearest(block, bits) for block in blocks])
    np.testing.assert_allclose(lost, least, atol=1e-6)


def test_two_bits_keep_sign_and_the_mean_of_small_and_of_large_magnitudes():
    x = torch.tensor([-1.0, 2.0, 3.0, -6.0])  # mean magnitude 3
    x = x.repeat(BLOCK // 4)
    small = torch.tensor([-2.0, 2.0, 2.0, -6.0]).repeat(BLOCK // 4)
    assert torch.equal(there_and_back(x, of(BLOCK, 2)), small)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_stay_zeros(bits):
    assert not there_and_back(torch.zeros(300), of(300, bits)).any()


@given(LENGTHS, st.floats(0.001, 1.0), st.integers(0, 99))
def test_the_largest_of_each_chunk_are_sent_as_they_are_and_no_others(length, top_k, seed):
    x = normal(length, seed)
    form = of(length, top_k=top_k)
    found = there_and_back(x, form).numpy()
    for first in range(0, length, form.columns):
        part = x.numpy()[first : first + form.columns]
        kept = np.sort(np.argsort(-np.abs(part))[: form.sent])
        expected = np.zeros_like(part)
        expected[kept] = part[kept]
        np.testing.assert_array_equal(found[first : first + form.columns], expected)


@given(LENGTHS, st.floats(0.001, 0.9), BITS)
def test_the_largest_are_quantised_where_they_are(length, top_k, bits):
    x = normal(length)
    dense, found = (
        there_and_back(x, of(length, 0, top_k)),
        there_and_back(x, of(length, bits, top_k)),
    )
    assert not found[dense == 0.0].any()
    assert (found * dense >= 0.0).all()
    assert (found - dense).norm() <= 0.6 * dense.norm()


def test_a_chunk_takes_the_bytes_of_the_paper_s_arithmetic_or_fewer():
    """SparseLoCo, 1.56 % at 2 bits: 64 values of 4096 take 12 + 2 bits each, here 8 + 2."""
    scales, values, bitmap, low = of(CHUNK, 2, 1 / 64).sizes(CHUNK)
    assert (values, low) == (64 * 2 // 8, 64 * 6 // 8)
    assert bitmap + low <= 64 * 8 // 8
    assert CHUNK * 4 / (scales + values + bitmap + low) > 146  # times less than float32


def test_a_dense_block_takes_its_bits_and_a_scale():
    assert sum(of(10 * BLOCK, 4).sizes(10 * BLOCK)) == 10 * (BLOCK // 2 + 4)
    assert sum(of(BLOCK + 1, 8).sizes(BLOCK + 1)) == BLOCK + 1 + 2 * 4


@pytest.mark.parametrize("bits", [4, 8])
def test_the_nearest_magnitude_is_that_of_a_search_of_all_and_halfway_the_lower(bits):
    levels = torch.tensor(MAGNITUDES[bits])
    halfway = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(end)) for end in (0.0, 2.0)]
    share = torch.cat([torch.rand(9999), levels, halfway, *beside, torch.tensor([1e-45])])
    assert torch.equal(nearest_index(share, bits).long(), torch.bucketize(share, halfway))
    assert nearest_index(torch.tensor([torch.nan]), bits).item() == len(levels) - 1
