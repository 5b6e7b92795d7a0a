"""Packs requests so that a common beginning is computed once, in one row.

A row is a tree of tokens in depth-first order. A token attends to its ancestors and its position is
its depth, so every root-to-leaf path is computed as if it were alone. Four endings of one question
cost one context and four endings. A row with one path is plain causal and needs no mask. Rows of
similar length form a batch, to reduce padding. Scores are returned in the order of requests.

Where requests with a common beginning exceed a row, such as with few-shot examples, the beginning
is a prefix: the model reads it once and keeps its keys and values, and each row continues from
those. Prefixes nest: items with fewer examples share the first of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mtcli.core.config.errors import failed
from mtcli.core.evaluate.loglikelihood import Ids, Request, Score, fit
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


# A shorter prefix saves less than the forward passes that it splits.
MIN_PREFIX = 16


class Prefix(NamedTuple):
    """The tokens before the rows of a batch: those of `request` up to `length`. `parent` is the
    index of the prefix that this one continues."""

    request: int
    length: int
    parent: int | None


class Branch(NamedTuple):
    """A request in a row: after the batch's prefix, its first `shared` inputs are those of the
    previous branch."""

    request: int
    shared: int


@dataclass
class PackedRow:
    """The branches of one tree, in lexicographic order, and the number of slots in the row."""

    branches: list[Branch]
    size: int


class RowBatch(NamedTuple):
    """The rows of one forward pass, and the prefix that they follow."""

    rows: tuple[PackedRow, ...]
    prefix: int | None


@dataclass(frozen=True)
class PackingPlan:
    """The assignment of requests to rows and of rows to batches, without tensors."""

    requests: Sequence[Request]
    batches: tuple[RowBatch, ...]  # those of one prefix together, a parent's before its children's
    prefixes: tuple[Prefix, ...]

    @property
    def num_tokens(self) -> int:
        """The slots computed, padding included."""
        rows = sum(len(rows) * max(row.size for row in rows) for rows, _ in self.batches)
        return rows + sum(self.new_tokens(index) for index in range(len(self.prefixes)))

    @property
    def num_passes(self) -> int:
        """The number of forward passes: one for each batch and each prefix."""
        return len(self.batches) + len(self.prefixes)

    def length(self, prefix: int | None) -> int:
        """Counts the tokens of a prefix with those of its parents."""
        return 0 if prefix is None else self.prefixes[prefix].length

    def new_tokens(self, prefix: int) -> int:
        """Counts the tokens of a prefix without those of its parents."""
        return self.length(prefix) - self.length(self.prefixes[prefix].parent)

    @property
    def num_unshared_tokens(self) -> int:
        """The inputs of all requests one by one, without padding."""
        return sum(len(request.tokens) - 1 for request in self.requests)


class PackedBatch(NamedTuple):
    """A batch, and the index of the request that each of its N scored predictions belongs to."""

    batch: ScoreBatch
    owners: Ids  # [N]


def plan(scorer: Scorer, requests: Sequence[Request], batch_tokens: int) -> PackingPlan:
    """Truncates requests to the scorer's context and packs them. Raises as `fit` does."""
    return pack(
        fit(requests, scorer.max_seq_len, scorer.vocab_size), scorer.max_seq_len, batch_tokens
    )


def run(scorer: Scorer, planned: PackingPlan, progress: Advance = lambda done: None) -> list[Score]:
    """Scores the planned requests, in request order; calls `progress` after each forward pass.

    Raises as `scored` does.
    """
    by_request: dict[int, Score] = {}
    for scores in scored(scorer, planned):
        by_request |= scores
        progress(len(scores))
    return [by_request[number] for number in range(len(planned.requests))]


def scored(scorer: Scorer, planned: PackingPlan) -> Iterator[dict[int, Score]]:
    """Yields the scores of the requests that each forward pass completes, by number.

    Log-probabilities are summed in float64. Raises MtcliError (exit 1) where the model gives a
    log-probability of NaN.
    """
    for batch, owners, state in _read(scorer, planned):
        logprobs, is_argmax = scorer.score(batch, state)
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


def _read(scorer: Scorer, planned: PackingPlan) -> Iterator[tuple[ScoreBatch, Ids, Any]]:
    """Yields the batches, their owners, and the scorer's state after their prefix.

    Keeps the states of a prefix's ancestors alone.
    """
    states: dict[int | None, Any] = {None: None}

    def state(index: int | None) -> Any:
        if index in states or index is None:
            return states[index]
        prefix = planned.prefixes[index]
        parent_state = state(prefix.parent)
        for other in [key for key in states if key is not None and key != prefix.parent]:
            if not _is_above(planned, other, index):
                del states[other]
        tokens = planned.requests[prefix.request].tokens[: prefix.length]
        new = torch.from_numpy(tokens[planned.length(prefix.parent) :])
        states[index] = scorer.read(new, parent_state)
        return states[index]

    for row_batch, packed in zip(planned.batches, batches(planned), strict=True):
        yield packed.batch, packed.owners, state(row_batch.prefix)


def _is_above(planned: PackingPlan, above: int, below: int | None) -> bool:
    while below is not None and below != above:
        below = planned.prefixes[below].parent
    return below is not None


