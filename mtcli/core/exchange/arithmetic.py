"""Counts the elementwise arithmetic of replica exchanges, for the planned time of a step."""

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
    """Calls of one kind, and the elements of all calls together."""

    kind: Kind
    elements: float
    calls: float = 1.0


def times(factor: float, works: Iterable[Arithmetic]) -> Iterator[Arithmetic]:
    """Yields `works` times `factor`, such as a mean number of exchanges per step."""
    return (Arithmetic(kind, factor * elements, factor * calls) for kind, elements, calls in works)


def passes(count: float, elements: float, tensors: int = 1) -> Arithmetic:
    """`count` elementwise operations on `tensors` tensors of `elements` elements together."""
    return Arithmetic("pass", count * elements, count * tensors)
