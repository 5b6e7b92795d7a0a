"""Generates texts together on any layout: continuous batching over slots of keys and values.

Texts of any lengths share forward passes of one token each. A text has a slot until it ends; the
next prompt then takes the slot. A prompt that begins as a text of some slot does, such as one of
several samples or a conversation that goes on, has those keys and values copied and the rest read.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.errors import MtcliError, Problem, failed
from mtcli.core.config.untrusted import MAX_LISTED
from mtcli.core.inference.bad_tensors import first_nonfinite
from mtcli.core.inference.model import InferenceModel
from mtcli.core.inference.token_choice import Sampling, choose, likeliest, uniform
from mtcli.core.model.slots import Slots, slot_pass

CACHE_BYTES = 2 << 30  # of a rank's keys and values, by default
MOST_TEXTS = 64  # of a pass
READ_TOKENS = 2048  # of prompts in one pass, with what fills them up
WORTH_COPYING = 16  # tokens that a prompt shares with a slot's text, at least
GREEDY = Sampling()
TAIL = 16  # tokens behind which a stop string has no effect on how tokens are decoded


class Ends(NamedTuple):
    """The limits of a text: its number of tokens, tokens that end it, and stop strings."""

    max_tokens: int
    ids: Collection[int] = ()  # end tokens, which are not part of the text
    stops: Sequence[str] = ()  # none empty


class TextRequest(NamedTuple):
    """A request for a text after a prompt; the numbers of prompt and sample choose its draws."""

    prompt: list[int]
    ends: Ends
    sampling: Sampling = Sampling()
    decode: Callable[[Sequence[int]], str] = str
    number: int = 0
    sample: int = 0
    logprobs: int | None = None  # of how many of the likeliest tokens; None: of none


class GeneratedText(NamedTuple):
    """A generated text, and the reason why it ended."""

    text: str  # up to the stop string, without it
    num_tokens: int  # those of the stop string included
    finish_reason: Literal["stop", "end_token", "max_tokens", "context"]


class TokenLogprob(NamedTuple):
    """A token's log-probability, and those of the likeliest in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class TextState:
    """A text that is being generated: its new tokens so far."""

    index: int  # of the request
    request: TextRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: GeneratedText | None = None

    @property
    def tokens(self) -> list[int]:
        """The prompt, and the text so far."""
        return [*self.request.prompt, *self.ids]

    @property
    def position(self) -> int:
        """The position of the last token."""
        return len(self.request.prompt) + len(self.ids) - 1

    def add(self, token: int, limit: int) -> None:
        """Adds a token, and sets the result where the text ends; `limit` is the longest context."""
        ends, decode = self.request.ends, self.request.decode
        if token in ends.ids:
            self._end("end_token")
            return
        self.ids.append(token)
        if ends.stops and any(stop in self._tail() for stop in ends.stops):
            text = decode(self.ids)
            if any(stop in text for stop in ends.stops):
                # in turn, as lm-eval does: one token may complete two that overlap
                for stop in ends.stops:
                    text = text.partition(stop)[0]
                self.result = GeneratedText(text, len(self.ids), "stop")
                return
        if len(self.ids) == ends.max_tokens:
            self._end("max_tokens")
        elif self.position >= limit:
            self._end("context")

    def _tail(self) -> str:
        """The end of the text, which has any stop string that the last token completes: a token is
        one byte at least."""
        longest = max(len(stop.encode()) for stop in self.request.ends.stops)
        return self.request.decode(self.ids[-longest - TAIL :])

    def _end(self, reason: Literal["end_token", "max_tokens", "context"]) -> None:
        self.result = GeneratedText(self.request.decode(self.ids), len(self.ids), reason)


class _Reading(NamedTuple):
    """A prompt to read: its text, its slot, and how many of its tokens the slot has already."""

    text: TextState
    slot: int
    start: int


