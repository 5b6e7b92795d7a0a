"""Defaults of tiles, and what the autotuner may choose, depend on a row's width."""

from mtcli.kernels import gelu, norm, swiglu
from mtcli.kernels.attention import softmax
from mtcli.kernels.triton_launch import cdiv, full_row_configs, power_of_two


def test_a_thread_is_given_4_to_64_elements():
    """512 elements of a thread spill 30 KiB and compile for minutes."""
    for kernel, *flags in ((norm._forward,), (norm._backward, True), (softmax._backward,)):
        for width in (5, 64, 768, 1024, 4096, 8192, 16384):
            configs = kernel.configs(width, *flags)
            elements = [c["ROWS"] * power_of_two(width) / (32 * c["num_warps"]) for c in configs]
            assert all(4 <= n <= 64 for n in elements), (width, elements)
            assert len(configs) > 1 and configs[0] == kernel.default(width, *flags)
            assert len({tuple(config.items()) for config in configs}) == len(configs)


def test_the_default_has_16_elements_per_thread_up_to_16_warps():
    defaults = [full_row_configs(width, 2048)[0] for width in (768, 2048, 4096, 16384)]
    assert [(c["ROWS"], c["num_warps"]) for c in defaults] == [(2, 4), (1, 4), (1, 8), (1, 16)]
    assert full_row_configs(1000, 1024)[0] == {"ROWS": 1, "num_warps": 2}


def test_a_tile_is_the_widest_of_those_that_pad_a_row_least():
    tiles = {768: 256, 1024: 1024, 5632: 512, 14336: 2048, 1400: 512}
    for width, columns in tiles.items():
        for kernel in (gelu._forward, swiglu._forward, swiglu._backward):
            default, *others = kernel.configs(width)
            assert default == {"ROWS": 2048 // columns, "COLUMNS": columns, "num_warps": 4}
            padded = [cdiv(width, c["COLUMNS"]) * c["COLUMNS"] for c in (default, *others)]
            assert padded == sorted(padded) and padded[0] < width + 256
