"""Counts the arithmetic of replicas' exchanges: the elements that go through each kind of it."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal[
    "pass", "sign", "unsign", "select", "scatter", "compress_2", "decompress_2", "compress_4",
    "decompress_4", "compress_8", "decompress_8",
]  # fmt: skip

# Bytes that a kind reads and writes per float32 element: kernels of kernels/onebit.py, and of
# sync/compression.py the sum over torch's operations.
BYTES: dict[Kind, float] = {
    "pass": 12.0, "sign": 8.0, "unsign": 4.0, "select": 40.0, "scatter": 8.0,
    "compress_2": 60.0, "decompress_2": 40.0, "compress_4": 100.0, "decompress_4": 18.0,
    "compress_8": 120.0, "decompress_8": 22.0,
}  # fmt: skip


class Arithmetic(NamedTuple):
    """Calls of one kind, and the elements that all of them handle."""

    kind: Kind
    elements: float
    calls: float = 1.0


def times(factor: float, works: Iterable[Arithmetic]) -> Iterator[Arithmetic]:
    """Yields the work of something that is done so many times, on average."""
    return (Arithmetic(kind, factor * elements, factor * calls) for kind, elements, calls in works)


def passes(count: float, elements: float, tensors: int = 1) -> Arithmetic:
    """Elementwise operations on tensors that have so many elements together."""
    return Arithmetic("pass", count * elements, count * tensors)
