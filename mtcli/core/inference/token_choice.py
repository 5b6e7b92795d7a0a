"""Chooses the next token of a text: penalties, cuts of the distribution, and the draw.

A draw depends on the seed, the prompt's number, the sample's number and the token's position alone,
so that no text depends on those which are generated with it. V ids of a vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from mtcli.core.config.arguments import number, whole
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong

MOST_IDS = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all
    tokens; a repetition penalty of 1 is none."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to logits, by id

    def __post_init__(self) -> None:
        """Raises MtcliError for every setting that is out of its range."""
        collect_errors(
            lambda: number("temperature", self.temperature, 0.0, 1000.0, 0.8),
            lambda: whole("top_k", self.top_k, 0, 10**9, 50),
            self._require_top_p,
            lambda: whole("seed", self.seed, 0, 2**63 - 1, 0),
            lambda: number("min_p", self.min_p, 0.0, 1.0, 0.05),
            lambda: number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, 1.1),
            self._require_bias,
        )
        cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = [name for name, none in cuts.items() if getattr(self, name) != none]
        if given and self.temperature == 0.0:
            what = "temperature=0 takes the likeliest token and draws none"
            hint = "temperature=1, or leave {} out"
            raise MtcliError(*(Problem(what, hint.format(name), name) for name in given))

    def _require_top_p(self) -> None:
        if number("top_p", self.top_p, 0.0, 1.0, 0.9) == 0.0:
            raise wrong("top_p=0 keeps no token", "top_p=1 keeps all", "top_p")

    def _require_bias(self) -> None:
        given = self.logit_bias
        hint = "logit_bias={50256: -100}, by a token's id"
        if not isinstance(given, Mapping):
            raise wrong(f"{given!r} is no mapping from ids to numbers", hint, "logit_bias")
        try:
            for id, bias in given.items():
                whole("id", id, 0, MOST_IDS, 0)
                number("bias", bias, -1e4, 1e4, -100)
        except MtcliError as error:
            (problem,) = error.problems
            raise wrong(f"{problem.field} {problem.message}", hint, "logit_bias") from None

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.repetition_penalty != 1.0 or bool(self.logit_bias)


def choose(logits: Tensor, sampling: Sampling, tokens: Sequence[int], uniform: float) -> int:
    """Chooses the token that follows `tokens` by its logits [V]; greedy takes the lowest id of
    equal maxima.

    `uniform` in [0, 1) is a point on the line that the probabilities divide, in the order of ids.
    """
    if sampling.changes_logits:
        logits = penalised(logits, sampling, tokens)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    ends = probabilities(logits, sampling).cumsum(0)
    return int(torch.searchsorted(ends, uniform * ends[-1], right=True))


def penalised(logits: Tensor, sampling: Sampling, tokens: Sequence[int]) -> Tensor:
    """Logits [V] with the bias, then divided by the repetition penalty where an id is among
    `tokens`, or multiplied where they are negative (CTRL, arXiv:1909.05858, section 4.1)."""
    logits = logits.clone()
    if sampling.logit_bias:
        biased = torch.tensor([*sampling.logit_bias])
        logits[biased] += torch.tensor([*sampling.logit_bias.values()], dtype=logits.dtype)
    if (penalty := sampling.repetition_penalty) != 1.0:
        said = torch.tensor(tokens).unique()
        scores = logits[said]
        logits[said] = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [V] of a draw, float64; 0 for tokens that are cut, 1 in total.

    Top-k keeps the k largest; top-p (nucleus, arXiv:1904.09751) keeps the fewest tokens, from the
    likeliest on, whose probabilities reach p together; min-p (arXiv:2407.01082) keeps those at
    least p times as likely as the likeliest.
    """
    logits = logits.double() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        values, ids = logits.sort(descending=True, stable=True)
        if sampling.top_k:
            values, ids = values[: sampling.top_k], ids[: sampling.top_k]
        shares = values.softmax(0)
        likelier = shares.cumsum(0) - shares
        values = values.masked_fill(likelier >= sampling.top_p, float("-inf"))
        logits = torch.full_like(logits, float("-inf")).scatter_(0, ids, values)
    shares = logits.softmax(0)
    if sampling.min_p:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
        shares /= shares.sum()
    return shares


def uniform(seed: int, prompt: int, sample: int, position: int) -> float:
    """Draws a number in [0, 1), by a hash of what it depends on.

    It has 48 bits: its product with a sum of probabilities is less than the sum, however rounded.
    """
    key = b"%d %d %d %d" % (seed, prompt, sample, position)
    return int.from_bytes(blake2b(key, digest_size=6).digest()) * 2.0**-48


def likeliest(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token by its logits [V], and the ids of the `count` likeliest with
    theirs."""
    logs = logits.double().log_softmax(0)
    values, ids = logs.sort(descending=True, stable=True)
    best = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
    return float(logs[token]), list(best)
