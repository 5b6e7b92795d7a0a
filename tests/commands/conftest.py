"""Commands of launchers of their own, none of which outlives its test."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from command_line import stand_ins


@pytest.fixture
def spawn():
    """Starts `mtcli <words>` in a process group of its own, which a failed test ends as well.

    `alone`: without a stand-in, so that what is sent to the group reaches its workers.
    """
    started = []

    def start(*words, alone=False, **environ):
        command = [sys.executable, "-m", "mtcli"] if alone else [stand_ins() / "mtcli"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = pipes | {"env": os.environ | environ, "start_new_session": True}
        started.append(subprocess.Popen([*command, *map(str, words)], **options))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
