"""Encodes text on all cores into the same bytes for any number of workers, and after any kill.

Workers encode blocks of the corpus into part files; this process appends the parts in order. Memory
holds a block per worker and a file buffer, whatever the size of the corpus.
"""

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.counts import counted
from mtcli.core.config.errors import collect_errors, failed, wrong
from mtcli.core.data.documents import Reading, Text, read_documents
from mtcli.core.data.encoders import (
    EXAMPLES,
    SAMPLE_BYTES,
    EncodeJob,
    TextCounts,
    describe_bad,
    encode_block,
    is_cuttable,
    make_encode,
)
from mtcli.core.data.indexed import describe, token_dtype, with_suffix
from mtcli.core.data.sources import (
    BLOCK_BYTES,
    STDIN,
    FileKind,
    SourceFile,
    SourceList,
    TextBlock,
    cut,
    find_sources,
    require_used,
    spool,
    told,
)
from mtcli.core.data.tokenize import (
    Tokenizer,
    load_tokenizer,
    require_trainable,
    train_tokenizer,
    train_word_pieces,
)
from mtcli.core.data.workspace import FINAL, Workspace
from mtcli.core.runtime.outputs import require_apart
from mtcli.core.runtime.process_pool import ProcessPool
from mtcli.core.runtime.progress import progress_bar

TRAIN = "train:"  # of a tokenizer: a new one, of as many ids as follow
TRAIN_BYTES = 64 << 20  # of the corpus, evenly spread, that a new tokenizer is trained on
KILLED = "signal 9 is most often the system short of memory: try fewer --workers, and --resume"

Say = Callable[[str], None]


class PreprocessRequest(NamedTuple):
    """The flags of `mtcli preprocess`, by name."""

    inputs: tuple[str, ...]
    output: Path
    tokenizer: str
    text_key: str = "text"
    split_on_blank: bool = False
    workers: int = 1
    append_eod: bool | None = None  # None: where the tokenizer has an end of document
    skip_bad: bool = False
    resume: bool = False
    force: bool = False
    format: FileKind | None = None  # None: as each file's ending says
    max_document_bytes: int | None = None  # None: see `documents.Reading`
    sentences: bool = False  # each is a sequence of its document

    @property
    def from_stdin(self) -> bool:
        """True where the corpus is read once, from standard input."""
        return STDIN in self.inputs

    @property
    def train_size(self) -> int | None:
        """The vocabulary size of the tokenizer to train (`train:N`); None to load one."""
        if not self.tokenizer.startswith(TRAIN):
            return None
        size = self.tokenizer.removeprefix(TRAIN)
        if not size.isdecimal():
            raise wrong(f"tokenizer {self.tokenizer} is not train: and a number", "train:8192")
        return int(size)

    def reading(self, cuttable: bool) -> Reading:
        """Returns the options of reading; `cuttable` says whether long texts may be encoded in
        parts."""
        return Reading(self.text_key, self.split_on_blank, cuttable, self.max_document_bytes)


def preprocess(request: PreprocessRequest, say: Say) -> dict[str, object]:
    """Writes PREFIX.bin, .idx, .json and .tokenizer/; returns their facts and the time taken.

    Announces each phase through `say`. Raises MtcliError for wrong input (with file and line),
    outputs that exist, an empty corpus, a full disk and a worker that died.
    """
    began = time.perf_counter()
    listing = _named_sources(request)
    name = fingerprint(request, listing.sources)
    facts = _done_before(request, name)
    if facts is None:
        facts = _in_workspace(request, listing, name, say)
    else:
        say(f"{request.output} is complete: nothing to do")
    seconds = time.perf_counter() - began
    tokens = facts.get("tokens")
    if type(tokens) is not int:
        raise wrong(f"{request.output}.json does not say how many tokens there are", "--force")
    return {
        **facts,
        "workers": request.workers,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "outputs": [str(with_suffix(request.output, suffix)) for suffix in FINAL],
    }


