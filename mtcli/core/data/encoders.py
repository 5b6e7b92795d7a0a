"""Encodes text as token arrays in preprocess workers.

A worker writes a block of the corpus as a file of tokens and a file of sequence lengths. Sequences
are documents, or sentences; for sentences a third file has each document's number of sentences.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.data.documents import (
    DAMAGED,
    TOO_LARGE,
    Bad,
    Reading,
    Text,
    count_lines,
    read_documents,
)
from mtcli.core.data.sentences import split_sentences
from mtcli.core.data.sources import FileRange, TextBlock
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.data.tokenizer_limits import no_panics
from mtcli.core.runtime.process_pool import Progress

SAMPLE_BYTES = 1 << 14  # of the corpus, encoded both ways before gigatoken is used
GROUP_BYTES = 1 << 20  # text encoded and written together
MEND = {TOO_LARGE: "raise --max-document-bytes", DAMAGED: "compress, write or copy it again"}
EXAMPLES = 10  # of skipped documents whose lines are named
# What fast tokenizers get wrong: space runs, contractions, digits, scripts, emoji, controls.
HARD_TEXTS = (
    "I'll don't WE'VE it's 's 'S 12345 1,234.5 3\u00bd\n\n\n  x \t y  \r\n\r\n z \u00a0\u2003w",
    "na\u00efve \u00dcn\u00efcode \ufb01 \u2460\u2461 \u2167 e\u0301 \u200b\ufeff\x00\x1f \ud55c",
    "\u4e2d\u6587\u5b57\uff0c\u65e5\u672c\u8a9e \u0627\u0644\u0639\u0631 \u0939\u093f\u0928\u094d",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U00010348\U0001d4d0",
    '    def f(x):\n\t\treturn x**2  # ==> {"a": [1, 2]} <|x|> http://a.b/c?d=e_f&g \\ ---- ____',
    "",
    " ",
    "\n \n",
)

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def make_encode(tokenizer: Tokenizer, sample: str) -> tuple[str, Encode]:
    """Chooses the fastest encoder with the ids of `tokenizers`; returns its name and function.

    gigatoken (Rust, optional) is 30 to 60 times as fast. It is used only after it gave the same ids
    for `sample` and for texts that are hard to split.
    """
    if tokenizer.is_bytes:
        return "bytes", _encode_bytes
    added = (token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
    specials = (f"a{text} b {text}\n" for text in added)
    texts = [sample[:SAMPLE_BYTES], *HARD_TEXTS, *specials]
    # It is an optional extra, may not know the tokenizer, and either may fail on a text.
    with suppress(ModuleNotFoundError, MtcliError):
        fast = _Gigatoken(tokenizer.definition)
        pairs = zip(fast(texts), tokenizer.encode_all(texts), strict=True)
        if all(np.array_equal(one, other) for one, other in pairs):
            return "gigatoken", fast
    return "tokenizers", partial(_encode_all, tokenizer)


def is_cuttable(tokenizer: Tokenizer) -> bool:
    """Says whether long texts may be encoded in parts (`documents._safe_cut`) with the same ids."""
    if tokenizer.is_bytes:
        return True
    backend = tokenizer.backend
    if backend.normalizer is not None or backend.pre_tokenizer is None:
        return False
    words = json.loads(backend.pre_tokenizer.__getstate__())
    return (
        words["type"] == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space")
        and not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes by `tokenizers` in this process alone, as preprocess has a process per core."""
    return [np.array(ids, np.int64) for ids in tokenizer.encode_all(texts)]


class _Gigatoken:
    """The gigatoken encoder, one text at a time: its batches cost an import of 0.3 s and are no
    faster."""

    def __init__(self, definition: str) -> None:
        from gigatoken import Tokenizer as Fast

        self.definition = definition
        with no_panics("gigatoken does not know the tokenizer"):
            self.backend = Fast.from_json(definition).backend

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        with no_panics("the tokenizer fails on a text"):
            return [self.backend.encode(text) for text in texts]

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return _Gigatoken, (self.definition,)


SUMMED = ("documents", "tokens", "text_bytes", "empty_documents", "eod_in_text", "sentences")


@dataclass
class TextCounts:
    """Counts of documents read and tokens written; `skipped` counts by kind of fault."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty_documents: int = 0
    eod_in_text: int = 0  # end-of-document ids that came from the text itself
    max_token_id: int = -1
    sentences: int = 0  # of documents that are split
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # the first skipped: file, line, why

    def add(self, other: "TextCounts") -> None:
        """Adds `other`'s counts."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        for kind, count in other.skipped.items():
            self.skip(kind, count)

    def skip(self, kind: str, count: int = 1) -> None:
        """Counts skipped documents of a kind of fault."""
        self.skipped[kind] = self.skipped.get(kind, 0) + count


