"""Divisors, and what to say where one number does not divide another."""

from collections.abc import Iterator
from math import isqrt

from mtcli.core.config.errors import Problem


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def multiples_around(number: int, unit: int) -> list[int]:
    """The multiples of `unit` on both sides of a number, ascending; none below one unit."""
    return sorted({max(unit, number // unit * unit), -(-number // unit) * unit})


def listing(numbers: list[int]) -> str:
    """'1, 2, 4 or 8'; long lists keep their ends."""
    if len(numbers) > 10:
        return f"{', '.join(map(str, numbers[:8]))}, ... or {numbers[-1]}"
    head, last = numbers[:-1], numbers[-1]
    return f"{', '.join(map(str, head))} or {last}" if head else str(last)


def divides(field: str, size: int, of: str, number: int) -> Iterator[Problem]:
    """A problem of `field` where its size does not divide a number, which `of` names."""
    if number % size:
        name = of.removeprefix("model.")
        short = field.rpartition(".")[2]
        legal = [d for d in divisors(number) if d <= 4 * size]
        yield Problem(f"{short}={size} does not divide {name}={number}", listing(legal), field)