def _named_sources(request: PreprocessRequest) -> SourceList:
    """Finds the files to read; none for stdin. Raises MtcliError with all unreadable ones."""

    def require_workers() -> None:
        if request.workers < 1:
            message = f"{request.workers} workers cannot do anything"
            raise wrong(message, "give at least 1", "--workers")

    def require_train_size() -> None:
        if (size := request.train_size) is not None:
            require_trainable(size, pieces=request.sentences)

    checks = require_workers, require_train_size, partial(_require_output, request.output)
    listing: SourceList
    listing, *_ = collect_errors(partial(_sources, request), *checks)
    outputs = [with_suffix(request.output, suffix) for suffix in (*FINAL, ".partial")]
    inputs = (source.path for source in listing.sources)
    require_apart((*inputs, request.tokenizer), outputs, "--output")
    require_used(listing.sources, request.text_key, request.split_on_blank)
    return listing


def _sources(request: PreprocessRequest) -> SourceList:
    if not request.inputs:
        raise wrong("no input", "give files, folders, globs, - or stdlib")
    if not request.from_stdin:
        return find_sources(request.inputs, request.format)
    if len(request.inputs) > 1:
        message = f"standard input and {len(request.inputs) - 1} more inputs cannot be mixed"
        raise wrong(message, "give - alone, or files alone")
    if request.resume or request.tokenizer.startswith(TRAIN):
        what = "--resume" if request.resume else request.tokenizer
        raise wrong(f"{what} reads the input twice, and standard input comes once", "give a file")
    if request.format == "parquet":
        raise wrong("standard input cannot be Parquet, which is read from its end", "give a file")
    if sys.stdin is None:
        raise wrong("standard input is closed", "pipe the text in, or give files")
    return SourceList([], {})


def _require_output(output: Path) -> None:
    if not output.name:
        raise wrong(
            f"'{output}' names no file", "data/code writes data/code.bin and its kin", "--output"
        )
    if output.suffix in FINAL:
        message = f"{output} would be written as {output}.bin and its kin"
        raise wrong(message, f"name the prefix, --output {output.with_suffix('')}", "--output")


def fingerprint(request: PreprocessRequest, sources: Sequence[SourceFile]) -> str:
    """Hashes a run's inputs and options; equal for two requests that must write the same bytes."""
    files = [source.facts for source in sources]
    # What a run may be resumed with after it has met a bad document is not one of them.
    options: tuple[object, ...] = (request.tokenizer, request.text_key)
    options += (request.split_on_blank, request.append_eod)
    options += (request.format, *(["sentences"] if request.sentences else []))
    text = json.dumps([files, options, BLOCK_BYTES])
    return hashlib.sha256(text.encode()).hexdigest()


def _done_before(request: PreprocessRequest, name: str) -> dict[str, object] | None:
    """Reads the facts of an earlier run whose outputs `--resume` finds complete, else None.

    Raises MtcliError where outputs are in the way.
    """
    finals = [with_suffix(request.output, suffix) for suffix in FINAL]
    try:
        existing = [path for path in finals if path.exists()]
    except OSError as error:  # of a name that is too long
        why = f"it cannot be written: {error.strerror}"
        raise wrong(why, "another --output", "--output") from None
    if not existing or request.force:
        return None
    if request.resume and with_suffix(request.output, ".idx") in existing:
        facts = describe(request.output) or {}
        if facts.get("fingerprint") == name:
            return facts
        message = f"{request.output} was made from other inputs or options"
        raise wrong(message, "--force to replace it, or another --output")
    if request.resume and with_suffix(request.output, ".partial").is_dir():
        return None
    names = ", ".join(map(str, existing))
    raise wrong(f"{len(existing)} outputs exist: {names}", "--force to replace them")