class Generator:
    """Generates texts by a model. Slots outlive `run`, and so do the beginnings that they have."""

    def __init__(self, model: InferenceModel, cache_bytes: int = CACHE_BYTES) -> None:
        """`cache_bytes` bounds a rank's keys and values; one text at least is in memory."""
        self.model, self.cache_bytes = model, cache_bytes
        self.slots = Slots(0, 0)
        self.contents: list[list[int]] = []  # the tokens whose keys and values a slot has
        self.active: dict[int, TextState] = {}  # by slot

    def run(
        self,
        requests: Sequence[TextRequest],
        watch: Callable[[TextState], object] = lambda text: None,
    ) -> Iterator[TextState]:
        """Yields texts as they end, equal on every rank; calls `watch` after each token of one.

        Raises MtcliError for a prompt that is empty or longer than the context, and (exit 1) where
        logits are not finite.
        """
        _require_fitting(requests, self.model.max_seq_len)
        waiting = deque(TextState(*numbered) for numbered in enumerate(requests))
        self._make_slots(requests)
        self.active.clear()  # of a run that was not read to its end
        while waiting or self.active:
            advanced = self._read(waiting) if waiting and self._free() else self._decode(waiting)
            for text in advanced:
                watch(text)
                if text.result is not None:
                    yield text

    def _make_slots(self, requests: Sequence[TextRequest]) -> None:
        """Makes as many slots as the budget has room for texts of the longest one's size."""
        limit = self.model.max_seq_len
        longest = max(
            (min(limit, len(r.prompt) + r.ends.max_tokens) for r in requests), default=limit
        )
        fit = self.cache_bytes // max(1, self.model.cached_bytes * longest)
        count = max(1, min(fit, MOST_TEXTS, len(requests))) if self.model.is_separable else 1
        if count != self.slots.count:
            self.slots, self.contents = Slots(count, longest), [[] for _ in range(count)]
        self.slots.longest = max(self.slots.longest, longest)

    def _free(self) -> list[int]:
        return [slot for slot in range(self.slots.count) if slot not in self.active]

    def _read(self, waiting: deque[TextState]) -> list[TextState]:
        """Reads as many prompts as free slots and a pass take, and adds their first tokens."""
        readings, twins = self._take(waiting)
        starts = [reading.start for reading in readings]
        rows = [reading.text.request.prompt[reading.start :] for reading in readings]
        logits = self._logits([reading.slot for reading in readings], starts, rows)
        for row, (text, slot, _) in enumerate(readings):
            self.contents[slot] = list(text.request.prompt)
            self.active[slot] = text
            self._choose(text, slot, logits[row])
        for text, slot, row in twins:
            source, prompt = readings[row].slot, text.request.prompt
            self.slots.copy(source, slot, len(prompt))
            self.contents[slot] = list(prompt)
            self.active[slot] = text
            self._choose(text, slot, logits[row])
        return [text for text, *_ in (*readings, *twins)]

    def _take(
        self, waiting: deque[TextState]
    ) -> tuple[list[_Reading], list[tuple[TextState, int, int]]]:
        """Takes prompts for one pass. Returns those to read, and (text, slot, row) of prompts that
        equal the one read in that row. A prompt with the beginning of another waits for it."""
        readings: list[_Reading] = []
        twins: list[tuple[TextState, int, int]] = []
        passed: list[TextState] = []
        free, longest = self._free(), 0
        while waiting and free and len(passed) < MOST_TEXTS:
            text = waiting.popleft()
            prompt = text.request.prompt
            same = [row for row, one in enumerate(readings) if one.text.request.prompt == prompt]
            if same:
                twins.append((text, free.pop(0), same[0]))
                continue
            source, start = self._source(prompt)
            waits = any(
                _shared(one.text.request.prompt, prompt) >= max(start + 1, WORTH_COPYING)
                for one in readings
            )
            width = max(longest, len(prompt) - start)
            if readings and (waits or not self._fits(readings, start, width)):
                passed.append(text)
                if not waits:
                    break
                continue
            slot = source if source in free else free[0]
            free.remove(slot)
            self.slots.copy(source, slot, start)
            self.contents[slot] = list(prompt[:start])
            readings.append(_Reading(text, slot, start))
            longest = width
            if not self.model.is_separable:
                break
        waiting.extendleft(reversed(passed))
        return readings, twins

    def _fits(self, readings: Sequence[_Reading], start: int, width: int) -> bool:
        """Whether one more prompt, read from `start` on, fits into a pass `width` tokens wide."""
        starts = [start, *(reading.start for reading in readings)]
        is_alike = (min(starts) == 0) == (max(starts) == 0)
        inside = max(starts) + width <= self.slots.longest
        return is_alike and inside and len(starts) * width <= READ_TOKENS

    def _source(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot whose tokens a prompt begins with, and how many: all but its last at most."""
        if not self.model.is_separable:
            return 0, 0
        shared = [min(_shared(tokens, prompt), len(prompt) - 1) for tokens in self.contents]
        best = max(range(len(shared)), key=shared.__getitem__)
        return (best, shared[best]) if shared[best] >= WORTH_COPYING else (best, 0)

    def _decode(self, waiting: deque[TextState]) -> list[TextState]:
        """Adds a token to every active text."""
        if not waiting:
            self._compact()
        slots = sorted(self.active)
        texts = [self.active[slot] for slot in slots]
        starts = [text.position for text in texts]
        logits = self._logits(slots, starts, [text.ids[-1:] for text in texts])
        best = None
        if all(text.request.sampling == GREEDY and text.request.logprobs is None for text in texts):
            best = logits.argmax(1).tolist()
        for row, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            self.contents[slot].append(text.ids[-1])
            self._choose(text, slot, logits[row], None if best is None else best[row])
        return texts

    def _compact(self) -> None:
        """Moves the last texts to free slots before them, so that passes read memory in place."""
        for slot in self._free():
            last = max(self.active)
            if last < slot:
                break
            self.slots.copy(last, slot, len(self.contents[last]))
            self.contents[slot], self.contents[last] = self.contents[last], []
            self.active[slot] = self.active.pop(last)

    def _logits(self, slots: list[int], starts: list[int], rows: Sequence[Sequence[int]]) -> Tensor:
        """The logits [b, V] after new tokens of the texts in slots, on the CPU."""
        lengths = [len(row) for row in rows]
        width = max(lengths)
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        device = self.model.groups.device
        given = slot_pass(self.slots, slots, starts, width, device)
        ends = None if min(lengths) == width else torch.tensor(lengths)
        arguments = tokens, given.positions, given, ends
        logits = self.model.next_logits(*arguments).cpu()
        if not logits.max().isfinite():  # a NaN is the largest
            counts = [text.ids for text in self.active.values()]
            raise self._ruined(len(max(counts, key=len, default=[])), arguments)
        return logits

    def _ruined(self, count: int, arguments: tuple[Any, ...]) -> Exception:
        where = first_nonfinite(self.model, lambda: self.model.next_logits(*arguments))
        message = f"after {count} new tokens the model's logits are not finite, so no token is "
        return failed(f"{message}likelier: {where.what}", where.hint)

    def _choose(self, text: TextState, slot: int, logits: Tensor, best: int | None = None) -> None:
        request = text.request
        if best is None:
            at = request.sampling.seed, request.number, request.sample, len(text.ids)
            draw = uniform(*at) if request.sampling.temperature else 0.0
            tokens = text.tokens if request.sampling.repetition_penalty != 1.0 else ()
            best = choose(logits, request.sampling, tokens, draw)
        count = len(text.ids)
        text.add(best, self.model.max_seq_len)
        if request.logprobs is not None and len(text.ids) > count:
            text.logprobs.append(TokenLogprob(best, *likeliest(logits, best, request.logprobs)))
        if text.result is not None:
            del self.active[slot]


def _require_fitting(requests: Sequence[TextRequest], limit: int) -> None:
    """Raises MtcliError with the first prompts that are empty or have more tokens than `limit`."""
    lengths = {request.number: len(request.prompt) for request in requests}
    hint = "give a shorter prompt, and not an empty one"
    problems = [
        Problem(
            f"the prompt {f'with index {number} ' if len(lengths) > 1 else ''}has {length} tokens "
            f"and the model takes 1 to {limit}", hint, "--prompt",
        )
        for number, length in lengths.items()
        if not 0 < length <= limit
    ]  # fmt: skip
    if problems:
        raise MtcliError(*problems[:MAX_LISTED])


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def generate_text(
    model: InferenceModel,
    decode: Callable[[Sequence[int]], str],
    prompt: list[int],
    sampling: Sampling,
    ends: Ends,
) -> GeneratedText:
    """Generates one text; see `Generator.run`."""
    (text,) = Generator(model).run([TextRequest(prompt, ends, sampling, decode)])
    assert text.result is not None, "a text that was yielded has ended"
    return text.result


def generate(
    model: InferenceModel,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> list[int]:
    """Generates the tokens of one text, up to one of `ends` or max_tokens; see `Generator.run`."""
    (text,) = Generator(model).run([TextRequest(prompt, Ends(max_tokens, ends), sampling)])
    return text.ids
