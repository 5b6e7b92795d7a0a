"""The one mark of a tier: `slow`, beside the test or the case that `make test` leaves to
`make test-all`, with the reason."""

import pytest


def slow(reason):
    """The mark of a test, or of a `pytest.param`, that is too dear for `make test`."""
    return pytest.mark.slow(reason)


def slow_cases(reason, *cases):
    """Cases of a parametrised test, all slow; a plain tuple has a value per argument."""
    values = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*value, marks=slow(reason)) for value in values]
