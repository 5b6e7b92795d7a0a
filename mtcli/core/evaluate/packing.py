"""Packing: requests with a common beginning share it in one row, so that it is computed once.

A row is a tree of tokens written out in depth-first order; a token attends to its ancestors and has
its depth as its position, so every root-to-leaf path is computed as if it were alone. Four endings
of one question cost one context and four endings. A row with one path is plain causal and needs no
mask. Rows of similar length go together, so little is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mtcli.core.evaluate.requests import Ids, Request
from mtcli.core.scorer import ScoreBatch

# Sharing saves the common tokens' layers and costs the masked part of the attention; below a
# quarter in common the saving is small and the plain causal path is taken.
MIN_SHARED_PART = 4
# A row may grow to twice the model's context: room for a full context and as much in endings.
MAX_ROW_LENGTHS = 2


class Branch(NamedTuple):
    """One request in a row: it shares the first `shared` inputs with the branch before it."""

    request: int
    shared: int


@dataclass
class Row:
    """The branches of one tree, in lexicographic order, and the slots they take together."""

    branches: list[Branch]
    size: int


@dataclass(frozen=True)
class Plan:
    """Which requests go together, before any tensor is made."""

    requests: Sequence[Request]
    groups: tuple[tuple[Row, ...], ...]  # one tuple of rows per forward pass

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


def pack(requests: Sequence[Request], max_seq_len: int, batch_tokens: int) -> Plan:
    """The plan for `requests` already cut to `max_seq_len` inputs (`fit`).

    A forward pass takes at most `batch_tokens` slots, or one row where a row alone is longer.
    """
    rows = _share(
        requests, max_row=max(max_seq_len, min(MAX_ROW_LENGTHS * max_seq_len, batch_tokens))
    )
    groups: list[tuple[Row, ...]] = []
    for several in (True, False):  # one masked row would make its whole batch masked
        kind = [row for row in rows if (len(row.branches) > 1) == several]
        groups += _group(sorted(kind, key=lambda row: -row.size), batch_tokens)
    return Plan(requests, tuple(groups))


def _share(requests: Sequence[Request], max_row: int) -> list[Row]:
    """Rows of requests that begin alike: neighbours in lexicographic order."""
    order = sorted(
        range(len(requests)), key=lambda i: requests[i].tokens[:-1].astype(">u4").tobytes()
    )
    if not order:
        return []
    rows = [Row([Branch(order[0], 0)], len(requests[order[0]].tokens) - 1)]
    for before, index in pairwise(order):
        length = len(requests[index].tokens) - 1
        shared = _common(requests[before].tokens[:-1], requests[index].tokens[:-1])
        grown = rows[-1].size + length - shared
        if shared * MIN_SHARED_PART >= length and grown <= max_row:
            rows[-1].branches.append(Branch(index, shared))
            rows[-1].size = grown
        else:
            rows.append(Row([Branch(index, 0)], length))
    return rows


def _common(a: Ids, b: Ids) -> int:
    """How many ids a and b begin with in common."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _group(rows: list[Row], batch_tokens: int) -> list[tuple[Row, ...]]:
    """Rows, longest first, cut into batches of at most batch_tokens slots."""
    groups: list[tuple[Row, ...]] = []
    start = 0
    while start < len(rows):
        count = max(1, batch_tokens // rows[start].size)
        groups.append(tuple(rows[start : start + count]))
        start += count
    return groups


def batches(plan: Plan) -> Iterator[PackedBatch]:
    """The plan's forward passes, one at a time."""
    for rows in plan.groups:
        yield _build(rows, plan.requests)


def _build(rows: tuple[Row, ...], requests: Sequence[Request]) -> PackedBatch:
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