def _in_workspace(
    request: PreprocessRequest, listing: SourceList, name: str, say: Say
) -> dict[str, object]:
    """Runs in a workspace, which stays only where the run can be resumed; returns the facts."""
    try:
        request.output.parent.mkdir(parents=True, exist_ok=True)
        space = Workspace(request.output, name, request.resume)
    except OSError as error:
        raise wrong(f"{request.output} cannot be written: {error}", "another --output") from None
    finished = False
    try:
        facts = _run(request, listing, space, say)
        finished = True
    except OSError as error:
        raise failed(f"{space.folder}: {error}", "free space, then --resume") from None
    finally:
        if not finished:
            space.leave(resumable=not request.from_stdin)
    return facts


def _run(
    request: PreprocessRequest, listing: SourceList, space: Workspace, say: Say
) -> dict[str, object]:
    if space.is_finished:
        space.publish()
        return describe(request.output) or {}
    tokenizer = _tokenizer(request, listing.sources, space)
    append_eod = _append_eod(request, tokenizer)
    if not space.resumed_at:  # what an ended run left is cleared once this one is accepted
        space.begin()
        tokenizer.save(space.folder / "tokenizer")
    corpus: Iterable[SourceFile] = listing.sources
    if request.from_stdin:
        folder = space.subfolder("spool")
        corpus = spool(sys.stdin.buffer, request.format, request.split_on_blank, folder)
    corpus = iter(corpus)
    first = list(islice(corpus, 1))
    job, encoder = _job(request, tokenizer, append_eod, first, space.subfolder("parts"))
    size = sum(source.size for source in listing.sources)
    files = f"{counted(len(listing.sources), 'file')} of {size / 1e6:,.1f} MB"
    say(
        f"{'standard input' if request.from_stdin else files} -> {request.output}.bin in tokens of "
        f"{8 * job.dtype.itemsize} bits; tokenizer {request.tokenizer} of "
        f"{tokenizer.vocab_size:,} ids by {encoder}; {counted(request.workers, 'worker')}"
    )
    if listing.left_out:
        say(f"left out of folders: {told(listing.left_out)}; name such files, or all with --format")
    if request.train_size is not None and tokenizer.vocab_size < request.train_size:
        say(
            f"warning: {request.tokenizer} asked for {request.train_size:,} ids, and the corpus "
            f"fills {tokenizer.vocab_size:,}: a larger one has more pairs to merge"
        )
    if space.resumed_at:
        say(f"going on after {space.counts.documents:,} documents")
    blocks = cut(chain(first, corpus), request.split_on_blank)
    _encode_all(request, job, islice(blocks, space.resumed_at, None), space, size)
    counts = space.counts
    skipped = sum(counts.skipped.values())
    for example in counts.examples:
        say(f"skipped {example}")
    if more := skipped - len(counts.examples):
        say(f"skipped {more:,} more")
    if counts.documents == 0:
        raise wrong(
            f"no document in {', '.join(request.inputs)}: {skipped} bad ones were left out and "
            f"{counts.empty_documents} hold no text",
            "is this the right input, and the right --text-key?",
        )
    facts = _facts(request, tokenizer, job, counts)
    facts |= {"fingerprint": space.fingerprint, "left_out": listing.left_out}
    return space.finish(facts, job.dtype)


def _tokenizer(
    request: PreprocessRequest, sources: list[SourceFile], space: Workspace
) -> Tokenizer:
    """Loads or trains the tokenizer; a resumed run uses the one it began with."""
    folder = space.folder / "tokenizer"
    if space.resumed_at:
        return load_tokenizer(folder)
    if request.train_size is None:
        return load_tokenizer(request.tokenizer)
    train = train_word_pieces if request.sentences else train_tokenizer
    return train(_spread(request, sources), request.train_size)


