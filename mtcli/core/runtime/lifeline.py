"""Ends a process when the one that started it dies, however that died."""

import os
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread


def end_with(pipe: int, cleanup: Callable[[], object] = lambda: None) -> None:
    """Ends this process when the last write end of a pipe closes: the system closes a dead
    process' files, after SIGKILL too. `cleanup` is called before.

    A thread waits, so call it after forking. It works on macOS, unlike PR_SET_PDEATHSIG, and across
    a fork server, whose workers are not the caller's children.
    """

    def watch() -> None:
        wait([pipe])
        cleanup()
        os._exit(1)

    Thread(target=watch, name="mtcli-lifeline", daemon=True).start()


def end_with_parent() -> None:
    """`end_with` the process that started this `multiprocessing` worker."""
    parent = parent_process()
    assert parent is not None, "called in a worker"
    end_with(parent.sentinel)
