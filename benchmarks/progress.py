"""Shows a benchmark at work: a bar on stderr, and each row as soon as it is measured."""

import sys
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def each(cases: Collection[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """The cases in order, with a bar on stderr that names the one being measured."""
    with tqdm(total=len(cases), unit="run", leave=False, dynamic_ncols=True) as bar:
        for case in cases:
            bar.set_postfix_str(name(case))
            yield case
            bar.update()


def in_turn(contenders: Collection[str], repeats: int) -> Iterator[str]:
    """Every contender once, then every one again, `repeats` times, with the bar of `each`."""
    return each([name for _ in range(repeats) for name in contenders])


def say(line: str) -> None:
    """Prints a row at once, above the bar."""
    with tqdm.external_write_mode(sys.stdout):
        print(line, flush=True)
