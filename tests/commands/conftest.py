"""Commands in processes of their own, none of which outlives its test."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest


@pytest.fixture
def spawn():
    """Starts `mtcli <words>` in a process group of its own, which a failed test ends as well."""
    started = []

    def start(*words, **environ):
        command = [sys.executable, "-m", "mtcli", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = pipes | {"env": os.environ | environ, "start_new_session": True}
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
