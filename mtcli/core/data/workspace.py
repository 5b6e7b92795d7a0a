"""The folder a run writes in, so that a killed one goes on and nothing half-written has a name.

`PREFIX.partial/` holds the tokens so far, their lengths spilled as int32, and a journal whose every
line says how much of both is whole. The final names appear only when all is written and synced.

What one worker does: a block of text in, a file of tokens and a file of lengths out.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.config.section import Count
from mtcli.core.config.untrusted import append_untrusted, open_untrusted, parse_json, read_untrusted
from mtcli.core.data.documents import (
    TOO_LARGE,
    Bad,
    Reading,
    Tell,
    Text,
    lines_before,
    read_documents,
)
from mtcli.core.data.encoders import Encode
from mtcli.core.data.indexed import with_suffix, write_index
from mtcli.core.data.sources import FileRange, TextBlock
from mtcli.core.runtime.atomic_writes import sync_folder

READY = ("tokenizer", "tokens.bin", "facts.json", "index.idx")  # in the order of FINAL
COMMIT_SECONDS = 1.0  # at most this much work is done again after a crash of the machine
COPY_BYTES = 4 << 20
FINAL = (".tokenizer", ".bin", ".json", ".idx")  # the index last: it says that the rest is there


@dataclass
class TextCounts:
    """What was read and written; `skipped` by kind of fault."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty_documents: int = 0
    eod_in_text: int = 0  # end-of-document ids that came from the text itself
    max_token_id: int = -1
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # the first skipped: file, line, why

    def add(self, other: "TextCounts") -> None:
        """Count `other` too."""
        for name in ("documents", "tokens", "text_bytes", "empty_documents", "eod_in_text"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        for kind, count in other.skipped.items():
            self.skip(kind, count)

    def skip(self, kind: str, count: int = 1) -> None:
        """Count documents that were left out for a fault of this kind."""
        self.skipped[kind] = self.skipped.get(kind, 0) + count


class EncodeJob(NamedTuple):
    """What every worker knows: how to read, how to encode, and where parts go."""

    encode: Encode
    reading: Reading
    dtype: np.dtype
    eod_id: int | None  # the tokenizer's
    append_eod: bool
    skip_bad: bool
    folder: Path

    def part(self, block: int) -> tuple[Path, Path]:
        """The files of a block's tokens and of its documents' lengths (int32)."""
        return self.folder / f"{block}.tokens", self.folder / f"{block}.lengths"


class Encoded(NamedTuple):
    """A block that was encoded: what its part files hold, and the first that were skipped."""

    counts: TextCounts
    skipped: list[tuple[FileRange, Bad]]


def encode_block(job: EncodeJob, block: TextBlock, tell: Tell) -> Encoded:
    """Write the block's tokens and lengths to `job.part(block.number)`; what they hold.

    `tell` is told of the block's bytes on disk as they are read, TOLD_BYTES at a time. Raises
    MtcliError with file and line for the first bad document, unless `job.skip_bad`.
    """
    done, carried = Encoded(TextCounts(), []), 0
    counts = done.counts
    tokens_path, lengths_path = job.part(block.number)
    documents = _documents(job, block, done, tell)
    try:
        with open(tokens_path, "wb") as tokens, open(lengths_path, "wb") as lengths:
            while group := _group(documents):
                flat, ended, carried = _encode_group(job, group, carried, counts)
                tokens.write(flat.tobytes())
                lengths.write(np.array(ended, np.int32).tobytes())
    except OSError as error:
        raise failed(
            f"{tokens_path} cannot be written: {error}", "free space, then --resume"
        ) from None
    return done


def _documents(job: EncodeJob, block: TextBlock, done: Encoded, tell: Tell) -> Iterator[Text]:
    """The block's texts; what is bad is counted or raised."""
    untold = 0.0

    def read(count: float) -> None:
        nonlocal untold
        untold += count
        if untold >= TOLD_BYTES:
            tell(untold)
            untold = 0.0

    for piece in block.pieces:
        for item in read_documents(piece, job.reading, read):
            if isinstance(item, Text):
                done.counts.text_bytes += item.size
                yield item
            elif job.skip_bad:
                done.counts.skip(item.kind)
                if len(done.skipped) < EXAMPLES:
                    done.skipped.append((piece, item))
            else:
                raise _bad_document(piece, item)
    tell(untold)


def _bad_document(piece: FileRange, bad: Bad) -> MtcliError:
    hint = "mend it, or leave such documents out with --skip-bad"
    if bad.kind == TOO_LARGE:
        hint = "raise --max-document-bytes, or leave such documents out with --skip-bad"
    return wrong(described(piece, bad), hint)


def described(piece: FileRange, bad: Bad) -> str:
    """A bad document as "file:line: reason"; reads the file up to it, for its line."""
    source = piece.source
    line = bad.line + source.first_line + lines_before(source.path, piece.start)
    return f"{source.name or source.path}:{line}: {bad.reason}"


def _group(documents: Iterator[Text]) -> list[Text]:
    """The next documents of about GROUP_BYTES together; empty at the end."""
    group: list[Text] = []
    size = 0
    for text in documents:
        group.append(text)
        size += text.size
        if size >= GROUP_BYTES:
            break
    return group


def _encode_group(
    job: EncodeJob, group: list[Text], carried: int, counts: TextCounts
) -> tuple[np.ndarray, list[int], int]:
    """The group's tokens, the lengths of documents that end in it, and what one left open has."""
    parts: list[np.ndarray] = []
    ended: list[int] = []
    end = [np.array([job.eod_id], job.dtype)] if job.append_eod else []
    for text, ids in zip(group, job.encode([text.text for text in group]), strict=True):
        parts.append(ids)
        carried += len(ids)
        if not text.ends:
            continue
        if carried:
            parts += end
            ended.append(carried + len(end))
        else:
            counts.empty_documents += 1
        carried = 0
    flat = np.concatenate(parts, dtype=job.dtype, casting="unsafe")  # the vocabulary fits
    if job.eod_id is not None:
        appended = len(ended) * len(end)
        counts.eod_in_text += int(np.count_nonzero(flat == job.eod_id)) - appended
    counts.documents += len(ended)
    counts.tokens += len(flat)
    if len(flat):
        counts.max_token_id = max(counts.max_token_id, int(flat.max()))
    return flat, ended, carried


@dataclass
class _Kept:
    """What a line of the journal vouches for."""

    blocks: Count = 0
    token_bytes: Count = 0
    length_bytes: Count = 0
    counts: TextCounts = field(default_factory=TextCounts)


class Workspace:
    """The tokens of the first `blocks` blocks, and what they hold in `counts`."""

    def __init__(self, prefix: Path, fingerprint: str, resume: bool) -> None:
        """Open or begin. Raises MtcliError where another run writes here, or began otherwise."""
        self.prefix, self.folder = prefix, with_suffix(prefix, ".partial")
        self.blocks, self.counts = 0, TextCounts()
        self._hash, self._committed = hashlib.sha256(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        self._journal = self.folder / "journal.jsonl"
        kept = self._last_line(fingerprint) if resume else None
        if kept is None:
            self._begin(fingerprint)
        self._tokens, self._lengths = (
            append_untrusted(self.folder / name) for name in ("tokens.bin", "lengths.i32")
        )
        if kept is not None and not self.is_finished:
            self._take_up(kept)
        self.resumed_at = self.blocks

    def close(self) -> None:
        """Close the files; the folder stays for a later run."""
        for file in (self._tokens, self._lengths, self._lock):
            file.close()

    def leave(self, resumable: bool) -> None:
        """Close after a failure; the folder stays only where a later run can go on from it."""
        if not resumable or self.counts.documents == 0:
            self.remove()
            return
        if not self.is_finished:  # else the tokens have moved, and publishing is what is left
            with suppress(OSError):  # a full disk: the journal's last line still holds
                self.commit()
        self.close()

    def remove(self) -> None:
        """Close, and leave nothing."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def append(self, tokens: Path, lengths: Path, counts: TextCounts) -> None:
        """Add the next block from its part files, which are removed."""
        for part, whole, seen in (
            (tokens, self._tokens, self._hash),
            (lengths, self._lengths, None),
        ):
            with open_untrusted(part) as file:
                while data := file.read(COPY_BYTES):
                    whole.write(data)
                    if seen is not None:
                        seen.update(data)
            part.unlink()
        self.blocks += 1
        self.counts.add(counts)
        if time.monotonic() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make all that was appended safe, and say so in the journal."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        state = {
            "blocks": self.blocks,
            "token_bytes": self._tokens.tell(),
            "length_bytes": self._lengths.tell(),
            "counts": asdict(self.counts),
        }
        self._write_line(state)
        self._committed = time.monotonic()

    def finish(self, facts: dict[str, object], dtype: np.dtype) -> dict[str, object]:
        """Write index and facts, then give everything its final name; the facts with hashes."""
        self.commit()
        lengths_path = self.folder / "lengths.i32"
        index = self.folder / "index.idx"
        write_index(index, dtype, np.memmap(lengths_path, "<i4", "r"))
        facts = {**facts, "sha256": {"bin": self._hash.hexdigest(), "idx": _file_hash(index)}}
        with open(self.folder / "facts.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        ready = self.folder / "ready"
        ready.mkdir(exist_ok=True)
        for name in READY:
            (self.folder / name).replace(ready / name)
        self._write_line({"finished": True})
        self.publish()
        return facts

    def publish(self) -> None:
        """Move what is finished to its final names; does the rest of an interrupted publish too."""
        if (self.folder / "ready" / "tokens.bin").exists():  # never beside an older index
            with_suffix(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix, name in zip(FINAL, READY, strict=True):
            made, final = self.folder / "ready" / name, with_suffix(self.prefix, suffix)
            if made.exists():
                if final.is_dir():
                    shutil.rmtree(final)
                made.replace(final)
        self.remove()
        sync_folder(self.prefix.parent)

    @property
    def is_finished(self) -> bool:
        """Whether only the moves to the final names are left to do."""
        return self._lines()[-1:] == [{"finished": True}]

    def _begin(self, fingerprint: str) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        self._write_line({"fingerprint": fingerprint})

    def _last_line(self, fingerprint: str) -> "_Kept | None":
        lines = self._lines()
        if not lines:
            return None
        if lines[0] != {"fingerprint": fingerprint}:
            raise wrong(
                f"{self.folder} was begun with other inputs or options",
                "give the same ones, or leave --resume out to start over",
            )
        kept = next((line for line in reversed(lines) if "blocks" in line), {})
        try:
            return TypeAdapter(_Kept).validate_json(json.dumps(kept), strict=True)
        except ValidationError as error:
            raise self._damaged(error.errors()[0]["msg"]) from None

    def _take_up(self, kept: "_Kept") -> None:
        """Cut both files to what the journal vouches for, and count and hash that again."""
        self.blocks, self.counts = kept.blocks, kept.counts
        for file, size in (
            (self._tokens, kept.token_bytes),
            (self._lengths, kept.length_bytes),
        ):
            if file.tell() < size:
                raise failed(
                    f"{file.name} is {file.tell()} bytes, and its journal says {size}",
                    "leave --resume out to start over",
                )
            file.truncate(size)
            file.seek(size)
        with open_untrusted(self.folder / "tokens.bin") as tokens:
            while data := tokens.read(COPY_BYTES):
                self._hash.update(data)

    def _lines(self) -> list[dict[str, object]]:
        """The journal's whole lines; a last one that was cut by a crash does not count."""
        if not self._journal.exists():
            return []
        whole = read_untrusted(self._journal).split(b"\n")[:-1]
        try:
            lines = [parse_json(line) for line in whole]
        except ValueError as error:
            raise self._damaged(f"not JSON: {error}") from None
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged("a line is no object")
        return lines

    def _damaged(self, why: str) -> MtcliError:
        self._lock.close()
        return wrong(f"{self._journal} is damaged: {why}", "leave --resume out to start over")

    def _write_line(self, line: dict[str, object]) -> None:
        with append_untrusted(self._journal) as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _locked(self) -> object:
        lock = append_untrusted(self.folder / "lock")
        try:
            # lockf, not flock: workers forked later must not hold it when we are killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise wrong(f"another run is writing {self.prefix}", "wait for it, or end it") from None
        return lock


def _file_hash(path: Path) -> str:
    with open_untrusted(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


GROUP_BYTES = 1 << 20  # text encoded and written together
TOLD_BYTES = 1 << 20  # of the source, after which its reading is told of
EXAMPLES = 10  # of skipped documents whose lines are named
