"""Reads conversations to fine-tune on: lines to tokens and loss weights.

`chat_lines.py` reads a line as messages, and where it is one turn also as a prompt and a
completion. With a chat template the messages go through it, and the assistant's tokens have a loss.
Without one, the prompt and the completion are one text, and the completion's tokens and the
end-of-document token have a loss.

Where the chat template renders a turn differently once others follow, a line is unrolled into one
example per turn. Such examples begin with the same tokens; `shared` counts them.

A message's `weight` multiplies its tokens' losses, a line's those of all its messages. Other tools'
names for a weight of 0 are read too.

The result for a large file is cached beside it: one process reads the file, all others map the
result.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.schema import LossOn
from mtcli.core.config.untrusted import is_number, is_text, shown
from mtcli.core.data.bad_lines import NAMED, BadLine, json_object, refusal
from mtcli.core.data.chat_lines import ChatLine, chat_line
from mtcli.core.data.chat_program import REASONING, Rendered, TemplateFault
from mtcli.core.data.chat_template import ChatTemplate
from mtcli.core.data.line_files import read_lines
from mtcli.core.data.samples import kept
from mtcli.core.data.tokenize import Tokenizer

WORTH_KEEPING = 1 << 20  # bytes of a file that takes over a second to read
VERSION = 5  # of how lines become tokens
# Whether a message is trained on, as OpenAI, Axolotl and others say it.
SWITCHES = {"train": True, "training": True, "loss_mask": True, "masked": False}
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight", *SWITCHES}
MESSAGE_KEYS |= {*REASONING}

# An example's tokens, the weight of each one's loss, and its `ChatExample.turn`.
Encoded = tuple[list[int], Sequence[float], int]
Encode = Callable[[], list[Encoded]]  # encodes a line's examples, once they are rendered


class ChatExamples(NamedTuple):
    """The N tokens and S examples of a file, as arrays that `kept` can cache.

    int32 `tokens` [N]; int32 `weight_bits` [N], the bits of each loss's float32 weight; int64
    `ends` [S] of examples in them; int64 `lines` [S], from 1; int64 `turns` [S], the only message
    of the line that has a loss, -1 where any may; int64 `shared` [S], the first tokens that the
    line's previous example has too; uint8 `report`, JSON of the skipped lines by kind and of unread
    keys.
    """

    tokens: np.ndarray
    weight_bits: np.ndarray
    ends: np.ndarray
    lines: np.ndarray
    turns: np.ndarray
    shared: np.ndarray
    report: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def fits(self) -> bool:
        """Says whether the arrays have the shapes above."""
        shapes = [array.shape for array in self[:-1]]
        count, total = self.ends.size, int(self.ends[-1]) if self.ends.size else 0
        return shapes == [(total,)] * 2 + [(count,)] * 4 and self.report.ndim == 1

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each example: int64 [S]."""
        return np.diff(self.ends, prepend=0)

    @property
    def bounds(self) -> np.ndarray:
        """The first example of each line, and S: int64 [lines + 1]."""
        return np.append(np.flatnonzero(np.diff(self.lines, prepend=0)), len(self))

    @property
    def weights(self) -> np.ndarray:
        """The weight of each token's loss: float32 [N]."""
        return self.weight_bits.view(np.float32)

    @property
    def skipped_by_kind(self) -> dict[str, tuple[int, list[int]]]:
        """The skipped lines by kind of fault: (how many, the first ones)."""
        table = json.loads(self.report.tobytes())["skipped"]
        return {kind: (count, lines) for kind, (count, lines) in table.items()}

    @property
    def unread_keys(self) -> dict[str, int]:
        """The number of lines by unread key, of the line or of a message."""
        return dict(json.loads(self.report.tobytes())["unread"])


class ChatExample(NamedTuple):
    """An example: its tokens int32 [n], their loss weights float32 [n], and the only message with a
    loss; -1 where several may have one, or there is no chat template."""

    tokens: np.ndarray
    weights: np.ndarray
    turn: int