def _spread(request: PreprocessRequest, sources: list[SourceFile]) -> Iterator[str]:
    """Samples at most TRAIN_BYTES of the corpus: the readable documents of every k-th block."""
    stride = max(1, -(-sum(source.size for source in sources) // TRAIN_BYTES))
    left = TRAIN_BYTES
    for block in islice(cut(sources, request.split_on_blank), 0, None, stride):
        for piece in block.pieces:
            for item in read_documents(piece, request.reading(cuttable=True)):
                if left > 0 and isinstance(item, Text):
                    left -= item.size
                    yield item.text


def _append_eod(request: PreprocessRequest, tokenizer: Tokenizer) -> bool:
    """Says whether documents end with an end-of-document token. Raises MtcliError where the
    tokenizer has none."""
    append = request.append_eod
    if append is None:  # of sentences an encoder makes rows of its own
        append = tokenizer.eod_id is not None and not request.sentences
    if append and tokenizer.eod_id is None:
        message = f"tokenizer {request.tokenizer} has no end-of-document token to append"
        raise wrong(message, "--no-append-eod")
    return append


def _job(
    request: PreprocessRequest,
    tokenizer: Tokenizer,
    append_eod: bool,
    first: list[SourceFile],
    parts: Path,
) -> tuple[EncodeJob, str]:
    """Builds the workers' job, with the fastest encoder that is right on the corpus's beginning;
    returns it and the encoder's name."""
    reading = request.reading(is_cuttable(tokenizer) and not request.sentences)
    sample = ""
    for block in islice(cut(first, reading.blank), 1):
        for item in read_documents(block.pieces[0], reading):
            if len(sample) >= SAMPLE_BYTES:
                break
            if isinstance(item, Text):
                sample += item.text[:SAMPLE_BYTES]
    encoder, encode = make_encode(tokenizer, sample)
    dtype = token_dtype(tokenizer.vocab_size)
    options = (append_eod, request.skip_bad, parts, request.sentences)
    return EncodeJob(encode, reading, dtype, tokenizer.eod_id, *options), encoder


def _encode_all(
    request: PreprocessRequest,
    job: EncodeJob,
    blocks: Iterator[TextBlock],
    space: Workspace,
    size: int,
) -> None:
    """Encodes `blocks` on all workers and appends them in order, with a progress bar."""
    issued: deque[TextBlock] = deque()

    def remembered() -> Iterator[TextBlock]:
        for block in blocks:
            issued.append(block)
            yield block

    # A worker gets the job once; processes start before the progress bar starts its thread.
    with (
        ProcessPool(partial(encode_block, job), request.workers, KILLED) as pool,
        progress_bar("preprocess", size or None, "B") as bar,
    ):
        began, start_tokens = time.perf_counter(), space.counts.tokens
        for counts, skipped in pool.map(remembered(), bar.update):
            block = issued.popleft()
            room = EXAMPLES - len(space.counts.examples)
            space.counts.examples += [describe_bad(*bad) for bad in skipped[:room]]
            space.append(job.part(block.number), counts)
            for piece in block.pieces if request.from_stdin else ():
                if piece.stop == piece.source.size:  # the spooled file was read to its end
                    Path(piece.source.path).unlink()
            speed = (space.counts.tokens - start_tokens) / (time.perf_counter() - began)
            bar.set_postfix_str(f"tokens/s {speed:.0f}", refresh=False)


def _facts(
    request: PreprocessRequest, tokenizer: Tokenizer, job: EncodeJob, counts: TextCounts
) -> dict[str, object]:
    """Returns the facts of PREFIX.json: the tokens and how they were made."""
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "text_bytes": counts.text_bytes,
        "empty_documents": counts.empty_documents,
        "skipped": dict(sorted(counts.skipped.items())),
        "skipped_first": counts.examples,
        "eod_in_text": counts.eod_in_text,
        "max_token_id": counts.max_token_id,
        "sentences": counts.sentences if request.sentences else None,
        "dtype": job.dtype.name,
        "append_eod": job.append_eod,
        "inputs": list(request.inputs),
        "text_key": request.text_key,
        "split_on": "blank" if request.split_on_blank else None,
        "tokenizer": {
            "spec": request.tokenizer,
            "folder": with_suffix(request.output, ".tokenizer").name,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "eod_token": tokenizer.eod_token,
            "sha256": tokenizer.sha256,
        },
    }