class EncodeJob(NamedTuple):
    """The job of every worker: how to read and encode, and where part files go."""

    encode: Encode
    reading: Reading
    dtype: np.dtype
    eod_id: int | None  # the tokenizer's
    append_eod: bool
    skip_bad: bool
    folder: Path
    sentences: bool = False  # each is a sequence of its document

    def part(self, block: int) -> tuple[Path, ...]:
        """Returns the part files of a block: tokens, sequence lengths (int32) and, for sentences,
        each document's number of sequences (int32)."""
        kinds = ("tokens", "lengths", "documents")[: 2 + self.sentences]
        return tuple(self.folder / f"{block}.{kind}" for kind in kinds)


def encode_block(
    job: EncodeJob, block: TextBlock, progress: Progress
) -> tuple[TextCounts, list[tuple[FileRange, Bad]]]:
    """Writes a block's tokens and lengths to `job.part(block.number)`; returns their counts, and
    the first skipped documents.

    Raises MtcliError with file and line for the first bad document, unless `job.skip_bad`.
    """
    counts = TextCounts()
    skipped: list[tuple[FileRange, Bad]] = []
    tokens_path, *size_paths = job.part(block.number)

    def readable() -> Iterator[Text]:
        for piece in block.pieces:
            for item in read_documents(piece, job.reading, progress):
                if isinstance(item, Text):
                    counts.text_bytes += item.size
                    yield item
                    continue
                if not job.skip_bad:
                    hint = f"{MEND.get(item.kind, 'mend the line')}, or --skip-bad leaves it out"
                    raise wrong(describe_bad(piece, item), hint)
                counts.skip(item.kind)
                if len(skipped) < EXAMPLES:
                    skipped.append((piece, item))

    documents = readable()
    try:
        with open(tokens_path, "wb") as tokens, ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in size_paths]
            for flat, *sizes in _encoded(job, documents, counts):
                tokens.write(flat.tobytes())
                for file, numbers in zip(files, sizes, strict=True):
                    file.write(np.array(numbers, np.int32).tobytes())
    except OSError as error:
        why = f"{tokens_path} cannot be written: {error}"
        raise failed(why, "free space, then --resume") from None
    return counts, skipped


def describe_bad(piece: FileRange, bad: Bad) -> str:
    """Words a bad document as "file:line: reason"; reads the file up to it to count lines."""
    source = piece.source
    name = source.name or source.path
    if not bad.line:
        return f"{name}: {bad.reason}"
    line = bad.line + source.first_line + count_lines(FileRange(source, 0, piece.start))
    return f"{name}:{line}: {bad.reason}"


def _group(documents: Iterator[Text]) -> list[Text]:
    """Takes the next documents of about GROUP_BYTES together; empty at the end."""
    group: list[Text] = []
    size = 0
    for text in documents:
        group.append(text)
        size += text.size
        if size >= GROUP_BYTES:
            break
    return group


def _encoded(
    job: EncodeJob, documents: Iterator[Text], counts: TextCounts
) -> Iterator[tuple[np.ndarray, *tuple[list[int], ...]]]:
    """Yields the tokens of one group of documents after another, with the numbers for the other
    files of `job.part`."""
    carried = 0
    while group := _group(documents):
        if job.sentences:
            yield _encode_sentences(job, group, counts)
        else:
            flat, ended, carried = _encode_group(job, group, carried, counts)
            yield flat, ended


def _encode_group(
    job: EncodeJob, group: list[Text], carried: int, counts: TextCounts
) -> tuple[np.ndarray, list[int], int]:
    """Encodes a group; returns its tokens, the lengths of documents that end in it, and the tokens
    so far of one that does not."""
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
    return _counted(job, parts, len(ended), counts), ended, carried


def _encode_sentences(
    job: EncodeJob, group: list[Text], counts: TextCounts
) -> tuple[np.ndarray, list[int], list[int]]:
    """Encodes a group; returns its tokens, the lengths of its sentences, and each document's number
    of them."""
    split = [split_sentences(text.text) for text in group]
    encoded = iter(job.encode([sentence for sentences in split for sentence in sentences]))
    end = [np.array([job.eod_id], job.dtype)] if job.append_eod else []
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    documents: list[int] = []
    for sentences in split:
        sentence_ids = [ids for _ in sentences if len(ids := next(encoded))]
        if not sentence_ids:
            counts.empty_documents += 1
            continue
        if end:
            sentence_ids[-1] = np.concatenate([sentence_ids[-1], *end])
        parts += sentence_ids
        lengths += map(len, sentence_ids)
        documents.append(len(sentence_ids))
    counts.sentences += len(lengths)
    return _counted(job, parts, len(documents), counts), lengths, documents


def _counted(
    job: EncodeJob, parts: list[np.ndarray], documents: int, counts: TextCounts
) -> np.ndarray:
    """Joins a group's tokens, and counts them and the documents that end in it."""
    flat = np.concatenate([np.empty(0, job.dtype), *parts], dtype=job.dtype, casting="unsafe")
    if job.eod_id is not None:
        appended = documents * job.append_eod
        counts.eod_in_text += int(np.count_nonzero(flat == job.eod_id)) - appended
    counts.documents += documents
    counts.tokens += len(flat)
    if len(flat):
        counts.max_token_id = max(counts.max_token_id, int(flat.max()))
    return flat
