"""Writes a run's output to a work folder, so that a killed run resumes and no file is half-written.

`PREFIX.partial/` holds the tokens so far, their lengths as int32 (and, for sentences, each
document's number of them), and a journal whose lines state how much of each file is complete. The
final names appear once everything is written and synced.
"""

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.config.fields import Count
from mtcli.core.config.untrusted import append_untrusted, open_untrusted, parse_json, read_untrusted
from mtcli.core.data.encoders import TextCounts
from mtcli.core.data.indexed import with_suffix, write_index
from mtcli.core.runtime.atomic_writes import sync_folder, write_text
from mtcli.core.runtime.work_folder import WorkFolder

READY = ("tokenizer", "tokens.bin", "facts.json", "index.idx")  # in the order of FINAL
SPILLED = ("tokens.bin", "lengths.i32", "documents.i32")
SIZES = ("token_bytes", "length_bytes", "document_bytes")  # of those, in the journal
COMMIT_SECONDS = 1.0  # at most this much work is done again after a crash of the machine
COPY_BYTES = 4 << 20
FINAL = (".tokenizer", ".bin", ".json", ".idx")  # the index last: it says that the rest is there


@dataclass
class Journaled:
    """The sizes of the output that a line of the journal guarantees."""

    blocks: Count = 0
    token_bytes: Count = 0
    length_bytes: Count = 0
    document_bytes: Count = 0
    counts: TextCounts = field(default_factory=TextCounts)


