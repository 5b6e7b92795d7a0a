"""Records every item's result, one JSON line each, and resumes an evaluation that was ended.

While tasks run, finished items are appended to FILE.partial, below a first line that identifies the
model. At the end FILE has all items in the order of tasks and numbers. A later run of the same
model reuses the items of FILE.partial, which are identified by their task and the hash of their
texts.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mtcli.core.config.errors import failed
from mtcli.core.config.untrusted import is_number, open_untrusted, parse_json
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.tasks.task import PreparedTask, Record
from mtcli.core.runtime.atomic_writes import aside, partial_name
from mtcli.core.runtime.work_folder import lock_output

Known = dict[str, dict[str, Record]]  # task -> hash -> line


class Journal:
    """The file of items of a run; `path` is None on every rank but the first."""

    def __init__(self, path: Path | None, model: str) -> None:
        """Locks FILE until `close`.

        `model` identifies weights, precision and tokenizer: lines of another model are not reused.
        Raises MtcliError where another evaluation has the file.
        """
        self.path, self.model = path, model
        self.lines: list[tuple[str, int, Record]] = []
        self.known, self._begun = Known(), False
        if path is not None:
            self._partial = partial_name(path)
            self._file = lock_output(self._partial, path)
            self.known = _read(self._file, model)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlocks FILE; FILE.partial stays for a later run where it has an item."""
        if self.path is None or self._file.closed:
            return
        with suppress(OSError):  # of a disk that is full, which `keep` has told
            self._file.flush()
        if not os.fstat(self._file.fileno()).st_size:
            self._partial.unlink(missing_ok=True)
        with suppress(OSError):
            self._file.close()

    def recorded(self, task: str, hashes: Sequence[str]) -> dict[int, Record]:
        """Returns by number the lines of items that an earlier run has finished."""
        records = self.known.get(task, {})
        return {number: records[name] for number, name in enumerate(hashes) if name in records}

    def scores(self, task: str, prepared: PreparedTask) -> dict[int, list[Score]]:
        """Returns by number the scores of items that an earlier run has finished."""
        starts = [0, *prepared.ends[:-1]]
        lines = self.recorded(task, prepared.hashes).items()
        finished = {number: _scores(line) for number, line in lines}
        return {
            number: scores
            for number, scores in finished.items()
            if len(scores) == prepared.ends[number] - starts[number]
        }

    def add(
        self,
        task: str,
        prepared: PreparedTask,
        number: int,
        scores: Sequence[Score],
        restored: bool = False,
    ) -> None:
        """Adds a finished item by its scores; see `keep`."""
        record = {"hash": prepared.hashes[number], **prepared.record(number, scores)}
        record["greedy"] = [score.is_greedy for score in scores]
        self.keep(task, number, record, restored)

    def keep(self, task: str, number: int, record: Record, restored: bool = False) -> None:
        """Adds the line of a finished item; `restored` where FILE.partial has it already.

        Raises MtcliError (exit 1) where it cannot be written.
        """
        record = {"task": task} | record
        self.lines.append((task, number, record))
        if self.path is None or restored:
            return
        try:
            if not self._begun:
                self._begin()
            self._file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise failed(f"{self._partial} cannot be written: {error.strerror}") from None

    def flush(self) -> None:
        """Flushes finished items to the system, so that they outlive this process."""
        if self.path is not None:
            self._file.flush()

    def finish(self, tasks: Sequence[str]) -> None:
        """Writes FILE in the order of tasks and items, if there are any, and removes
        FILE.partial."""
        if self.path is None or not self.lines:
            return
        order = {task: number for number, task in enumerate(tasks)}
        self.lines.sort(key=lambda line: (order[line[0]], line[1]))
        with aside(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for _, _, line in self.lines))
        self._partial.unlink(missing_ok=True)
        self.close()

    def _begin(self) -> None:
        """Opens FILE.partial to append; removes lines of another model."""
        if not self.known:
            self._file.truncate(0)
        head = json.dumps({"model": self.model}) + "\n" if not self.known else "\n"
        self._file.write(head.encode())  # the last line of a killed run may be half-written
        self._begun = True


def read_items(path: Path) -> list[Record]:
    """Reads a file of items. Raises OSError or ValueError where it cannot be read."""
    with open_untrusted(path) as file:
        return [parse_json(line) for line in file if line.strip()]


def _read(file: IO[bytes], model: str) -> Known:
    """Reads the lines of an ended run of this model, without a half-written last one."""
    records: Known = {}
    file.seek(0)
    if _parsed(file.readline()) != {"model": model}:
        return {}
    for line in file:
        record = _parsed(line)
        if isinstance(record.get("task"), str) and isinstance(record.get("hash"), str):
            records.setdefault(record["task"], {})[record["hash"]] = record
    return records


def _parsed(line: bytes) -> Record:
    try:
        record: Any = parse_json(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _scores(record: Record) -> list[Score]:
    sums, greedy = record.get("loglikelihoods"), record.get("greedy")
    if not isinstance(sums, list) or not isinstance(greedy, list) or len(sums) != len(greedy):
        return []
    if not all(map(is_number, sums)):
        return []
    return [Score(float(x), bool(flag)) for x, flag in zip(sums, greedy, strict=True)]
