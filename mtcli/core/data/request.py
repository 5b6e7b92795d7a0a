"""What the user asks of preprocess, and whether it was done before."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import every, wrong
from mtcli.core.data.indexed import describe, with_suffix
from mtcli.core.data.sources import (
    BLOCK_BYTES,
    STDIN,
    FileKind,
    SourceFile,
    SourceList,
    find_sources,
)
from mtcli.core.data.tokenize import require_trainable
from mtcli.core.data.workspace import FINAL

TRAIN = "train:"  # of a tokenizer: a new one, of as many ids as follow


class PreprocessRequest(NamedTuple):
    """What the user asks of preprocess; the flags of the command, by their names."""

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

    @property
    def from_stdin(self) -> bool:
        """Whether the corpus comes once, from standard input."""
        return STDIN in self.inputs

    @property
    def train_size(self) -> int | None:
        """The vocabulary of the tokenizer to train (`train:N`), or None to load one."""
        if not self.tokenizer.startswith(TRAIN):
            return None
        size = self.tokenizer.removeprefix(TRAIN)
        if not size.isdecimal():
            raise wrong(f"tokenizer {self.tokenizer} is not train: and a number", "train:8192")
        return int(size)


def named_sources(request: PreprocessRequest) -> SourceList:
    """The files to read; none for standard input. Raises MtcliError for all that cannot be."""
    checks = (_require_workers, _require_train_size, _require_output)
    found, *_ = every(partial(_sources, request), *(partial(check, request) for check in checks))
    return found


def _sources(request: PreprocessRequest) -> SourceList:
    if not request.inputs:
        raise wrong("no input", "give files, folders, globs, - or stdlib")
    if not request.from_stdin:
        return find_sources(request.inputs, request.format)
    if len(request.inputs) > 1:
        raise wrong(
            f"standard input and {len(request.inputs) - 1} more inputs cannot be mixed",
            "give - alone, or files alone",
        )
    if request.resume or request.tokenizer.startswith(TRAIN):
        what = "--resume" if request.resume else request.tokenizer
        raise wrong(f"{what} reads the input twice, and standard input comes once", "give a file")
    if request.format == "parquet":
        raise wrong("standard input cannot be Parquet, which is read from its end", "give a file")
    if sys.stdin is None:
        raise wrong("standard input is closed", "pipe the text in, or give files")
    return SourceList([], {})


def _require_workers(request: PreprocessRequest) -> None:
    if request.workers < 1:
        raise wrong(f"{request.workers} workers cannot do anything", "give at least 1", "--workers")


def _require_train_size(request: PreprocessRequest) -> None:
    if (size := request.train_size) is not None:
        require_trainable(size)


def _require_output(request: PreprocessRequest) -> None:
    if not request.output.name:
        hint = "data/code writes data/code.bin and its kin"
        raise wrong(f"'{request.output}' names no file", hint, "--output")
    if request.output.suffix in FINAL:
        message = f"{request.output} would be written as {request.output}.bin and its kin"
        prefix = request.output.with_suffix("")
        raise wrong(message, f"name the prefix, --output {prefix}", "--output")


def fingerprint(request: PreprocessRequest, sources: Sequence[SourceFile]) -> str:
    """Names a run: equal for two requests that must write the same bytes."""
    files = [(source.path, source.size, os.stat(source.path).st_mtime_ns) for source in sources]
    # What a run may be resumed with after it has met a bad document is not one of them.
    options = (request.tokenizer, request.text_key, request.split_on_blank, request.append_eod)
    options += (request.format,)
    text = json.dumps([files, options, BLOCK_BYTES])
    return hashlib.sha256(text.encode()).hexdigest()


def done_before(request: PreprocessRequest, name: str) -> dict[str, object] | None:
    """What an earlier run says of the outputs where `--resume` finds them complete, else None.

    Raises MtcliError where outputs are in the way.
    """
    try:
        made = _existing(request.output, FINAL)
    except OSError as error:  # of a name that is too long
        why = f"it cannot be written: {error.strerror}"
        raise wrong(why, "another --output", "--output") from None
    if not made or request.force:
        return None
    if request.resume and with_suffix(request.output, ".idx") in made:
        facts = describe(request.output) or {}
        if facts.get("fingerprint") == name:
            return facts
        raise wrong(
            f"{request.output} was made from other inputs or options",
            "--force to replace it, or another --output",
        )
    if request.resume and with_suffix(request.output, ".partial").is_dir():
        return None
    names = ", ".join(map(str, made))
    raise wrong(f"{len(made)} outputs exist: {names}", "--force to replace them")


def _existing(prefix: Path, suffixes: Iterable[str]) -> list[Path]:
    return [path for suffix in suffixes if (path := with_suffix(prefix, suffix)).exists()]
