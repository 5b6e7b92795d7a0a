"""Renders the items of a task file from the rows of its dataset, and collects examples for shots.

Shots come from the train part where the folder has one, else from the items themselves.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.data.bad_lines import AHEAD_BYTES
from mtcli.core.data.text_files import bad_line
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Request
from mtcli.core.evaluate.tasks.rows import Row, Split, read_test, read_train
from mtcli.core.evaluate.tasks.task_file import TaskFile
from mtcli.core.evaluate.tasks.templates import TaskProgram
from mtcli.core.runtime.sandbox import OverLimit, Sandbox


class Item(NamedTuple):
    """A question as texts: one prompt and its choices, or a prompt for each answer and one choice.

    A cloze has one of each, and no answer.
    """

    id: str
    prompts: tuple[str, ...]
    choices: tuple[str, ...]
    answer: int | None
    group: str = ""
    cluster: str = ""

    @property
    def num_answers(self) -> int:
        """The number of log-likelihoods to compare; 1 for a cloze."""
        return max(len(self.prompts), len(self.choices))


class Renderer:
    """The templates of a task file, in a sandbox."""

    def __init__(self, task: TaskFile) -> None:
        """Raises MtcliError for an invalid template, or one that exceeds a limit."""
        self.task = task
        try:
            self._program = Sandbox(task.file, TaskProgram, task.model_dump())
        except ValueError as error:
            hint = "its templates and expressions are Jinja's: docs/reference/tasks.md"
            raise wrong(f"{task.file}: {error}", hint, "--task") from None
        except OverLimit as limit:
            raise wrong(str(limit), limit.hint, "--task") from None

    def items(self, split: Split) -> list[Item]:
        """Renders the rows for which `where` holds.

        Raises MtcliError with file and line of the first row that lacks something, or for which a
        template exceeds a limit.
        """
        items = []
        for number, fields in self._rendered(split):
            if fields is not None:
                texts = {key: tuple(fields.pop(key)) for key in ("prompts", "choices")}
                items.append(Item(**({"id": str(number)} | fields | texts)))
        if not items:
            message = f"{split.source} has {len(split.rows)} rows, and 0 of them are items"
            raise wrong(message, f"{self.task.name} takes those where {self.task.where}", "--task")
        return items

    def _rendered(self, split: Split) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yields the number and the fields of each row. Sends rows ahead: waiting for each one
        takes more of a processor than rendering it."""
        begun: deque[tuple[int, Row, int]] = deque()
        ahead = 0  # bytes of the rows that are begun

        def finish(most: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
            nonlocal ahead
            while ahead > most:
                number, row, size = begun.popleft()
                ahead -= size
                with _naming(split, row):
                    fields = self._program.answer()
                yield number, fields

        for number, row in enumerate(split.rows):
            try:
                with _naming(split, row):
                    size = self._program.ask({"index": number} | row.fields)
            except MtcliError:
                yield from finish(0)  # which raises what is wrong with a row before
                raise
            begun.append((number, row, size))
            ahead += size
            yield from finish(AHEAD_BYTES)
        yield from finish(0)


@contextmanager
def _naming(split: Split, row: Row) -> Iterator[None]:
    """Adds file and line of a row to the error of its rendering."""
    try:
        yield
    except ValueError as error:
        missing = f", and there is no {split.missing_labels}" * bool(split.missing_labels)
        raise bad_line(row.file, row.line, f"{error}{missing}") from None
    except OverLimit as limit:
        message = f"{row.file}, line {row.line}: {limit}"
        raise wrong(message, limit.hint, "--task") from None


class Pool(NamedTuple):
    """The examples that shots are drawn from, their file, and whether lm-eval draws one more and
    leaves the item out (`spare_shot` of a task file)."""

    examples: list[Item]
    source: str
    lm_eval_spare: bool


class Shot(NamedTuple):
    """A solved example: its text, and the number of its tokens."""

    text: str
    num_tokens: int


class Asked(NamedTuple):
    """An item as requests, with their texts and the number of shots that fit."""

    item: Item
    context: str  # of shots
    num_shots: int
    requests: list[Request]
    contaminated: bool | None = None  # None where nobody asked


def read_items(
    task: TaskFile, path: Path, limit: int | None, with_pool: bool = False
) -> tuple[list[Item], Pool]:
    """Reads a task's items, `limit` of each group, and the pool of its shots.

    Raises MtcliError for unreadable files, and where there is nothing to draw from.
    """
    renderer = Renderer(task)
    test = read_test(path, task.data)
    all_items = renderer.items(test)
    items = _limited(all_items, task.groups, limit)
    if not with_pool:
        return items, Pool([], "", False)
    train = read_train(path, task.data)
    if train is not None:
        return items, Pool(renderer.items(train), str(train.source), task.spare_shot)
    if len(all_items) == 1:
        message = f"{test.source} has 1 example, itself the item, to draw shots from"
        raise wrong(message, "put the train file beside the items, or leave --shots out", "--shots")
    return items, Pool(all_items, str(test.source), True)


def _limited(items: list[Item], groups: tuple[str, ...], limit: int | None) -> list[Item]:
    if limit is None or not groups:
        return items[:limit]
    parts: dict[str, list[Item]] = {}
    for item in items:
        parts.setdefault(item.group, []).append(item)
    return [item for part in parts.values() for item in part[:limit]]


def ask(
    task: TaskFile,
    item: Item,
    shots: Sequence[Shot],
    tokenizer: EvalTokenizer,
    max_seq_len: int,
) -> Asked:
    """Builds the requests for an item after as many shots as fit in `max_seq_len` inputs.

    There is one request for each choice or prompt, then one for each choice without its question
    where `unconditional` is among the normalisations. An item that is too long without shots loses
    its beginning.
    """
    bare = _requests(task, item, "", tokenizer)
    longest = max(len(request.tokens) for request in bare) + len(tokenizer.encode(task.intro))
    ends = list(accumulate((shot.num_tokens for shot in shots), initial=longest))
    # Tokens may merge where texts meet, one at each: then one shot more has room.
    count = sum(end - number <= max_seq_len + 1 for number, end in enumerate(ends)) - 1
    for num_shots in range(max(0, count), -1, -1):
        context = task.intro + "".join(shot.text for shot in shots[:num_shots])
        asked = _requests(task, item, context, tokenizer) if context else bare
        if num_shots == 0 or max(len(request.tokens) for request in asked) <= max_seq_len + 1:
            break
    if "unconditional" in task.normalisations:
        asked = asked + tokenizer.requests(task.unconditional, _continuations(task, item.choices))
    return Asked(item, context, num_shots, asked)


def _requests(task: TaskFile, item: Item, context: str, tokenizer: EvalTokenizer) -> list[Request]:
    continuations = _continuations(task, item.choices)
    return [
        one
        for prompt in item.prompts
        for one in tokenizer.requests(context + prompt, continuations)
    ]


def _continuations(task: TaskFile, choices: Iterable[str]) -> list[str]:
    return [task.delimiter + choice for choice in choices]
