"""Rows of a chunk and of a block fill their bytes, and never fewer than one is taken."""

import pytest

from mtcli.kernels.limits import CPU_BLOCK_BYTES, LOSS_CHUNK_BYTES, block_rows, chunk_rows


@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [
        (2 * 128 * 1024, 1024),  # 16 bits of 128k columns: 2**28 / 2**18
        (2 * 50304, 2560),  # 2668 fit, which is 20.8 times 128
        (2**28 // 100, 100),  # fewer than 128 fit
        (2**29, 1),
    ],
)
def test_a_chunk_of_the_loss_is_as_many_rows_as_fit_in_tiles_of_128(row_bytes, rows):
    assert chunk_rows(row_bytes) == rows
    assert rows * row_bytes <= LOSS_CHUNK_BYTES or rows == 1


@pytest.mark.parametrize(
    ("row_bytes", "rows"), [(4 * 8192, 32), (300_000, 3), (2**21, 1), (0, 2**20)]
)
def test_a_block_is_as_many_rows_as_an_l2_cache_holds(row_bytes, rows):
    assert block_rows(row_bytes) == rows
    assert rows * row_bytes <= CPU_BLOCK_BYTES or rows == 1
