"""What one worker does: a block of text in, a file of tokens and a file of lengths out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.data.corpus import Block, Piece
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
from mtcli.core.spec.errors import MtcliError, failed, wrong

GROUP_BYTES = 1 << 20  # text encoded and written together
TOLD_BYTES = 1 << 20  # of the source, after which its reading is told of
EXAMPLES = 10  # of skipped documents whose lines are named


@dataclass
class Counts:
    """What was read and written; `skipped` by kind of fault."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty_documents: int = 0
    eod_in_text: int = 0  # end-of-document ids that came from the text itself
    max_token_id: int = -1
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # the first skipped: file, line, why

    def add(self, other: "Counts") -> None:
        """Count `other` too."""
        for name in ("documents", "tokens", "text_bytes", "empty_documents", "eod_in_text"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        for kind, count in other.skipped.items():
            self.skip(kind, count)

    def skip(self, kind: str, count: int = 1) -> None:
        """Count documents that were left out for a fault of this kind."""
        self.skipped[kind] = self.skipped.get(kind, 0) + count


class Job(NamedTuple):
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

    counts: Counts
    skipped: list[tuple[Piece, Bad]]


def encode_block(job: Job, block: Block, tell: Tell) -> Encoded:
    """Write the block's tokens and lengths to `job.part(block.number)`; what they hold.

    `tell` is told of the block's bytes on disk as they are read, TOLD_BYTES at a time. Raises
    MtcliError with file and line for the first bad document, unless `job.skip_bad`.
    """
    done, carried = Encoded(Counts(), []), 0
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


def _documents(job: Job, block: Block, done: Encoded, tell: Tell) -> Iterator[Text]:
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


def _bad_document(piece: Piece, bad: Bad) -> MtcliError:
    hint = "mend it, or leave such documents out with --skip-bad"
    if bad.kind == TOO_LARGE:
        hint = "raise --max-document-bytes, or leave such documents out with --skip-bad"
    return wrong(described(piece, bad), hint)


def described(piece: Piece, bad: Bad) -> str:
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
    job: Job, group: list[Text], carried: int, counts: Counts
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
