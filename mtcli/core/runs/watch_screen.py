"""Shows a run that is watched: a panel that stays in its place on a terminal, elsewhere lines.

`q` or Ctrl-C ends the watching, and so does the end of the run.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mtcli.core.config.errors import visible
from mtcli.core.runs.run_watch import Glance, RunWatcher, line, panel
from mtcli.core.runtime.console import print_line, width

PANEL_WIDTH = 100


def watch(folder: Path, interval: float, once: bool, quiet: bool = False) -> Glance:
    """Shows a run every so many seconds until it ends, or the reader does; returns the last look.

    `once` looks at it once; `quiet` shows nothing.
    """
    watcher = RunWatcher(folder)
    glance = watcher.look()
    if once or quiet:
        while not once and glance.run.state == "running":
            time.sleep(interval)
            glance = watcher.look()
        if not quiet:
            print_line(panel(glance, width(PANEL_WIDTH)))
        return glance
    with suppress(KeyboardInterrupt), _screen() as show, _keys() as pressed:
        show(glance)
        while glance.run.state == "running" and pressed(interval) != "q":
            glance = watcher.look()
            show(glance)
    return glance


@contextmanager
def _screen() -> Iterator[Callable[[Glance], None]]:
    """Yields a function that shows a glance: on a terminal in place of the last one."""
    console = Console()
    if not console.is_terminal:
        last = ""

        def show_line(glance: Glance) -> None:
            nonlocal last
            if (text := line(glance)) != last:
                print_line(text)
                sys.stdout.flush()
                last = text

        yield show_line
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(glance: Glance) -> None:
            text = visible(panel(glance, width(PANEL_WIDTH)))
            keys = "\nq ends" if glance.run.state == "running" else ""
            live.update(Text(text + keys), refresh=True)

        yield show


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits some seconds for a key, and returns it or "". Keys need no
    Enter meanwhile."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    settings = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return os.read(file, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, settings)
