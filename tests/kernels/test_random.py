import hashlib
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from mtcli.kernels.random import BLOCK, keep_mask, keep_rows, normal, random_bits, stream_key

WORD = 2**64


def splitmix(key, index):
    """SplitMix64 in Python's integers, from its paper (Steele et al., OOPSLA 2014, figure 16)."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def unsigned(bits):
    return [number % WORD for number in bits.tolist()]


def test_the_stream_of_seed_1234567_is_the_published_one():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert unsigned(random_bits(1234567, torch.arange(3))) == published


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**62), min_size=1, max_size=9))
def test_bits_are_splitmix64_of_any_key_and_index(key, indices):
    bits = random_bits(key, torch.tensor(indices))
    assert unsigned(bits) == [splitmix(key, index) for index in indices]


def test_a_key_is_a_hash_of_the_seed_and_every_name():
    text = b"7\0init\0blocks.0.mlp.up.weight"
    digest = hashlib.blake2b(text, digest_size=8).digest()
    expected = int.from_bytes(digest, "big", signed=True)
    assert stream_key(7, "init", "blocks.0.mlp.up.weight") == expected
    assert stream_key(7, "ab", "c") != stream_key(7, "a", "bc")
    assert len({stream_key(seed, "dropout", 3) for seed in range(100)}) == 100


@given(st.integers(-(2**63), 2**63 - 1), st.floats(0.0, 0.999))
def test_a_mask_drops_where_the_high_half_is_below_the_probability(key, drop):
    keep = keep_mask(key, torch.arange(50), drop).tolist()
    assert keep == [splitmix(key, i) >> 32 >= round(drop * 2**32) for i in range(50)]


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0.0, 1.0, exclude_max=True),
    st.sampled_from([(0,), (3,), (2, 3, 5), (300,)]),
    st.sampled_from([1, 7, 1000, 100_000]),
)
@settings(max_examples=12)
def test_rows_of_a_mask_made_in_blocks_are_those_of_its_indices(key, drop, shape, width):
    firsts = torch.randint(0, 2**40, shape)
    expected = keep_mask(key, firsts[..., None] + torch.arange(width), drop)
    assert torch.equal(keep_rows(key, firsts, width, drop), expected)


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 0.9])
def test_a_mask_drops_the_share_it_is_told(drop):
    n = 400_000
    dropped = 1.0 - keep_mask(stream_key(1, "site"), torch.arange(n), drop).double().mean().item()
    assert abs(dropped - drop) <= 4.0 * math.sqrt(drop * (1.0 - drop) / n)


def test_normals_are_box_muller_of_the_bits():
    key, half = stream_key(3, "weight"), BLOCK // 2
    whole = normal(key, 0, 2 * BLOCK).double()
    for pair in (0, 1, 17, half - 1, half, 2 * half - 1):
        bits = splitmix(key % WORD, pair)
        radius = math.sqrt(-2.0 * math.log(((bits >> 32) + 0.5) / 2**32))
        angle = 2.0 * math.pi * (bits % 2**32) / 2**32
        at = pair // half * BLOCK + pair % half
        found = whole[at].item(), whole[at + half].item()
        assert found == pytest.approx(
            (radius * math.cos(angle), radius * math.sin(angle)), abs=1e-5
        )


def test_normals_are_normal():
    n = 20 * BLOCK
    x = normal(stream_key(5, "weight"), 0, n).double()
    moments = [x.mean(), x.square().mean(), x.pow(3).mean(), x.pow(4).mean()]
    widths = [1.0, math.sqrt(2.0), math.sqrt(15.0), math.sqrt(96.0)]  # of one draw's power
    for moment, expected, width in zip(moments, (0.0, 1.0, 0.0, 3.0), widths, strict=True):
        assert abs(moment.item() - expected) < 4.0 * width / math.sqrt(n)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    below = torch.special.ndtr(x.sort().values)
    distance = torch.maximum((steps[1:] - below).max(), (below - steps[:-1]).max())
    assert distance < 1.63 / math.sqrt(n)  # Kolmogorov-Smirnov at 1 %


def test_streams_and_neighbours_are_uncorrelated():
    n = 10 * BLOCK
    x, y = (normal(stream_key(5, name), 0, n).double() for name in ("a", "b"))
    bound = 4.0 / math.sqrt(n)
    assert abs((x * y).mean()) < bound
    assert abs((x[1:] * x[:-1]).mean()) < bound
    assert abs((x[: n // 2] * x[n // 2 :]).mean()) < bound


@settings(max_examples=30)
@given(st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK))
@example(BLOCK, 0)
def test_any_slice_of_normals_is_bit_identical_to_the_whole(start, count):
    whole = normal(11, 0, 6 * BLOCK)
    assert torch.equal(normal(11, start, count), whole[start : start + count])


def test_the_kernels_normals_are_those_of_the_formula_from_any_start(device):
    key, half = stream_key(3, "weight"), BLOCK // 2
    for start, count in ((0, half + 9), (5, 300), (half - 1, 300), (3 * BLOCK + 7, half + 9)):
        found = normal(key, start, count, device)
        index = torch.arange(start, start + count)
        bits = random_bits(key, index // BLOCK * half + index % half)
        radius = ((((bits >> 32) & (2**32 - 1)) + 0.5).double() / 2**32).log().mul(-2.0).sqrt()
        angle = (bits & (2**32 - 1)).double() / 2**32 * 2.0 * math.pi
        expected = radius * torch.where(index % BLOCK < half, angle.cos(), angle.sin())
        torch.testing.assert_close(found.double().cpu(), expected, rtol=0.0, atol=1e-5)


def test_the_kernels_slices_of_normals_are_bit_identical_to_the_whole(device):
    whole = normal(11, 0, BLOCK + 2000, device)
    for start, count in ((0, 1), (1, 1999), (BLOCK - 3, 2003), (BLOCK // 2, 1)):
        assert torch.equal(normal(11, start, count, device), whole[start : start + count])
