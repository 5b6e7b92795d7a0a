"""Words a number of things."""


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless it is 1: 2 ranks, 1 file."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
