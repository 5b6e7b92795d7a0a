"""A contender in a process of its own, and the turns that it is given.

A child builds its contender, says how its first losses are, and waits. For each turn it trains some
steps, gives the memory back that it holds for activations, and waits again, so that two contenders
take turns on one device. An end for want of memory ends the child alone.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter
from typing import IO, Any

LONGEST = 240.0  # seconds that an answer may take: compiling a model, or a turn
WARMUP = 3  # steps before the first turn: compiling, and the allocator's first blocks
BATCHES = 8  # different ones, in turn
Answer = dict[str, Any]


class Child:
    """The parent's end: a process that answers each line with one. Every answer is a table."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # compilers that it starts end with it
            env=os.environ | (environment or {}),
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def hear(self, deadline: float) -> Answer:
        """Its next answer; {"failed": why} where it ends first, or the deadline (monotonic)."""
        left = deadline - monotonic()
        try:
            line = self.lines.get(timeout=max(0.1, min(left, LONGEST)))
        except queue.Empty:
            self.end()
            if left > LONGEST:
                return {"failed": f"no answer within {LONGEST:.0f} s"}
            return {"failed": "the time was up", "late": True}
        if line:
            answer: Answer = json.loads(line)
            return answer
        code = self.process.wait()
        return {"failed": f"ended with {code}: {self._last_words()}"}

    def ask(self, deadline: float, **question: Any) -> Answer:
        """Asks, and hears."""
        assert self.process.stdin is not None, "made with a pipe"
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self.hear(deadline)

    def end(self) -> None:
        """Ends it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _read(self) -> None:
        assert self.process.stdout is not None, "made with a pipe"
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _last_words(self) -> str:
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()]
        return " / ".join(said[-3:])[-600:]


def serve(build: Callable[[Any], Any], config: Any, device: Any) -> None:
    """The child's end: builds, answers, and trains a turn for every line until there is none."""
    say = answers()
    try:
        contender, rows = build(device), batches(config, device)
        say(_prepared(contender, rows, device))
        for line in sys.stdin:
            question = json.loads(line)
            if "phases" in question:
                say({"phases": contender.phases(rows[0]) if contender.phases else None})
            else:
                say(_turn(contender, rows, question["turn"], device))
    except RuntimeError as error:  # cuBLAS and the driver have kinds of their own
        words = str(error).splitlines()[0]
        if not any(sign in words for sign in ("out of memory", "ALLOC_FAILED")):
            raise
        say({"failed": words, "memory": True})


def batches(config: Any, device: Any) -> list[Any]:
    """BATCHES different ones [b, s + 1] of words that are as frequent as words are (Zipf)."""
    import torch

    shape = (BATCHES, config.batch.global_batch_size, config.batch.seq_len + 1)
    generator = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1, config.model.vocab_size + 1).double()
    count = shape[0] * shape[1] * shape[2]
    words = torch.multinomial(shares, count, replacement=True, generator=generator)
    return list(words.view(shape).to(device))


def _prepared(contender: Any, rows: list[Any], device: Any) -> Answer:
    import torch

    begin = perf_counter()
    first = contender.losses(rows[0]).double().tolist()
    facts = dict(contender.facts)
    try:
        losses = [float(contender.train(rows[0]))]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # torch.compile ends in a dozen ways; the model may run without
        if contender.without_compile is None:
            raise
        contender.without_compile()
        facts |= {"compiled": False, "compiling failed": f"{type(error).__name__}: {error}"[:300]}
        losses = [float(contender.train(rows[0]))]
    seconds = perf_counter() - begin
    losses += [float(contender.train(rows[i % BATCHES])) for i in range(1, WARMUP)]
    contender.trained = WARMUP
    _give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return {"first": first, "losses": losses, "first_step": seconds, "facts": facts}


def _turn(contender: Any, rows: list[Any], steps: int, device: Any) -> Answer:
    """One step to fill the allocator again, then the timed ones, then what they were."""
    kept = [_step(contender, rows)]
    _synchronize(device)
    begin = perf_counter()
    kept += [_step(contender, rows) for _ in range(steps)]
    _synchronize(device)
    seconds = (perf_counter() - begin) / steps
    peak = _peak(device)
    _give_back(device)
    return {"seconds": seconds, "losses": [float(x) for x in kept], "peak_bytes": peak}


def _step(contender: Any, rows: list[Any]) -> Any:
    loss = contender.train(rows[contender.trained % BATCHES])
    contender.trained += 1
    return loss


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: Any) -> int | None:
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _give_back(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def answers() -> Callable[[Answer], None]:
    """A function that writes answers. What libraries print goes to the log instead."""
    channel: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(answer: Answer) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    return write
