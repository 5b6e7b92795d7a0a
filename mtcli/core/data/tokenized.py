"""Tokenizes the text that data.train and data.valid name, once, into PATH.tokenized/ beside it.

A dataset there is named by a hash of the files (path, size, time), the tokenizer and the options,
so that a change of any of them makes another one. A config that names text is run with the prefix
of its dataset, which its run folder then states.
"""

import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os.path import exists
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from mtcli.core.config.blend import read_blend
from mtcli.core.config.counts import counted, duration
from mtcli.core.config.errors import MtcliError, collect_errors, wrong
from mtcli.core.config.nameable import CHAT_FILE, TOKENIZED
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import append_untrusted
from mtcli.core.data.documents import Text, read_documents
from mtcli.core.data.indexed import describe, pairs_in, with_suffix
from mtcli.core.data.preprocess import TRAIN, PreprocessRequest, fingerprint, preprocess
from mtcli.core.data.sources import SourceFile, cut, find_sources
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.runtime.atomic_writes import folder_of
from mtcli.core.runtime.launch import cores
from mtcli.core.runtime.work_folder import MARK, require_work_folder

NO_TEXT = (".bin", ".idx", ".json")
TEXT = b"mtcli keeps the tokens of the text beside this folder here\n"
CHATS = "conversations are read with --set data.format=conversations"
SAMPLE = 256 << 10  # characters that are encoded to estimate how long all take

Say = Callable[[str], None]


class TextData(NamedTuple):
    """Text that a word of data.train or data.valid names, and the dataset that is made of it."""

    word: str
    request: PreprocessRequest
    sources: list[SourceFile]
    vocab_size: int

    @property
    def prefix(self) -> Path:
        """The prefix of the dataset."""
        return self.request.output

    @property
    def is_ready(self) -> bool:
        """Says whether the dataset is complete: its index is written last."""
        return with_suffix(self.prefix, ".idx").exists()

    @property
    def size(self) -> str:
        """Words the files: how many, and their bytes."""
        total = sum(source.size for source in self.sources)
        return f"{counted(len(self.sources), 'file')} of {total / 1e6:,.1f} MB"

    def estimate(self) -> str:
        """Words what tokenizing takes, by the time that a sample of the text takes one process."""
        where = f"{self.word}: {self.size}, to be tokenized by {self.request.tokenizer} into "
        where += f"{self.prefix.parent}"
        if self.request.train_size is not None:
            return f"{where}, once a new tokenizer is trained on it"
        tokenizer, began = load_tokenizer(self.request.tokenizer), perf_counter()
        count = sum(len(text.encode()) for text in self._sample() if tokenizer.encode(text) or 1)
        rate = count * self.request.workers / (perf_counter() - began)
        seconds = math.ceil(sum(source.size for source in self.sources) / max(rate, 1.0))
        return f"{where} in about {duration(seconds)}"

    def _sample(self) -> Iterator[str]:
        left = SAMPLE
        for block in cut(self.sources, blank=False):
            for item in read_documents(block.pieces[0], self.request.reading(cuttable=True)):
                if left <= 0:
                    return
                if isinstance(item, Text):
                    yield item.text[:left]
                    left -= len(item.text)

    def tokenize(self, say: Say) -> None:
        """Writes the dataset, unless it is there; one process at a time, while others wait.

        Raises MtcliError for text that cannot be read, and where the folder is another's.
        """
        folder = self.prefix.parent
        with folder_of("data.train", folder):
            require_work_folder(folder)
            folder.mkdir(exist_ok=True)
            lock = append_untrusted(folder / MARK)
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if self.is_ready:
                return
            if not lock.tell():
                lock.write(TEXT)
                lock.flush()
            say(f"tokenizing {self.word} once, for this run and later ones")
            try:
                preprocess(self.request, say)
            except MtcliError as error:
                hint = CHATS if CHAT_FILE.search(self.word) else error.hint
                raise MtcliError(*error.problems, code=error.code, hint=hint) from None


def texts_of(config: RunConfig, tokenizer: Path | None) -> list[TextData]:
    """Finds the text that a language model's data names. `tokenizer` is that of the initial
    weights, for configs without data.tokenizer.

    Raises MtcliError where there is no tokenizer, where one would be trained on each of several
    texts, and where a folder has no text.
    """
    data = config.data
    if data.format != "tokens" or config.model.head != "lm":
        return []
    words = [word for blend in config.words_by_field.values() for word in read_blend(blend)[0]]
    texts = [word for word in dict.fromkeys(words) if is_text(word)]
    spec = data.tokenizer or str(tokenizer or "")
    if texts and not spec:
        hint = "--set data.tokenizer=train:8192 for a new one, bytes, or a Hugging Face name; or "
        hint += (
            f"`mtcli preprocess {texts[0]} --output DATA --tokenizer train:8192`, then name DATA"
        )
        if any(map(CHAT_FILE.search, texts)):
            hint += f"; {CHATS}"
        raise wrong(f"{texts[0]} is text, and no tokenizer is known", hint, "data.train")
    if len(texts) > 1 and spec.startswith(TRAIN):
        message = f"tokenizer={spec!r} is trained on one text, and the data names {len(texts)}"
        hint = f"`mtcli preprocess {' '.join(texts)} --output DATA --tokenizer {spec}` trains one "
        raise wrong(message, f"{hint}on all, then data.tokenizer=DATA.tokenizer", "data.tokenizer")
    return collect_errors(*(partial(_text_data, word, spec) for word in texts))


def is_text(word: str) -> bool:
    """Says whether a word of the data names a file or folder, and no dataset, nor files of one."""
    if not exists(word) or exists(f"{word}.idx") or Path(word).suffix in NO_TEXT:
        return False
    of_data = (*NO_TEXT, ".tokenizer")
    return not pairs_in(word) or any(path.suffix not in of_data for path in Path(word).iterdir())


def with_prefixes(words: Sequence[str], texts: Sequence[TextData]) -> list[str]:
    """Replaces the text among words of the data by the prefixes of its datasets."""
    prefixes = {text.word: str(text.prefix) for text in texts}
    return [prefixes.get(word, word) for word in words]


def describe_texts(config: RunConfig) -> dict[str, str]:
    """Returns the lines of a run's header on datasets that were made of text."""
    words = config.data.train if config.data.format == "tokens" else ()
    prefixes = [word for word in words if Path(word).parent.suffix == TOKENIZED]
    lines = [
        f"{facts['documents']:,} documents of {Path(word).parent.with_suffix('')}, "
        f"{facts['tokens']:,} tokens in {word}"
        for word in prefixes
        if (facts := describe(word))
    ]
    return {"data": "; ".join(lines)} if lines else {}


def _text_data(word: str, spec: str) -> TextData:
    path = Path(word).resolve()
    listing = find_sources([str(path)])
    request = PreprocessRequest((str(path),), Path(word), spec, workers=cores(), resume=True)
    tokenizer = None if spec.startswith(TRAIN) else load_tokenizer(spec)
    size = request.train_size or (tokenizer.vocab_size if tokenizer else 0)
    facts = [fingerprint(request, listing.sources), tokenizer and tokenizer.sha256]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = Path(word).with_name(Path(word).name + TOKENIZED)
    return TextData(word, request._replace(output=folder / name), listing.sources, size)
