"""Runs an untrusted program, such as a chat template, with limits of processor time and memory.

Jinja's sandbox keeps a template from Python's objects, but not from loops and huge texts. Many of
these are a single call in C (`'%2000000000d' % 1`, a regular expression), which no Python thread or
signal handler interrupts. So the program runs in a process of its own, which answers requests as
lines of JSON. It sets a timer for each request, whose signal ends it, so that it outlives its
parent by at most that. Its address space is limited; the parent's, which may have torch, is not. It
is a new process, started in 0.1 s, as a fork would copy locks of the parent's threads.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any
from weakref import finalize

SECONDS = 10.0  # of a processor, for a request
MAX_BYTES = 512 << 20  # of the address space; Python and Jinja take 25 MiB
SERVE = f"from {__name__} import serve; serve()"
OUT_OF_MEMORY = 3  # an exit code


class OverLimit(Exception):
    """The error of a program that exceeded its time or memory, with the request."""

    hint = "does it loop too often, or repeat a text? read that file, and use another copy"


class Sandbox:
    """A process that runs one program, the result of `build(*arguments)`, a module-level function
    or class.

    `name` is the program's file, for errors. Arguments, requests and answers are JSON. Queued
    requests are sent together once all earlier answers were read, so that neither side blocks on
    the other's pipe, and the program computes while the caller does.
    """

    def __init__(self, name: str, build: Callable[..., Callable[[Any], Any]], *arguments: Any):
        """Starts the process. Raises ValueError where `build` does, and OverLimit."""
        self.name, self._seconds, self._bytes = name, SECONDS, MAX_BYTES
        self._queue: list[bytes] = []
        self._unanswered = 0  # requests that were sent
        # -P, as the current folder may be a stranger's; modules are those of this process
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE], env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        finalize(self, _end, self._process)
        self.ask([build.__module__, build.__name__, arguments, self._seconds, self._bytes])
        self.answer()

    def ask(self, request: Any) -> int:
        """Queues a request; returns its size in bytes. Raises ValueError where it is no JSON."""
        self._queue.append(_encoded(request))
        return len(self._queue[-1])

    def answer(self) -> Any:
        """Returns the answer to the oldest open request. Raises ValueError where the program does,
        and OverLimit, which ends the process."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests and answers, "both are pipes"
        line = b""
        with suppress(BrokenPipeError):
            if not self._unanswered:
                requests.write(b"[" + b",".join(self._queue) + b"]\n")
                requests.flush()
                self._unanswered = len(self._queue)
                self._queue.clear()
            line = answers.readline()
        if not line.endswith(b"\n"):
            raise OverLimit(f"{self.name} {self._reason()}")
        self._unanswered -= 1
        done, answer = _decoded(line)
        if not done:
            raise ValueError(answer)
        return answer

    def _reason(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"takes over {self._seconds:g} s of processor time"
        if code == OUT_OF_MEMORY:
            return f"takes over {self._bytes >> 20} MiB of memory"
        return f"ends the process that runs it, with exit code {code}"


def serve() -> None:
    """Answers requests until stdin ends: the main function of a Sandbox's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        _serve()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _serve() -> None:
    import resource  # not above: it is for POSIX systems alone

    seconds = SECONDS
    work: Callable[[Any], Any]

    def start(request: Any) -> None:
        nonlocal work, seconds
        module, name, arguments, seconds, most = request
        # macOS limits no address space; a lower limit of the user's stays
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        work = getattr(import_module(module), name)(*arguments)

    work = start
    for line in sys.stdin.buffer:
        for request in _decoded(line):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                answer = _encoded((True, work(request)))
            except ValueError as error:
                answer = _encoded((False, str(error)))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()


def _encoded(value: Any) -> bytes:
    """JSON in UTF-8, with lone surrogates as they are: JSON's escapes would join two of them."""
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _decoded(line: bytes) -> Any:
    return json.loads(line.decode("utf-8", "surrogatepass"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:
        pass  # closes its pipes, and waits for it