def pack(requests: Sequence[Request], max_seq_len: int, batch_tokens: int) -> PackingPlan:
    """Plans the rows of `requests` already truncated to `max_seq_len` inputs (`fit`).

    A forward pass takes at most `batch_tokens` slots, or one row where that alone is longer.
    """
    ordered = _Ordered.of(requests)
    longest = int(ordered.inputs.max(initial=0))
    max_row = max(longest, min(MAX_ROW_LENGTHS * max_seq_len, batch_tokens))
    prefixes, groups = _prefixes(ordered, max_row)
    row_batches: list[RowBatch] = []
    for prefix, numbers in groups:
        length = prefixes[prefix].length if prefix is not None else 0
        rows = _share(ordered, numbers, length, max_row - length)
        for several in (True, False):  # one masked row would make its whole batch masked
            kind = [row for row in rows if (len(row.branches) > 1) == several]
            kind.sort(key=lambda row: -row.size)
            while kind:
                count = max(1, batch_tokens // kind[0].size)
                row_batches.append(RowBatch(tuple(kind[:count]), prefix))
                del kind[:count]
    return PackingPlan(requests, tuple(row_batches), tuple(prefixes))


class _Ordered(NamedTuple):
    """Requests in lexicographic order of their inputs, and what neighbours share."""

    requests: Sequence[Request]
    order: list[int]
    inputs: Ids  # [n]
    shared: Ids  # [n] inputs that a request has in common with the one before it; 0 of the first
    room: Ids  # [n] inputs before the first that is scored: a prefix has no more

    @staticmethod
    def of(requests: Sequence[Request]) -> "_Ordered":
        order = sorted(
            range(len(requests)), key=lambda i: requests[i].tokens[:-1].astype(">u4").tobytes()
        )
        inputs = np.array([len(requests[i].tokens) - 1 for i in order], np.int64)
        targets = np.array([requests[i].num_targets for i in order], np.int64)
        shared = [0, *(_in_common(requests[a], requests[b]) for a, b in pairwise(order))]
        return _Ordered(
            requests, order, inputs, np.array(shared[: len(order)], np.int64), inputs - targets
        )


def _in_common(a: Request, b: Request) -> int:
    least = min(len(a.tokens), len(b.tokens)) - 1
    differ = a.tokens[:least] != b.tokens[:least]
    return int(differ.argmax()) if differ.any() else least


def _prefixes(
    ordered: _Ordered, max_row: int
) -> tuple[list[Prefix], list[tuple[int | None, list[int]]]]:
    """Chooses the prefixes, parents first, and for each (None first) the positions of the requests
    that follow it and no longer one."""
    prefixes: list[Prefix] = []
    groups: dict[int | None, list[int]] = {None: []}
    spans: list[tuple[int, int, int | None]] = []
    if ordered.order:
        spans.append((0, len(ordered.order), None))
    while spans:
        first, end, parent = spans.pop()
        length = 0 if parent is None else prefixes[parent].length
        common = ordered.shared[first + 1 : end]
        grown = ordered.inputs[first + 1 : end] - np.maximum(common, length)
        if ordered.inputs[first] - length + grown.sum() <= max_row or end - first == 1:
            groups[parent].extend(range(first, end))  # one row has room for all
            continue
        common = np.minimum(
            common, np.minimum(*(ordered.room[first + i : end - 1 + i] for i in (0, 1)))
        )
        least = int(common.min())
        if least - length >= MIN_PREFIX:
            prefixes.append(Prefix(ordered.order[first], least, parent))
            parent = len(prefixes) - 1
            groups[parent] = []
        starts = [first, *(first + 1 + np.flatnonzero(common == least)).tolist(), end]
        spans += [(a, b, parent) for a, b in reversed(list(pairwise(starts)))]
    return prefixes, [(prefix, sorted(places)) for prefix, places in groups.items()]


def _share(ordered: _Ordered, positions: list[int], length: int, max_row: int) -> list[PackedRow]:
    """Groups requests, neighbours in lexicographic order, into rows by their common inputs after a
    prefix of `length`."""
    rows: list[PackedRow] = []
    previous = None
    for position in positions:
        new = int(ordered.inputs[position]) - length
        shared = int(ordered.shared[position]) - length if previous == position - 1 else 0
        index, previous = ordered.order[position], position
        if (
            shared * MIN_SHARED_PART >= new
            and shared > 0
            and rows[-1].size + new - shared <= max_row
        ):
            rows[-1].branches.append(Branch(index, shared))
            rows[-1].size += new - shared
        else:
            rows.append(PackedRow([Branch(index, 0)], new))
    return rows


def batches(plan: PackingPlan) -> Iterator[PackedBatch]:
    """Yields the plan's forward passes, one at a time."""
    for rows, prefix in plan.batches:
        yield _batch(rows, plan.requests, plan.length(prefix))


def _batch(rows: tuple[PackedRow, ...], requests: Sequence[Request], length: int) -> PackedBatch:
    """Builds the tensors of rows that follow a prefix of `length`."""
    width = max(row.size for row in rows)
    shape = (len(rows), width)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    padding = np.arange(width) >= np.array([[row.size] for row in rows])
    masked = any(len(row.branches) > 1 for row in rows)
    # Padding attends to itself, so that no softmax is over nothing.
    mask = np.tile(np.eye(width, dtype=bool), (len(rows), 1, 1)) if masked else None
    scored, owners, targets = [], [], []
    for number, row in enumerate(rows):
        slots = np.zeros(0, np.int64)  # of the current root-to-leaf path
        end = 0
        for index, shared in row.branches:
            ids, num_targets = requests[index].tokens[length:], requests[index].num_targets
            start, end = end, end + len(ids) - 1 - shared
            slots = np.concatenate([slots[:shared], np.arange(start, end)])
            tokens[number, start:end] = ids[shared:-1]
            positions[number, start:end] = length + np.arange(shared, len(ids) - 1)
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
        padding=torch.from_numpy(padding),
    )
    return PackedBatch(batch, np.concatenate(owners))
