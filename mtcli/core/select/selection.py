"""Runs `mtcli select`: candidates, their proxies, the core-set, and a random one to compare."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mtcli.core.checkpoint.adapters import base_of, weights_hash
from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.folder import CheckpointFolder
from mtcli.core.config.model import CLASSIFIERS
from mtcli.core.config.schema import RACE_CHOICES, RunConfig
from mtcli.core.data.bert.example_rows import ExampleRows
from mtcli.core.data.bert.training_data import open_examples
from mtcli.core.data.indexed import stated_hash
from mtcli.core.data.subset import ModelRecord, SourceRecord, Subset, TokenSequences
from mtcli.core.inference.model import InferenceModel, open_model
from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.together import together
from mtcli.core.runtime.launch import Runtime
from mtcli.core.select.budgets import budgets_of, total_of
from mtcli.core.select.coreset import (
    Chosen,
    Quota,
    Work,
    choose,
    evenly_weighed,
    judge,
    planned_bytes,
    random_orders,
    unjudged,
    with_error,
)
from mtcli.core.select.dsir import resample
from mtcli.core.select.proxies import Proxy, example_proxies, proxy_width, sequence_proxies
from mtcli.core.select.request import SelectRequest, config_of, open_tokens

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Candidates:
    """The sequences or documents to choose from."""

    data: TokenSequences | ExampleRows
    format: str
    seq_len: int
    groups: list[np.ndarray]  # ids of each source, or of each class; ascending
    shares: list[float]  # of each group in the choice
    counts: list[int]  # of each source
    source_shares: Sequence[float] | None  # of a blend that gives them
    target: TokenSequences | None = None  # what the chosen ones are to resemble

    def __len__(self) -> int:
        return sum(map(len, self.groups))


def open_candidates(config: RunConfig) -> Candidates:
    """Opens the training split of a config's data, as candidates in groups.

    Raises MtcliError for files that are missing, wrong or too short.
    """
    data, size = config.data, config.batch.seq_len
    if config.model.head in CLASSIFIERS:
        rows = open_examples(config, None)
        labels = np.array([example.label for example in rows.examples])
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        shares = [float(len(group)) for group in groups]
        return Candidates(rows, data.format, size, groups, shares, [len(labels)], None)
    sequences = open_tokens(config)
    given, counts = sequences.shares, sequences.counts
    shares = [float(share) for share in given or counts]
    return Candidates(sequences, data.format, size, sequences.groups(), shares, counts, given)


class Judge(NamedTuple):
    """The model whose proxies choose candidates, or compare choices."""

    model: InferenceModel
    kind: Proxy
    record: ModelRecord


@dataclass(frozen=True)
class Console:
    """The callbacks of a selection: `say` prints a line, `bar` opens a progress bar."""

    say: Callable[[str], object]
    bar: Callable[[str, int], AbstractContextManager[Advance]]  # of a name, and so many units


def select(request: SelectRequest, runtime: Runtime, console: Console) -> Subset:
    """Chooses the core-set of a request; equal on every rank. Collective.

    Raises MtcliError where the model's weights, the data or the amount are wrong.
    """
    world = world_axis(runtime.rank, runtime.world, runtime.recorder)
    if request.model is None:
        config, judge_by = config_of(request, None, runtime.world, None), None
    else:
        where = request.model, request.overrides, runtime
        opened = open_model(*where, encoders=True, base=request.base)
        checkpoint = opened.checkpoint
        base = base_of(checkpoint).folder
        source = CheckpointFolder(checkpoint.format, checkpoint.folder, base=base)
        config = config_of(request, source, runtime.world, checkpoint.model)
        record = ModelRecord(path=request.model, hash=weights_hash(checkpoint))
        judge_by = Judge(replace(opened.scorer, config=config), request.proxy, record)
    candidates = together(world, lambda: _opened(config, request))
    work = Work(world, runtime.device, config.seed, request.greedy)
    return choose_from(candidates, request, judge_by, work, console)


def _opened(config: RunConfig, request: SelectRequest) -> Candidates:
    candidates = open_candidates(config)
    if request.method != "dsir":
        return candidates
    everyone, target = np.arange(len(candidates)), open_tokens(config, request.target)
    return replace(candidates, groups=[everyone], shares=[1.0], target=target)


def choose_from(
    candidates: Candidates,
    request: SelectRequest,
    judge_by: Judge | None,
    work: Work,
    console: Console,
) -> Subset:
    """Chooses from candidates, and compares with as many random ones. Collective."""
    sizes = [] if request.cover is not None else _budgets(candidates, request)
    _announce(candidates, request, judge_by, sum(sizes), console)
    proxies = None
    if judge_by is not None:
        with console.bar("proxies", len(candidates)) as advance:
            proxies = _proxies(judge_by, candidates, advance)
    target = candidates.target
    steps = sum(sizes) if target is None else len(target) + 2 * len(candidates)
    with console.bar("choose", steps + (len(candidates) if proxies is not None else 0)) as advance:
        reporting = replace(work, advance=advance)
        chosen = _chosen(candidates, request, proxies, sizes, reporting)
    random = chosen if request.method == "random" else None
    if proxies is not None and random is None:
        sizes = [int(np.isin(chosen.indices, group).sum()) for group in candidates.groups]
        with console.bar("compare with random", len(candidates)) as advance:
            random = _at_random(candidates, proxies, sizes, replace(work, advance=advance))
    return _record(candidates, request, judge_by, work.seed, (chosen, random))


def _proxies(judge_by: Judge, candidates: Candidates, advance: Advance) -> Tensor:
    if isinstance(candidates.data, ExampleRows):
        return example_proxies(judge_by.model, candidates.data, advance)
    return sequence_proxies(judge_by.model, candidates.data, judge_by.kind, advance)


def _chosen(
    candidates: Candidates,
    request: SelectRequest,
    proxies: Tensor | None,
    sizes: list[int],
    work: Work,
) -> Chosen:
    groups = candidates.groups
    if request.method == "random":
        return _at_random(candidates, proxies, sizes, work)
    if request.method == "craig":
        assert proxies is not None, "core-sets are chosen by proxies"
        target = Quota(sizes, request.cover)
        return _by_shares(choose(proxies, groups, target, work), proxies, candidates)
    assert isinstance(candidates.data, TokenSequences) and candidates.target is not None
    where = candidates.data, candidates.target, sizes[0], work.seed, work.advance
    return _evenly(candidates, proxies, [resample(*where).tolist()], work)


def _at_random(
    candidates: Candidates, proxies: Tensor | None, sizes: list[int], work: Work
) -> Chosen:
    orders = random_orders(candidates.groups, sizes, work.seed)
    return _evenly(candidates, proxies, orders, work)


def _evenly(
    candidates: Candidates, proxies: Tensor | None, orders: list[list[int]], work: Work
) -> Chosen:
    """Gives orders without weights equal weights within each group."""
    chosen = (
        unjudged(orders) if proxies is None else judge(proxies, candidates.groups, orders, work)
    )
    return _by_shares(evenly_weighed(chosen, candidates.groups), proxies, candidates)


def _by_shares(chosen: Chosen, proxies: Tensor | None, candidates: Candidates) -> Chosen:
    """Scales the weights of each group from its size to its share of all candidates.

    Error and bound are those of the unscaled weights.
    """
    if proxies is not None:
        chosen = with_error(chosen, proxies)
    total, weights = sum(candidates.shares), chosen.weights.copy()
    for group, share in zip(candidates.groups, candidates.shares, strict=True):
        factor = share / total * len(candidates) / len(group)
        weights[np.isin(chosen.indices, group)] *= factor
    return chosen._replace(weights=weights)


def _budgets(candidates: Candidates, request: SelectRequest) -> list[int]:
    total = total_of(request.fraction, request.size, len(candidates))
    return budgets_of([len(group) for group in candidates.groups], candidates.shares, total)


def _announce(
    candidates: Candidates,
    request: SelectRequest,
    judge_by: Judge | None,
    size: int,
    console: Console,
) -> None:
    kind = "classes" if isinstance(candidates.data, ExampleRows) else "sources"
    what = f"{size:,} sequences" if size else f"those that cover to {request.cover:g}"
    total = (
        f"{len(candidates):,} of {candidates.seq_len:,} tokens in {len(candidates.groups)} {kind}"
    )
    console.say(f"{request.method} chooses {what} of {total}")
    if judge_by is None:
        return
    width = _width(judge_by, candidates)
    sizes = [len(group) for group in candidates.groups]
    gib = planned_bytes(sizes, width) / 2**30
    console.say(
        f"{judge_by.kind} proxies of {width} numbers; at most {gib:.2f} GiB besides the model"
    )


def _width(judge_by: Judge, candidates: Candidates) -> int:
    if isinstance(candidates.data, ExampleRows):
        model = judge_by.model.config.model
        return RACE_CHOICES if candidates.format == "race" else model.num_labels
    return proxy_width(judge_by.model, judge_by.kind)


def _record(
    candidates: Candidates,
    request: SelectRequest,
    judge_by: Judge | None,
    seed: int,
    results: tuple[Chosen, Chosen | None],
) -> Subset:
    (chosen, random), target = results, candidates.target
    return Subset(
        method=request.method,
        proxy=judge_by and judge_by.kind,
        seed=seed,
        seq_len=candidates.seq_len,
        format=candidates.format,
        num_candidates=len(candidates),
        objective=chosen.objective,
        random_objective=random and random.objective,
        bound=chosen.bound,
        random_bound=random and random.bound,
        error=chosen.error,
        random_error=random and random.error,
        indices=tuple(chosen.indices.tolist()),
        weights=tuple(chosen.weights.tolist()),
        sources=_sources(candidates.data, candidates.counts, candidates.source_shares),
        model=judge_by and judge_by.record,
        target=() if target is None else _sources(target, target.counts, None),
    )


def _sources(
    data: TokenSequences | ExampleRows, counts: list[int], shares: Sequence[float] | None
) -> tuple[SourceRecord, ...]:
    weights: Sequence[float | None] = shares or [None] * len(counts)
    columns = zip(data.prefixes, data.files, counts, weights, strict=True)
    return tuple(
        SourceRecord(
            prefix=prefix,
            sha256=stated_hash(prefix),
            sampled=sampled_hash(files),
            candidates=count,
            share=share,
        )
        for prefix, files, count, share in columns
    )
