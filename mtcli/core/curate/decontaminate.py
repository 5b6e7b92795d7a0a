"""Cuts out of documents what stands in evaluation tasks, as MT-NLG's public tools do.

Words are runs of \\w in lower case. An n-gram of a task that a document holds is cut out with 200
characters on both sides and on to the end of the sentence there; each piece between cuts that is
longer than 200 characters is a document of its own. N-grams that the corpus has ten times are
common phrases, unless all n-grams of a task's text are: such a text has leaked as a whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.untrusted import is_text, listed, shown
from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import DecontaminateConfig
from mtcli.core.curate.corpus import Found
from mtcli.core.curate.documents import Document
from mtcli.core.curate.hashing import Array, rolling
from mtcli.core.data.compressed import inner_name
from mtcli.core.data.race import LEVELS, read_race
from mtcli.core.data.text_files import bad_line, json_form, json_of, read_text

FIELD = "decontaminate.tasks"
PUNCTUATION = ".!?"
ITEM_CHARACTERS = 200  # of a task's text, that a report shows
FILTER_BITS = 22  # of a hash, that tell most n-grams of a document apart from all of the tasks


class Match(NamedTuple):
    """An n-gram of a task in a document: its number, and its range of characters."""

    ngram: int
    start: int
    stop: int


class TaskNgrams:
    """The unique n-grams of task files, numbered, and looked up in documents by hash."""

    def __init__(self, config: DecontaminateConfig) -> None:
        self.names = tuple(config.tasks)
        read = (partial(_texts_of, Path(task), config.fields) for task in config.tasks)
        self._texts = collect_errors(*read)
        texts = [text for of_task in self._texts for text in of_task]
        task_of = np.repeat(np.arange(len(self.names)), [len(of_task) for of_task in self._texts])
        batch = Batch([Document(b"", "", text, len(text)) for text in texts])
        self._batch, words = batch, batch.words
        sizes = np.minimum(words.counts, config.ngram)
        self._tables: dict[int, tuple[Array, int, Array]] = {}
        first_words, lengths, tasks = [], [], []
        items, ngrams = [], []  # of every window
        count = 0
        for size in range(config.min_ngram, config.ngram + 1):
            starts = _windows_of(batch, size, sizes == size)
            hashes = rolling(batch.word_hashes, size)[starts]
            once, places, numbers = np.unique(hashes, return_index=True, return_inverse=True)
            items.append(words.owners[starts])
            ngrams.append(count + numbers)
            if once.size:
                self._tables[size] = once, count, _filter_of(once)
            first_words.append(starts[places])
            lengths.append(np.full(once.size, size))
            tasks.append(task_of[words.owners[starts[places]]])
            count += once.size
        self._first_words, self._lengths = np.concatenate(first_words), np.concatenate(lengths)
        self._task_of = np.concatenate(tasks)
        self._items, self._ngrams = np.concatenate(items), np.concatenate(ngrams)
        self._task_of_item = task_of
        if not count:
            said = f"{len(texts)} task texts, none with {config.min_ngram} words"
            raise wrong(said, "are these the right files?", FIELD)

    def text(self, ngram: int) -> str:
        """Returns an n-gram's words, in lower case."""
        first, size = int(self._first_words[ngram]), int(self._lengths[ngram])
        words, (data, _) = self._batch.words, self._batch.lowered
        spans = zip(
            words.starts[first : first + size], words.stops[first : first + size], strict=True
        )
        return " ".join(data[start:stop].decode() for start, stop in spans)

    def tasks_of(self, ngrams: Sequence[int]) -> list[str]:
        """Returns the names of the tasks that some n-grams are from."""
        return sorted({self.names[self._task_of[ngram]] for ngram in ngrams})

    def spared(self, counts: Array, common: int) -> Array:
        """Selects the common phrases [n-grams]: at least `common` occurrences by `counts`, which is
        0 past its end.

        A task text whose n-grams are all common has leaked as a whole, so none of them is spared.
        """
        often = np.zeros(len(self._lengths), bool)
        often[: len(counts)] = counts >= common
        rare_items = np.zeros(len(self._task_of_item), bool)
        rare_items[self._items[~often[self._ngrams]]] = True
        often[self._ngrams[~rare_items[self._items]]] = False
        return often

    def found(self, counts: Array, spared: Array) -> Found:
        """Lists by task the n-grams that occur in a corpus, and the task texts with spared
        n-grams."""
        has = np.zeros(len(self._lengths), bool)
        has[: len(counts)] = counts > 0
        ngrams: dict[str, set[str]] = defaultdict(set)
        by_item: dict[int, list[str]] = defaultdict(list)
        of_pairs = has[self._ngrams]
        for item, ngram in zip(
            self._items[of_pairs].tolist(), self._ngrams[of_pairs].tolist(), strict=True
        ):
            text = self.text(ngram)
            ngrams[self.names[self._task_of_item[item]]].add(text)
            if spared[ngram]:
                by_item[item].append(text)
        spared_texts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for item, texts in sorted(by_item.items()):
            entry = {"item": self._batch.documents[item].text[:ITEM_CHARACTERS]}
            spared_texts[self.names[self._task_of_item[item]]].append(entry | {"ngrams": texts})
        return Found(
            {task: sorted(texts) for task, texts in sorted(ngrams.items())}, dict(spared_texts)
        )

    def find(self, batch: Batch) -> tuple[Array, Array, Array]:
        """Finds every match in a batch, sorted: (document, n-gram, index of its first word)."""
        matches = []
        for size, (hashes, first, has_prefix) in self._tables.items():
            values = rolling(batch.word_hashes, size)
            may = np.flatnonzero(has_prefix[values >> np.uint64(64 - FILTER_BITS)])
            places = np.minimum(np.searchsorted(hashes, values[may]), len(hashes) - 1)
            hit = hashes[places] == values[may]
            starts, ngrams = may[hit], first + places[hit]
            owners = batch.words.owners
            inside = owners[starts] == owners[starts + size - 1]
            matches.append((owners[starts[inside]], ngrams[inside], starts[inside]))
        documents, ngrams, starts = map(np.concatenate, zip(*matches, strict=True))
        order = np.lexsort((ngrams, starts, documents))
        return documents[order], ngrams[order], starts[order]

    def matches(self, text: str) -> list[Match]:
        """Finds the matches in a text, in its order."""
        batch = Batch([Document(b"", "", text, len(text))])
        _, ngrams, firsts = self.find(batch)
        data, _ = batch.lowered
        matches = []
        for ngram, first in zip(ngrams.tolist(), firsts.tolist(), strict=True):
            last = first + int(self._lengths[ngram]) - 1
            start, stop = int(batch.words.starts[first]), int(batch.words.stops[last])
            if not text.isascii():  # bytes to characters
                start = len(data[:start].decode("utf-8", "surrogatepass"))
                stop = len(data[:stop].decode("utf-8", "surrogatepass"))
            matches.append(Match(ngram, start - 1, stop - 1))  # of the blank before the text
        return matches


