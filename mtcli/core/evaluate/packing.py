"""Packs requests: those with a common beginning share it in one row, so that it is computed once.

A row is a tree of tokens written out in depth-first order; a token attends to its ancestors and has
its depth as its position, so every root-to-leaf path is computed as if it were alone. Four endings
of one question cost one context and four endings. A row with one path is plain causal and needs no
mask. Rows of similar length go together, so little is padding. Scores come in the order of their
requests, whatever order they were computed in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mtcli.core.config.errors import failed
from mtcli.core.evaluate.requests import Ids, Request, Score, fit
from mtcli.core.evaluate.tasks.task import Advance
from mtcli.core.inference.scoring import ScoreBatch, Scorer

# Sharing saves the common tokens' layers and costs the masked part of the attention; below a
# quarter in common the saving is small and the plain causal path is taken.
MIN_SHARED_PART = 4
# A row may grow to twice the model's context: room for a full context and as much in endings.
MAX_ROW_LENGTHS = 2
# Tokens of a forward pass, by device. On one core of a CPU 1024, 2048 and 4096 took the same time
# (2.6 to 2.9 s for 100 questions, width 256). A GPU is full well before 16384 of any model.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


class Branch(NamedTuple):
    """One request in a row: it shares the first `shared` inputs with the branch before it."""

    request: int
    shared: int


@dataclass
class PackedRow:
    """The branches of one tree, in lexicographic order, and the slots they take together."""

    branches: list[Branch]
    size: int


@dataclass(frozen=True)
class PackingPlan:
    """Assigns requests to rows and rows to batches, before any tensor is made."""

    requests: Sequence[Request]
    groups: tuple[tuple[PackedRow, ...], ...]  # one tuple of rows per forward pass

    @property
    def num_tokens(self) -> int:
        """Slots computed, padding included."""
        return sum(len(rows) * max(row.size for row in rows) for rows in self.groups)

    @property
    def num_unshared_tokens(self) -> int:
        """Inputs of all requests one by one, without padding."""
        return sum(len(request.tokens) - 1 for request in self.requests)


class PackedBatch(NamedTuple):
    """A batch and, for each of its N scored predictions, the index of the request it belongs to."""

    batch: ScoreBatch
    owners: Ids  # [N]


def score_requests(scorer: Scorer, requests: Sequence[Request], batch_tokens: int) -> list[Score]:
    """Scores requests, in request order. Raises as `fit` and `run` do."""
    return run(scorer, plan(scorer, requests, batch_tokens))


def plan(scorer: Scorer, requests: Sequence[Request], batch_tokens: int) -> PackingPlan:
    """Truncates requests to the scorer's context and packs them. Raises as `fit` does."""
    return pack(
        fit(requests, scorer.max_seq_len, scorer.vocab_size), scorer.max_seq_len, batch_tokens
    )


def run(scorer: Scorer, planned: PackingPlan, progress: Advance = lambda done: None) -> list[Score]:
    """Scores the planned requests, in request order; `progress` is told of each forward pass.

    Raises as `scored` does.
    """
    found: dict[int, Score] = {}
    for scores in scored(scorer, planned):
        found |= scores
        progress(len(scores))
    return [found[number] for number in range(len(planned.requests))]


def scored(scorer: Scorer, planned: PackingPlan) -> Iterator[dict[int, Score]]:
    """Yields the scores of the requests that each forward pass finishes, by their numbers.

    Log-probabilities are summed in float64. Raises MtcliError (exit 1) when the model gives a
    log-probability that is not a number.
    """
    for batch, owners in batches(planned):
        logprobs, is_argmax = scorer.score(batch)
        numbers, places = np.unique(owners, return_inverse=True)
        sums = np.bincount(places, weights=logprobs.double().cpu().numpy())
        missed = np.bincount(places, weights=~is_argmax.cpu().numpy())
        if np.isnan(sums).any():
            total, broken = len(planned.requests), numbers[np.isnan(sums)][0]
            raise failed(
                f"the model gives a log-probability of nan in request {broken} of {total}",
                "its weights or activations are not finite: check the checkpoint, or evaluate in "
                "fp32",
            )
        yield {
            int(number): Score(float(total), bool(count == 0))
            for number, total, count in zip(numbers, sums, missed, strict=True)
        }


