"""Restores environment variables, so that none of ours stays in a process that is a user's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# The network interface of a process's collectives.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@contextmanager
def restored(*names: str) -> Iterator[None]:
    """Restores the variables of these names at its end; inside, they may be set."""
    previous = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