def _windows_of(batch: Batch, size: int, members: Array) -> Array:
    """Returns the first words of the windows of `size` words in the documents that `members`
    selects."""
    owners = batch.words.owners
    count = len(owners) - size + 1
    if count <= 0:
        return np.zeros(0, np.int64)
    inside = (owners[:count] == owners[size - 1 :]) & members[owners[:count]]
    return np.flatnonzero(inside)


def _filter_of(hashes: Array) -> Array:
    """Builds a table of the first FILTER_BITS bits that occur among hashes."""
    has = np.zeros(1 << FILTER_BITS, bool)
    has[hashes >> np.uint64(64 - FILTER_BITS)] = True
    return has


def make_matches(
    config: DecontaminateConfig,
) -> Callable[[list[Document], Batch], dict[str, Array]]:
    """Builds the feature of `decontaminate`: `num_matches` int32 [documents], and `matches` int32,
    their n-grams concatenated."""
    ngrams = TaskNgrams(config)

    def find(documents: list[Document], batch: Batch) -> dict[str, Array]:
        owners, matches, _ = ngrams.find(batch)
        counts = np.bincount(owners, minlength=len(documents))
        return {"num_matches": counts.astype(np.int32), "matches": matches.astype(np.int32)}

    return find


class Cut(NamedTuple):
    """The pieces that remain of a document, the number of cuts, and the n-grams that caused
    them."""

    pieces: tuple[str, ...]
    cuts: int
    ngrams: tuple[int, ...]


def cut_text(text: str, matches: Sequence[Match], config: DecontaminateConfig) -> Cut:
    """Cuts matches out of a text, from left to right."""
    begin, cuts = 0, 0
    pieces, ngrams = [], []
    for match in matches:
        if match.start < begin:  # in what was cut
            continue
        cuts += 1
        ngrams.append(match.ngram)
        end = match.start - config.margin
        while end > begin and text[end] not in PUNCTUATION:
            end -= 1
        if end > begin:
            pieces.append(text[begin : end + 1])
        begin = match.stop + config.margin
        while begin < len(text) and text[begin] not in PUNCTUATION:
            begin += 1
        begin += 1
    pieces.append(text[begin:])
    remaining = [piece.strip() for piece in pieces if len(piece) > config.min_piece or not cuts]
    return Cut(tuple(piece for piece in remaining if piece), cuts, tuple(ngrams))


def _texts_of(path: Path, fields: Sequence[str]) -> list[str]:
    """Reads the texts of a task. Raises MtcliError for a file without any."""
    if path.is_dir():
        if any((path / level).is_dir() for level in LEVELS) or (path / "test").is_dir():
            by_level = read_race(path, "test", FIELD)
            articles = [article for level in by_level.values() for _, article in level]
            keys = [key for key in fields if key in ("questions", "article")]
            if keys[:1] == ["article"]:
                return [article.text for article in articles]
            return [question for article in articles for question in article.questions]
        kinds = (".jsonl", ".txt")
        files = sorted(file for file in path.iterdir() if inner_name(file).suffix in kinds)
        if not files:
            raise wrong(f"{path} holds 0 task files", "give .jsonl or .txt files, or RACE", FIELD)
        return [text for file in files for text in _texts_of(file, fields)]
    text = read_text(path, FIELD)
    if inner_name(path).suffix in (".jsonl", ".json", ".ndjson") or json_form(text):
        return list(_json_texts(path, text, fields))
    return [part for part in text.split("\n\n") if part.strip()]


def _json_texts(path: Path, text: str, fields: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = json_of(line, path, number, FIELD)
        if not isinstance(row, dict):
            raise bad_line(path, number, f"{shown(row)} is no object", FIELD)
        key = next((name for name in fields if name in row), None)
        values = row[key] if key else None
        values = values if isinstance(values, list) else [values]
        if not key or not all(map(is_text, values)):
            keys = listed([shown(name) for name in row]) or "none"
            message = f"no text in any of {', '.join(fields)}: keys are {keys}"
            raise wrong(
                f"{path}, line {number}: {message}", "fields = ['KEY']", "decontaminate.fields"
            )
        yield from values