def pack(requests: Sequence[Request], max_seq_len: int, batch_tokens: int) -> PackingPlan:
    """Plans the rows of `requests` already truncated to `max_seq_len` inputs (`fit`).

    A forward pass takes at most `batch_tokens` slots, or one row where a row alone is longer.
    """
    rows = _share(
        requests, max_row=max(max_seq_len, min(MAX_ROW_LENGTHS * max_seq_len, batch_tokens))
    )
    groups: list[tuple[PackedRow, ...]] = []
    for several in (True, False):  # one masked row would make its whole batch masked
        kind = [row for row in rows if (len(row.branches) > 1) == several]
        kind.sort(key=lambda row: -row.size)
        while kind:
            count = max(1, batch_tokens // kind[0].size)
            groups.append(tuple(kind[:count]))
            del kind[:count]
    return PackingPlan(requests, tuple(groups))


def _share(requests: Sequence[Request], max_row: int) -> list[PackedRow]:
    """Groups requests that begin alike into rows: neighbours in lexicographic order."""
    order = sorted(
        range(len(requests)), key=lambda i: requests[i].tokens[:-1].astype(">u4").tobytes()
    )
    if not order:
        return []
    rows = [PackedRow([Branch(order[0], 0)], len(requests[order[0]].tokens) - 1)]
    for before, index in pairwise(order):
        length = len(requests[index].tokens) - 1
        least = min(length, len(requests[before].tokens) - 1)
        differ = requests[before].tokens[:least] != requests[index].tokens[:least]
        shared = int(differ.argmax()) if differ.any() else least
        grown = rows[-1].size + length - shared
        if shared * MIN_SHARED_PART >= length and grown <= max_row:
            rows[-1].branches.append(Branch(index, shared))
            rows[-1].size = grown
        else:
            rows.append(PackedRow([Branch(index, 0)], length))
    return rows


def batches(plan: PackingPlan) -> Iterator[PackedBatch]:
    """Yields the plan's forward passes, one at a time."""
    for rows in plan.groups:
        yield _batch(rows, plan.requests)


def _batch(rows: tuple[PackedRow, ...], requests: Sequence[Request]) -> PackedBatch:
    width = max(row.size for row in rows)
    shape = (len(rows), width)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    masked = any(len(row.branches) > 1 for row in rows)
    # Padding attends to itself, so that no softmax is over nothing.
    mask = np.tile(np.eye(width, dtype=bool), (len(rows), 1, 1)) if masked else None
    scored, owners, targets = [], [], []
    for number, row in enumerate(rows):
        slots = np.zeros(0, np.int64)  # of the current root-to-leaf path
        end = 0
        for index, shared in row.branches:
            ids, num_targets = requests[index]
            start, end = end, end + len(ids) - 1 - shared
            slots = np.concatenate([slots[:shared], np.arange(start, end)])
            tokens[number, start:end] = ids[shared:-1]
            positions[number, start:end] = np.arange(shared, len(ids) - 1)
            if mask is not None:
                mask[number, start:end, slots[:shared]] = True
                mask[number, start:end, start:end] = np.tri(end - start, dtype=bool)
            scored.append(number * width + slots[-num_targets:])
            targets.append(ids[-num_targets:])
            owners.append(np.full(num_targets, index))
    batch = ScoreBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        mask=None if mask is None else torch.from_numpy(mask),
        rows=torch.from_numpy(np.concatenate(scored)),
        targets=torch.from_numpy(np.concatenate(targets)),
    )
    return PackedBatch(batch, np.concatenate(owners))
