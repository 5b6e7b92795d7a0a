"""Samples text from a model on any layout, one token at a time over cached keys and values."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.inference.model import InferenceModel
from mtcli.core.model.inputs import KVCache


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token. Temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generate(
    model: InferenceModel,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int],
) -> Iterator[int]:
    """Generates tokens after a prompt, the same on every rank, up to one of `ends` or max_tokens.

    Stops where the model's longest context is full. Raises MtcliError for a prompt that is empty
    or already longer than that.
    """
    limit = model.max_seq_len
    if not 0 < len(prompt) <= limit:
        message = f"the prompt has {len(prompt)} tokens and the model takes 1 to {limit}"
        raise wrong(message, "give a shorter prompt, and not an empty one", "--prompt")
    generator = torch.Generator().manual_seed(sampling.seed)
    cache, new, position = KVCache(), prompt, 0
    for _ in range(max_tokens):
        positions = torch.arange(position, position + len(new))[None]
        logits = model.next_logits(torch.tensor([new]), positions, cache)[0]
        token = choose(logits.cpu(), sampling, generator)
        if token in ends:
            return
        yield token
        position, new = position + len(new), [token]
        if position >= limit:
            return


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draws a token id from logits [V]; of equal maxima, greedy takes the lowest id.

    Top-k keeps the k largest; top-p (nucleus, arXiv:1904.09751) the fewest largest probabilities
    that reach p together.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    values, ids = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = values.softmax(0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