class Workspace:
    """The work folder with the tokens of the first `blocks` blocks, counted in `counts`."""

    def __init__(self, prefix: Path, fingerprint: str, resume: bool) -> None:
        """Opens the folder, and continues from its contents where the run is resumed.

        Raises MtcliError where another run writes here, or began with other options, or the folder
        is not ours.
        """
        self._work = WorkFolder(with_suffix(prefix, ".partial"), prefix)
        self.prefix, self.folder = prefix, self._work.path
        self.fingerprint = fingerprint
        self.blocks, self.counts = 0, TextCounts()
        self._hash, self._committed = hashlib.sha256(), time.monotonic()
        self._journal, self._files = self.folder / "journal.jsonl", list[IO[bytes]]()
        self._began = False
        try:
            journaled = self._last_line() if resume else None
            if journaled is not None and journaled.blocks:
                self._open(journaled)
        except MtcliError:
            self.close()
            raise
        self.resumed_at = self.blocks

    def begin(self) -> None:
        """Empties the folder for a new run."""
        self._work.clear()
        self._write_line({"fingerprint": self.fingerprint})
        self._open(Journaled())

    def close(self) -> None:
        """Closes the files; the folder stays for a later run."""
        for file in self._files:
            file.close()
        self._work.close()

    def leave(self, resumable: bool) -> None:
        """Closes after a failure. The folder stays only where a later run can resume it, and
        unchanged where this run has not begun."""
        if not self._began and self._journal.exists():
            self.close()
            return
        if not resumable or self.counts.documents == 0:
            self.remove()
            return
        if not self.is_finished:  # else the tokens have moved, and publishing is what is left
            with suppress(OSError):  # a full disk: the journal's last line still holds
                self.commit()
        self.close()

    def remove(self) -> None:
        """Closes, and removes the folder."""
        for file in self._files:
            file.close()
        self._work.remove()

    def subfolder(self, name: str) -> Path:
        """Creates an empty folder for files that do not outlive the run."""
        folder = self.folder / name
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def append(self, parts: tuple[Path, ...], counts: TextCounts) -> None:
        """Appends the next block's part files, then removes them: tokens, lengths and, for
        sentences, each document's number of them."""
        for part, output in zip(parts, self._files, strict=False):
            with open_untrusted(part) as file:
                while data := file.read(COPY_BYTES):
                    output.write(data)
                    if output is self._files[0]:
                        self._hash.update(data)
            part.unlink()
        self.blocks += 1
        self.counts.add(counts)
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Syncs everything appended so far, and records its size in the journal."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        sizes = zip(SIZES, (file.tell() for file in self._files), strict=True)
        self._write_line({"blocks": self.blocks, **dict(sizes), "counts": asdict(self.counts)})
        self._committed = time.monotonic()

    def finish(self, facts: dict[str, object], dtype: np.dtype) -> dict[str, object]:
        """Writes index and facts, then renames all; returns the facts with hashes."""
        self.commit()
        index = self.folder / "index.idx"
        lengths, documents = (self.folder / name for name in SPILLED[1:])
        sequences = np.memmap(documents, "<i4", "r") if documents.stat().st_size else None
        write_index(index, dtype, np.memmap(lengths, "<i4", "r"), sequences)
        with open_untrusted(index) as file:
            idx_hash = hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
        facts = {**facts, "sha256": {"bin": self._hash.hexdigest(), "idx": idx_hash}}
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        write_text(self.folder / "facts.json", text)
        ready = self.subfolder("ready")
        for name in READY:
            (self.folder / name).replace(ready / name)
        self._write_line({"finished": True})
        self.publish()
        return facts

    def publish(self) -> None:
        """Moves finished files to their final names; also completes an interrupted publish."""
        if (self.folder / "ready" / "tokens.bin").exists():  # never beside an older index
            with_suffix(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix, name in zip(FINAL, READY, strict=True):
            finished, final = self.folder / "ready" / name, with_suffix(self.prefix, suffix)
            if finished.exists():
                if final.is_dir():
                    shutil.rmtree(final)
                finished.replace(final)
        self.remove()
        sync_folder(self.prefix.parent)

    @property
    def is_finished(self) -> bool:
        """Says whether only the moves to the final names remain."""
        return self._began and self._lines()[-1:] == [{"finished": True}]

    def _last_line(self) -> Journaled | None:
        lines = self._lines()
        if not lines:
            return None
        if lines[0] != {"fingerprint": self.fingerprint}:
            message = f"{self.folder} was begun with other inputs or options"
            raise wrong(message, "give the same ones, or leave --resume out to start over")
        last = next((line for line in reversed(lines) if "blocks" in line), {})
        try:
            return TypeAdapter(Journaled).validate_json(json.dumps(last), strict=True)
        except ValidationError as error:
            raise self._damaged(error.errors()[0]["msg"]) from None

    def _open(self, journaled: Journaled) -> None:
        """Opens the output files, truncated to the sizes in the journal, and hashes the tokens."""
        self._files = [append_untrusted(self.folder / name) for name in SPILLED]
        self._began = True
        if self.is_finished:
            return
        self.blocks, self.counts = journaled.blocks, journaled.counts
        for file, name in zip(self._files, SIZES, strict=True):
            size = getattr(journaled, name)
            if file.tell() < size:
                message = f"{file.name} is {file.tell()} bytes, and its journal says {size}"
                raise failed(message, "leave --resume out to start over")
            file.truncate(size)
            file.seek(size)
        with open_untrusted(self.folder / "tokens.bin") as tokens:
            while data := tokens.read(COPY_BYTES):
                self._hash.update(data)

    def _lines(self) -> list[dict[str, object]]:
        """Reads the journal's complete lines, without a last one that a crash truncated."""
        if not self._journal.exists():
            return []
        complete = read_untrusted(self._journal).split(b"\n")[:-1]
        try:
            lines = [parse_json(line) for line in complete]
        except ValueError as error:
            raise self._damaged(f"not JSON: {error}") from None
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged("a line is no object")
        return lines

    def _damaged(self, why: str) -> MtcliError:
        return wrong(f"{self._journal} is damaged: {why}", "leave --resume out to start over")

    def _write_line(self, line: dict[str, object]) -> None:
        with append_untrusted(self._journal) as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
