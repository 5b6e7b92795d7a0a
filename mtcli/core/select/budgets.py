"""Divides the sequences to choose over groups: classes of labelled examples, sources of a blend."""

import math
from collections.abc import Sequence

from mtcli.core.config.errors import wrong


def total_of(fraction: float | None, size: int | None, candidates: int) -> int:
    """Counts the candidates to choose: a `fraction` of all, at least one, or `size`.

    Raises MtcliError where there are fewer than `size`.
    """
    if size is None:
        assert fraction is not None, "a size or a fraction"
        return max(1, round(fraction * candidates))
    if size > candidates:
        message = f"{size} sequences of the {candidates} that there are"
        raise wrong(message, f"1 to {candidates}", "--size")
    return size


def budgets_of(sizes: Sequence[int], shares: Sequence[float], total: int) -> list[int]:
    """Divides `total` over groups in proportion to their shares, by largest remainders (the first
    of equal ones). A group gets at least one and at most its size.

    Raises MtcliError where there are more groups than `total`.
    """
    if total < len(sizes):
        message = f"{total} sequences to choose from {len(sizes)} groups (sources or classes)"
        raise wrong(message, f"{len(sizes)} or more, so that each group has one", "--size")
    budgets: dict[int, int] = {}
    while len(budgets) < len(sizes):
        left = [group for group in range(len(sizes)) if group not in budgets]
        remaining = total - sum(budgets.values())
        scale = remaining / sum(shares[group] for group in left)
        quotas = {group: shares[group] * scale for group in left}
        full = {group: sizes[group] for group in left if quotas[group] > sizes[group]}
        least = {group: 1 for group in left if quotas[group] < 1.0}
        if full or least:  # one kind at a time, as each changes what is left for the others
            budgets |= full or least
            continue
        floors = {group: math.floor(quotas[group]) for group in left}
        by_rest = sorted(left, key=lambda group: floors[group] - quotas[group])
        for group in by_rest[: remaining - sum(floors.values())]:
            floors[group] += 1
        budgets |= floors
    return [budgets[group] for group in range(len(sizes))]
