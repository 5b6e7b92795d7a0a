"""Loops over arrays, compiled for the CPU by numba."""

from collections.abc import Callable
from typing import Any, cast


def compiled(loop: Callable[..., Any], **flags: Any) -> Callable[..., Any]:
    """Compiles a loop at its first call, or loads what an earlier process compiled.

    Without `fastmath` among the flags of numba.njit it rounds as Python does. numba's import takes
    half a second: whatever needs no such loop does not ask for one.
    """
    import numba

    try:
        return cast(Callable[..., Any], numba.njit(cache=True, **flags)(loop))
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return cast(Callable[..., Any], numba.njit(**flags)(loop))
