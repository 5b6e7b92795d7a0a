"""Rows of a chunk and of a block fill their bytes, and never fewer than one is taken."""

from mtcli.kernels.limits import CPU_BLOCK_BYTES, LOSS_CHUNK_BYTES, block_rows, chunk_rows


def test_a_chunk_of_the_loss_is_4096_tokens_where_that_is_256_to_1024_mib():
    for row_bytes, rows in (
        (2 * 128 * 1024, 4096),  # 16 bits of 128k columns: 1 GiB
        (2 * 50304, 4096),  # 393 MiB
        (2 * 256 * 1024, 2048),  # 1 GiB holds no more
        (4 * 200_000, 1280),  # 1342 fit, which is 10.5 times 128
        (2 * 16 * 1024, 8192),  # 256 MiB
        (2**30 // 100, 100),  # fewer than 128 fit
        (2**31, 1),
    ):
        assert chunk_rows(row_bytes) == rows
        assert rows * row_bytes <= LOSS_CHUNK_BYTES[1] or rows == 1


def test_a_block_is_as_many_rows_as_an_l2_cache_holds():
    for row_bytes, rows in ((4 * 8192, 32), (300_000, 3), (2**21, 1), (0, 2**20)):
        assert block_rows(row_bytes) == rows
        assert rows * row_bytes <= CPU_BLOCK_BYTES or rows == 1
