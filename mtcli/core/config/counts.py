"""Words a number of things, and a duration."""

from datetime import timedelta

YEAR = 365.25 * 86400  # seconds


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless it is 1: 2 ranks, 1 file."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Returns seconds as 0:02:03, or 4 days, 0:02:03; in years where a calendar ends."""
    try:
        return str(timedelta(seconds=round(seconds)))
    except OverflowError:
        return f"{seconds / YEAR:.3g} years"
