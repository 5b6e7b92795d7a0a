"""Text to tokens on all cores: the same bytes for any number of workers, and after any kill.

The corpus is cut into blocks; workers encode blocks into part files; this process appends the parts
in order. Memory holds a block per worker and a file buffer, whatever the corpus.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from tqdm import tqdm

from mtcli.core.config.errors import failed, wrong
from mtcli.core.data.documents import Reading, Tell, Text, read_documents
from mtcli.core.data.encoders import SAMPLE_BYTES, is_cuttable, make_encode
from mtcli.core.data.indexed import describe, token_dtype, with_suffix
from mtcli.core.data.request import PreprocessRequest, done_before, fingerprint, named_sources
from mtcli.core.data.sources import SourceFile, SourceList, TextBlock, cut, told
from mtcli.core.data.stdin import spool
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer, train_tokenizer
from mtcli.core.data.workspace import (
    EXAMPLES,
    FINAL,
    Encoded,
    EncodeJob,
    TextCounts,
    Workspace,
    described,
    encode_block,
)
from mtcli.core.runtime.data_pool import Pool

TRAIN_BYTES = 64 << 20  # of the corpus, evenly spread, that a new tokenizer is trained on

Say = Callable[[str], None]


def preprocess(request: PreprocessRequest, say: Say) -> dict[str, object]:
    """Write PREFIX.bin, .idx, .json and .tokenizer/; what they hold, and how long it took.

    `say` is told what will be done before it is. Raises MtcliError for input that is wrong (file
    and line), outputs that exist, an empty corpus, a full disk and a worker that died.
    """
    began = time.perf_counter()
    found = named_sources(request)
    name = fingerprint(request, found.sources)
    facts = done_before(request, name)
    if facts is None:
        facts = _in_workspace(request, found, name, say)
    else:
        say(f"{request.output} is complete: nothing to do")
    seconds = time.perf_counter() - began
    if type(facts.get("tokens")) is not int:
        raise wrong(f"{request.output}.json does not say how many tokens there are", "--force")
    return {
        **facts,
        "workers": request.workers,
        "seconds": seconds,
        "tokens_per_second": facts["tokens"] / seconds,
        "outputs": [str(with_suffix(request.output, suffix)) for suffix in FINAL],
    }


def _in_workspace(
    request: PreprocessRequest, found: SourceList, name: str, say: Say
) -> dict[str, object]:
    """The facts of a run that leaves its workspace only where it can be resumed."""
    try:
        request.output.parent.mkdir(parents=True, exist_ok=True)
        space = Workspace(request.output, name, request.resume)
    except OSError as error:
        raise wrong(f"{request.output} cannot be written: {error}", "another --output") from None
    finished = False
    try:
        facts = _run(request, found, space, say)
        finished = True
    except OSError as error:
        raise failed(f"{space.folder}: {error}", "free space, then --resume") from None
    finally:
        if not finished:
            space.leave(resumable=not request.from_stdin)
    return facts


def _run(
    request: PreprocessRequest, found: SourceList, space: Workspace, say: Say
) -> dict[str, object]:
    sources = found.sources
    if space.is_finished:
        space.publish()
        return describe(request.output) or {}
    parts = space.folder / "parts"
    parts.mkdir(exist_ok=True)
    corpus: Iterable[SourceFile] = sources
    if request.from_stdin:
        folder = _made(space.folder / "spool")
        corpus = spool(sys.stdin.buffer, request.format, request.split_on_blank, folder)
    first = list(islice(iter(corpus), 1))
    rest = corpus if request.from_stdin else corpus[1:]
    tokenizer = _tokenizer(request, sources, space)
    job, encoder = _job(request, tokenizer, first, parts)
    size = sum(source.size for source in sources)
    say(_plan(request, len(sources), size, tokenizer, encoder))
    if found.left_out:
        say(f"left out of folders: {told(found.left_out)}; name such files, or all with --format")
    if request.train_size is not None and tokenizer.vocab_size < request.train_size:
        say(f"warning: {_few_ids(request, tokenizer)}")
    if space.resumed_at:
        say(f"going on after {space.counts.documents:,} documents")
    blocks = islice(cut(chain(first, rest), request.split_on_blank), space.resumed_at, None)
    _encode_all(request, job, blocks, space, size)
    skipped = sum(space.counts.skipped.values())
    for example in space.counts.examples:
        say(f"skipped {example}")
    if more := skipped - len(space.counts.examples):
        say(f"skipped {more:,} more")
    if space.counts.documents == 0:
        raise wrong(
            f"no document in {', '.join(request.inputs)}: {skipped} bad ones were left out and "
            f"{space.counts.empty_documents} hold no text",
            "is this the right input, and the right --text-key?",
        )
    facts = _facts(request, tokenizer, job, space.counts, fingerprint(request, sources))
    facts |= {"left_out": found.left_out}
    return space.finish(facts, job.dtype)


def _encode_all(
    request: PreprocessRequest,
    job: EncodeJob,
    blocks: Iterator[TextBlock],
    space: Workspace,
    size: int,
) -> None:
    """Encode `blocks` on all workers and append them in order, with a line of progress."""
    issued: deque[TextBlock] = deque()

    def remembered() -> Iterator[TextBlock]:
        for block in blocks:
            issued.append(block)
            yield block

    # A worker gets the job once; processes start before the progress bar starts its thread.
    with (
        Pool(_Encode(job), request.workers) as pool,
        tqdm(total=size or None, unit="B", unit_scale=True, file=sys.stderr) as bar,
    ):
        began, before = time.perf_counter(), space.counts.tokens
        for encoded in pool.map(remembered(), bar.update):
            block = issued.popleft()
            room = EXAMPLES - len(space.counts.examples)
            space.counts.examples += [described(*bad) for bad in encoded.skipped[:room]]
            space.append(*job.part(block.number), encoded.counts)
            if request.from_stdin:
                _remove_read(block)
            speed = (space.counts.tokens - before) / (time.perf_counter() - began)
            bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)


class _Encode:
    """`encode_block` of one job: a class, so that it can be sent to a spawned worker."""

    def __init__(self, job: EncodeJob) -> None:
        self.job = job

    def __call__(self, block: TextBlock, tell: Tell) -> Encoded:
        return encode_block(self.job, block, tell)


def _remove_read(block: TextBlock) -> None:
    for piece in block.pieces:
        if piece.stop == piece.source.size:
            Path(piece.source.path).unlink()


def _tokenizer(
    request: PreprocessRequest, sources: list[SourceFile], space: Workspace
) -> Tokenizer:
    """Loaded, or trained; a resumed run takes the one it began with."""
    folder = space.folder / "tokenizer"
    if space.resumed_at:
        return load_tokenizer(folder)
    if request.train_size is None:
        tokenizer = load_tokenizer(request.tokenizer)
    else:
        tokenizer = train_tokenizer(_spread(request, sources), request.train_size)
    tokenizer.save(folder)
    return tokenizer


def _spread(request: PreprocessRequest, sources: list[SourceFile]) -> Iterator[str]:
    """At most TRAIN_BYTES of the corpus: every k-th block, and of these what can be read."""
    every = -(-sum(source.size for source in sources) // TRAIN_BYTES)
    reading = _reading(request, cuttable=True)
    left = TRAIN_BYTES
    for block in cut(sources, request.split_on_blank):
        pieces = block.pieces if block.number % max(every, 1) == 0 else ()
        for item in chain.from_iterable(read_documents(piece, reading) for piece in pieces):
            if left > 0 and isinstance(item, Text):
                left -= item.size
                yield item.text


def _job(
    request: PreprocessRequest, tokenizer: Tokenizer, first: list[SourceFile], parts: Path
) -> tuple[EncodeJob, str]:
    """What workers do, with the encoder that is proven on the corpus's beginning; its name."""
    append = tokenizer.eod_id is not None if request.append_eod is None else request.append_eod
    if append and tokenizer.eod_id is None:
        raise wrong(
            f"tokenizer {request.tokenizer} has no end-of-document token to append",
            "--no-append-eod",
        )
    reading = _reading(request, is_cuttable(tokenizer))
    encoder, encode = make_encode(tokenizer, _sample(first, reading))
    dtype = token_dtype(tokenizer.vocab_size)
    return EncodeJob(
        encode, reading, dtype, tokenizer.eod_id, append, request.skip_bad, parts
    ), encoder


