"""Patterns over the names of parameters: of those that a run freezes, and of optimizer groups.

A pattern names a parameter, or a module and with it all that the module has: "embedding",
"blocks.*.mlp.router". A star stands for any text, and "0-3" for the blocks 0 to 3.
"""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from mtcli.core.config.errors import Problem
from mtcli.core.config.synonyms import closest

BLOCKS = re.compile(r"(?<=\.)(\d{1,9})-(\d{1,9})(?=\.|$)")  # a range, as the part of a name


def matches(name: str, pattern: str) -> bool:
    """Says whether a pattern names a parameter, or a module that has it."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]

    def block(found: re.Match[str]) -> str:
        inside = (n for n in numbers if int(found[1]) <= n <= int(found[2]))
        return str(next(inside, found[0]))

    pattern = BLOCKS.sub(block, pattern)
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matched(names: Iterable[str], patterns: Collection[str]) -> set[str]:
    """The names that any of some patterns match."""
    return {name for name in names if any(matches(name, pattern) for pattern in patterns)}


def unmatched(names: Collection[str], patterns: Iterable[str], field: str) -> list[Problem]:
    """Lists the patterns of a field that match no name, with names that are near."""
    problems = []
    for pattern in patterns:
        if not matched(names, [pattern]):
            modules = {name.rpartition(".")[0] for name in names}
            modules |= {name.partition(".")[0] for name in names}
            near = closest(pattern, sorted(modules | set(names)))
            hint = f"names are those of `mtcli shard inspect`, as blocks.0.attention.qkv{near}"
            problems.append(Problem(f"no parameter of the model matches {pattern!r}", hint, field))
    return problems
