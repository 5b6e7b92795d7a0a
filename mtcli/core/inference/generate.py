"""Samples text from a model on any layout, one token at a time over cached keys and values."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.inference.model import InferenceModel
from mtcli.core.model.inputs import KVCache


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token. Temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Ends(NamedTuple):
    """The limits of a text: its number of tokens, tokens that end it, and stop strings."""

    max_tokens: int
    ids: Collection[int] = ()  # end tokens, which are not part of the text
    stops: Sequence[str] = ()  # none empty


class GeneratedText(NamedTuple):
    """A generated text, and the reason why it ended."""

    text: str  # up to the stop string, without it
    num_tokens: int  # those of the stop string included
    finish_reason: Literal["stop", "end_token", "max_tokens", "context"]


def generate_text(
    model: InferenceModel,
    decode: Callable[[Sequence[int]], str],
    prompt: list[int],
    sampling: Sampling,
    ends: Ends,
) -> GeneratedText:
    """Generates text after a prompt, equal on every rank, up to the first stop string in it.

    Searches the whole text after each token, as a stop string may begin and end within tokens.
    Raises as `generate` does.
    """
    ids: list[int] = []
    for token in generate(model, prompt, ends.max_tokens, sampling, ends.ids):
        ids.append(token)
        text = decode(ids) if ends.stops else ""
        if any(stop in text for stop in ends.stops):
            for stop in ends.stops:  # in turn, as lm-eval does: a token may end two that overlap
                text = text.partition(stop)[0]
            return GeneratedText(text, len(ids), "stop")
    if len(ids) == ends.max_tokens:
        return GeneratedText(decode(ids), len(ids), "max_tokens")
    is_full = len(prompt) + len(ids) > model.max_seq_len
    return GeneratedText(decode(ids), len(ids), "context" if is_full else "end_token")


def generate(
    model: InferenceModel,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[int]:
    """Yields tokens after a prompt, equal on every rank, up to one of `ends` or max_tokens.

    Stops where the model's longest context is full. Raises MtcliError for a prompt that is empty or
    longer than that, and where logits are not finite (exit 1).
    """
    limit = model.max_seq_len
    if not 0 < len(prompt) <= limit:
        message = f"the prompt has {len(prompt)} tokens and the model takes 1 to {limit}"
        raise wrong(message, "give a shorter prompt, and not an empty one", "--prompt")
    generator = torch.Generator().manual_seed(sampling.seed)
    cache, new, position = KVCache(), prompt, 0
    for _ in range(max_tokens):
        positions = torch.arange(position, position + len(new))[None]
        logits = model.next_logits(torch.tensor([new]), positions, cache)[0].cpu()
        if not logits.max().isfinite():  # a NaN is the largest
            raise _ruined(position + len(new) - len(prompt))
        token = choose(logits, sampling, generator)
        if token in ends:
            return
        yield token
        position, new = position + len(new), [token]
        if position >= limit:
            return


def _ruined(count: int) -> MtcliError:
    message = f"after {count} new tokens the model's logits are not finite, so no token is likelier"
    return failed(message, "take an earlier checkpoint: weights of this one are NaN or infinite")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draws a token id from logits [V]; greedy takes the lowest id of equal maxima.

    Top-k keeps the k largest; top-p (nucleus, arXiv:1904.09751) keeps the fewest tokens, from the
    likeliest on, whose probabilities reach p together.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    values, ids = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = values.softmax(0)
    likelier = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(likelier >= sampling.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