def _reading(request: PreprocessRequest, cuttable: bool) -> Reading:
    return Reading(request.text_key, request.split_on_blank, cuttable, request.max_document_bytes)


def _few_ids(request: PreprocessRequest, tokenizer: Tokenizer) -> str:
    return (
        f"{request.tokenizer} asked for {request.train_size:,} ids, and the corpus fills "
        f"{tokenizer.vocab_size:,}: a larger one has more pairs to merge"
    )


def _sample(first: list[SourceFile], reading: Reading) -> str:
    """The corpus's first readable text, of about SAMPLE_BYTES."""
    text = ""
    for block in islice(cut(first, reading.blank), 1):
        for item in read_documents(block.pieces[0], reading):
            if len(text) >= SAMPLE_BYTES:
                break
            if isinstance(item, Text):
                text += item.text[:SAMPLE_BYTES]
    return text


def _plan(
    request: PreprocessRequest, files: int, size: int, tokenizer: Tokenizer, encoder: str
) -> str:
    what = "standard input" if request.from_stdin else f"{files:,} files of {size / 1e6:,.1f} MB"
    bits = 8 * token_dtype(tokenizer.vocab_size).itemsize
    return (
        f"{what} -> {request.output}.bin in tokens of {bits} bits; tokenizer {request.tokenizer} "
        f"of {tokenizer.vocab_size:,} ids by {encoder}; {request.workers} workers"
    )


def _facts(
    request: PreprocessRequest, tokenizer: Tokenizer, job: EncodeJob, counts: TextCounts, name: str
) -> dict[str, object]:
    """What PREFIX.json says, but for the hashes."""
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "text_bytes": counts.text_bytes,
        "empty_documents": counts.empty_documents,
        "skipped": dict(sorted(counts.skipped.items())),
        "skipped_first": counts.examples,
        "eod_in_text": counts.eod_in_text,
        "max_token_id": counts.max_token_id,
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
        "fingerprint": name,
    }


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
