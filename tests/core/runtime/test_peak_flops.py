"""The FLOP/s that MFU divides by: datasheets' by a board's name, and measured ones."""

from time import perf_counter

import pytest
import torch

from mtcli.core.runtime import peak_flops as peaks_of
from mtcli.core.runtime.peak_flops import board_name, peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("board", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Quadro RTX 5000", "rtx-5000"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H100 PCIe", ""),  # 756 TFLOP/s, not 989
        ("NVIDIA RTX 5000 Ada Generation", ""),
        ("NVIDIA GeForce RTX 4090", ""),
    ],
)
def test_a_board_is_known_by_its_drivers_name(board, name):
    assert board_name(board) == name


def test_a_listed_gpu_has_its_datasheets_peak(monkeypatch):
    monkeypatch.setattr(peaks_of, "device_name", lambda device: "h100")
    assert peak_flops("bf16", "fast", CPU) == pytest.approx(989.4e12)
    assert peak_flops("fp32", "fast", CPU) == pytest.approx(67e12)
    assert peak_flops("fp32", "tf32", CPU) == pytest.approx(494.7e12)


def test_a_cpus_peak_is_what_a_large_product_reaches(monkeypatch):
    monkeypatch.setitem(peaks_of.SIDE, "cpu", 512)
    a = torch.randn(512, 512)
    seconds, peaks = [], []
    for _ in range(5):  # the best of each: other work on the machine only ever adds time
        seconds += [_seconds(lambda: a @ a) for _ in range(5)]
        peaks.append(peak_flops("fp32", "fast", CPU))
    share = max(peaks) * min(seconds) / (2 * 512**3)
    assert 1 / 3 < share < 3


def test_a_cpus_peak_in_float16_is_no_other_than_its_products_reach(monkeypatch):
    """In float32, which they are made in; torch's own float16 products are 80 times slower."""
    monkeypatch.setitem(peaks_of.SIDE, "cpu", 512)
    assert peak_flops("fp16", "fast", CPU) > 0.1 * peak_flops("fp32", "fast", CPU)


def _seconds(work):
    start = perf_counter()
    work()
    return perf_counter() - start


def test_a_run_on_a_cpu_has_no_peak_and_one_on_an_unlisted_board_is_measured_once(monkeypatch):
    assert peaks_of.run_peak_flops("fp32", "fast", CPU) == 0.0
    rates = iter([3e12, 4e12])
    monkeypatch.setattr(peaks_of, "device_name", lambda device: "")
    monkeypatch.setattr(peaks_of, "_measured", lambda *_: next(rates))
    board = torch.device("cuda", 0)
    assert [peaks_of.run_peak_flops("fp32", "fast", board) for _ in range(2)] == [3e12, 3e12]
    assert peaks_of.run_peak_flops("bf16", "fast", board) == 4e12
    peaks_of._known_peak.cache_clear()