class ReadLine(NamedTuple):
    """A line's examples, and the keys that were not read."""

    examples: list[ChatExample]
    unread: set[str]


class ExampleTokenizer(NamedTuple):
    """Turns lines into examples of at most `most` tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    most: int
    skip_bad: bool
    loss_on: LossOn = "assistant"

    def __call__(self, line: bytes) -> Callable[[], ReadLine]:
        """Starts to read a line, which the template renders meanwhile; the result returns its
        examples. Both raise BadLine, and the result OverLimit."""
        record = json_object(line)
        scale = weight_of(record, "the line")
        chat = chat_line(record, self.loss_on == "all")
        unread = self._unread(record.keys() - chat.keys, chat.messages)
        return partial(self._read, scale, unread, self._encoding(chat))

    def _read(self, scale: float, unread: set[str], encode: Encode) -> ReadLine:
        try:
            encoded = encode()
        except MtcliError as error:
            raise BadLine("refused by the tokenizer", error.problems[0].message) from None
        longest = max(len(ids) for ids, _, _ in encoded)
        if longest > self.most:
            reason = f"it has {longest} tokens, and batch.seq_len={self.most} is the context"
            hint = f"shorten it, or set batch.seq_len of {longest} or more"
            raise BadLine("longer than the context", reason, hint)
        examples = []
        for ids, weights, turn in encoded:
            # nothing precedes the first token, which would predict it
            scaled = np.array([0.0, *(scale * weight for weight in weights[1:])], np.float32)
            if scaled.any():
                examples.append(ChatExample(np.array(ids, np.int32), scaled, turn))
        if not examples:
            raise BadLine("nothing to learn", "no token of it is the assistant's and has a weight")
        return ReadLine(examples, unread)

    def _unread(self, of_line: Set[str], messages: Sequence[Mapping[str, Any]]) -> set[str]:
        """Returns the keys of a line and its messages that neither this class nor the template
        reads."""
        inner = {key for message in messages for key in message} - MESSAGE_KEYS
        source = self.template.source if self.template else ""
        return {key for key in of_line | inner if key not in source}

    def _encoding(self, chat: ChatLine) -> Encode:
        if self.template is not None:
            try:
                render = self.template.ask(chat.messages, chat.tools, self.loss_on)
            except ValueError as error:
                raise BadLine("no JSON", str(error)) from None
            return partial(self._rendered, chat.messages, render)
        if chat.pair is None:
            reason = "it has messages, and the tokenizer has no chat template"
            hint = "give prompt and completion, or name a tokenizer with one in data.tokenizer"
            raise BadLine("no chat template", reason, hint)
        return partial(self._joined, *chat.pair)

    def _joined(self, prompt: str, completion: str) -> list[Encoded]:
        ids, of_completion = self.tokenizer.encode_example(prompt, completion)
        return [(ids, [True] * len(ids) if self.loss_on == "all" else of_completion, -1)]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], render: Callable[[], list[Rendered]]
    ) -> list[Encoded]:
        try:
            return [self._weighted(messages, example) for example in render()]
        except TemplateFault as fault:
            raise BadLine("refused by the chat template", fault.reason, fault.hint) from None

    def _weighted(self, messages: Sequence[Mapping[str, Any]], example: Rendered) -> Encoded:
        text, spans, turns = example
        if not is_text(text):
            raise BadLine("no text", "it has half of a surrogate pair, which is no text")
        weights = [weight_of(messages[turn], f"message {turn}") for turn in turns]
        if len(weights) != len(spans):
            if len(set(weights)) > 1:
                reason = f"{len(spans)} spans of its text have a loss, and {len(weights)} messages "
                reason += "are in them, whose weights differ"
                raise BadLine("weights without a place", reason, "give them one weight")
            weights = weights[:1] * len(spans)
        ids, of_tokens = self.tokenizer.encode_spans(text, spans, weights)
        return ids, of_tokens, turns[0] if len(turns) == 1 else -1


def read_examples(path: Path, tokenize: ExampleTokenizer, field: str) -> ChatExamples:
    """Reads the examples of a file, which `field` of the config names.

    Raises MtcliError with the first bad lines by file and number, unless `tokenize` skips them, and
    where the file cannot be read or has no example. Raises OverLimit, by file and number, in either
    case.
    """
    build = partial(_read, path, tokenize, field)
    try:
        stat = path.stat()
        if stat.st_size < WORTH_KEEPING or not path.is_file():
            return build()
    except OSError:
        return build()  # which says what is wrong
    template = tokenize.template.source if tokenize.template else None
    facts = [VERSION, stat.st_size, stat.st_mtime_ns, tokenize.tokenizer.sha256, template]
    facts += [tokenize.template and tokenize.template.names, *tokenize[2:]]
    return kept(path.with_name(f"{path.name}.cache"), path, facts, ChatExamples, build)


def _read(path: Path, tokenize: ExampleTokenizer, field: str) -> ChatExamples:
    unread: Counter[str] = Counter()

    def examples_of(end: Callable[[], ReadLine]) -> list[ChatExample]:
        examples, keys = end()
        unread.update(keys)
        return examples

    read, faults = read_lines(path, lambda line: partial(examples_of, tokenize(line)), field)
    if faults and not tokenize.skip_bad:
        bad = [(f"{path}:{line}", fault) for line, fault in faults]
        raise refusal(bad, path, len(read))
    if not read:
        left_out = f": all {len(faults)} lines are bad" if faults else ""
        raise wrong(f"{path} has no example{left_out}", "a line is an example", field)
    by_kind = Counter(fault.kind for _, fault in faults)
    named = {
        kind: (count, [line for line, fault in faults if fault.kind == kind][:NAMED])
        for kind, count in sorted(by_kind.items())
    }
    summary = {"skipped": named, "unread": dict(unread.most_common(NAMED))}
    report = np.frombuffer(json.dumps(summary).encode(), np.uint8)
    tokens, weights, turns = zip(*(one for _, examples in read for one in examples), strict=True)
    return ChatExamples(
        tokens=np.concatenate(tokens),
        weight_bits=np.concatenate(weights).view(np.int32),
        ends=np.cumsum([len(ids) for ids in tokens], dtype=np.int64),
        lines=np.array([line for line, examples in read for _ in examples], np.int64),
        turns=np.array(turns, np.int64),
        shared=np.concatenate([_shared(examples) for _, examples in read]),
        report=report,
    )


def _shared(examples: Sequence[ChatExample]) -> np.ndarray:
    """Counts the first tokens that each example of a line shares with the previous one: int64."""
    shared = np.zeros(len(examples), np.int64)
    for number, (previous, example) in enumerate(pairwise(examples), start=1):
        size = min(len(previous.tokens), len(example.tokens))
        differs = previous.tokens[:size] != example.tokens[:size]
        shared[number] = differs.argmax() if differs.any() else size
    return shared


def weight_of(item: Mapping[str, Any], what: str) -> float:
    """Returns the loss weight of a line or a message: its `weight`, or 0 where another tool's
    switch excludes it. Raises BadLine where either has the wrong type."""
    weight = item.get("weight", 1.0)
    if not is_number(weight) or not 0.0 <= weight < inf:
        reason = f"{what} has the weight {shown(weight)}"
        raise BadLine("wrong weight", reason, "a number of 0 or more")
    for name, is_on in SWITCHES.items():
        value = item.get(name, is_on)
        if value not in (0, 1):
            raise BadLine("wrong weight", f"{what} has {name}={shown(value)}", "true or false")
        weight = weight if bool(value) == is_on else 0.0
    return float(weight)
