"""Scores the items of a task file: picks, accuracies under each normalisation, and records."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mtcli.core.evaluate.contamination import is_contaminated
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.statistics import accuracy_of
from mtcli.core.evaluate.tasks.items import Asked, ask, read_items
from mtcli.core.evaluate.tasks.shots import INTERVAL_COVERS, Draw, draw_shots, render_shot
from mtcli.core.evaluate.tasks.task import (
    PreparedTask,
    Record,
    Report,
    TaskOptions,
    exp,
    part_report,
)
from mtcli.core.evaluate.tasks.task_file import TaskFile, metric_name

Lengths = Callable[[Asked], list[int]]


def prepare_task(
    task: TaskFile, path: Path, tokenizer: EvalTokenizer, options: TaskOptions
) -> PreparedTask:
    """Prepares a task file's items, each after `options.shots` solved examples.

    Raises MtcliError with file and line of the first bad row.
    """
    items, pool = read_items(task, path, options.limit, options.shots > 0)
    draws = draw_shots(options.shots_per, Draw(pool, options.shots, options.seed), items)
    render = cache(partial(render_shot, task, tokenizer))
    asked = [
        ask(task, item, [render(shot) for shot in drawn], tokenizer, options.max_seq_len)
        for item, drawn in zip(items, draws, strict=True)
    ]
    if (ngrams := options.contaminated) is not None:
        asked = [
            entry._replace(
                contaminated=is_contaminated((*entry.item.prompts, *entry.item.choices), ngrams)
            )
            for entry in asked
        ]
    ends = np.cumsum([len(entry.requests) for entry in asked]).tolist()
    return PreparedTask(
        num_items=len(items),
        requests=[request for entry in asked for request in entry.requests],
        report=partial(_report, task, asked, ends, options, pool.source),
        ends=ends,
        hashes=[_hash(task, entry) for entry in asked],
        record=lambda number, scores: _record(task, asked[number], scores),
    )


def _hash(task: TaskFile, asked: Asked) -> str:
    """Hashes an item's texts, to identify it under any tokenizer."""
    parts = (asked.context, *asked.item.prompts, task.delimiter, *asked.item.choices)
    if "unconditional" in task.normalisations:
        parts = (*parts, task.unconditional)
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def _record(task: TaskFile, asked: Asked, scores: Sequence[Score]) -> Record:
    """Builds an item's line in the file of items: its answer, log-likelihoods and pick."""
    item = asked.item
    record: Record = {"id": item.id}
    record |= {name: getattr(item, name) for name in ("group", "cluster") if getattr(item, name)}
    record |= {} if asked.contaminated is None else {"contaminated": asked.contaminated}
    record |= {"shots": asked.num_shots, "loglikelihoods": [score.logprob for score in scores]}
    if item.answer is None:
        return record | {"is_greedy": scores[0].is_greedy, "correct": scores[0].is_greedy}
    picks = _picks(task, asked, scores)
    record |= {"answer": item.answer, "pick": picks["accuracy"]}
    record |= {"picks": picks} if len(picks) > 1 else {}
    return record | {"correct": picks["accuracy"] == item.answer}


def _picks(task: TaskFile, asked: Asked, scores: Sequence[Score]) -> dict[str, int]:
    """Picks the best answer under each normalisation, the first of equal ones, by name of the
    accuracy."""
    count = asked.item.num_answers
    raw = np.array([score.logprob for score in scores[:count]])
    by_metric = {"accuracy": raw}
    for name in task.normalisations:
        if name == "unconditional":
            by_metric[metric_name(name)] = raw - [score.logprob for score in scores[count:]]
        else:
            by_metric[metric_name(name)] = raw / np.array(LENGTHS[name](asked))
    return {name: int(values.argmax()) for name, values in by_metric.items()}


def _of_texts(measure: Callable[[str], int]) -> Lengths:
    def lengths(asked: Asked) -> list[int]:
        measured = [measure(choice) for choice in asked.item.choices]
        return measured * (asked.item.num_answers // len(measured))

    return lengths


LENGTHS: dict[str, Lengths] = {
    "token": lambda asked: [one.num_targets for one in asked.requests[: asked.item.num_answers]],
    "character": _of_texts(len),
    "byte": _of_texts(lambda text: len(text.encode())),
}


def _report(
    task: TaskFile,
    asked: Sequence[Asked],
    ends: Sequence[int],
    options: TaskOptions,
    shots_from: str,
    scores: Sequence[Score],
) -> Report:
    """Reports the accuracies, each with its interval; see docs/reference/eval.md."""
    spans = [scores[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    clusters = [entry.item.cluster for entry in asked] if task.cluster else None
    if not task.answer:
        right = [span[0].is_greedy for span in spans]
        report = _accuracy(right, clusters)
        nll = -sum(span[0].logprob for span in spans)
        report |= {"perplexity": exp(nll / len(spans)), "nll_sum": nll}
        groups = {"accuracy": right}
    else:
        picks = [_picks(task, *both) for both in zip(asked, spans, strict=True)]
        groups = {
            name: [
                pick[name] == entry.item.answer for pick, entry in zip(picks, asked, strict=True)
            ]
            for name in picks[0]
        }
        report = _accuracy(groups["accuracy"], clusters)
        for name in list(groups)[1:]:
            score = accuracy_of(groups[name], clusters)
            report |= {name: score.value, name.replace("accuracy", "interval"): score.interval}
    report |= _by_group(task, asked, groups[task.metric])
    report |= _by_contamination(asked, groups[task.metric])
    report |= {"metric": task.metric, "version": task.version}
    if options.shots:
        counts = [entry.num_shots for entry in asked]
        report |= {"shots": options.shots, "shots_per": options.shots_per}
        report |= {"interval_covers": INTERVAL_COVERS[options.shots_per]}
        report |= {"shots_mean": float(np.mean(counts)), "shots_min": min(counts)}
        report |= {"shots_from": shots_from}
    return report


def _accuracy(right: Sequence[bool], clusters: Sequence[str] | None) -> Report:
    accuracy = accuracy_of(right, clusters)
    report = {"accuracy": accuracy.value, "interval": accuracy.interval}
    report |= {"standard_error": accuracy.standard_error}
    if clusters is not None:
        report |= {"num_clusters": len(set(clusters))}
    return report | {"correct": sum(right), "total": len(right)}


def _by_group(task: TaskFile, asked: Sequence[Asked], right: Sequence[bool]) -> Report:
    """Reports for each group its accuracy, None without items, and its number of items."""
    report: Report = {}
    for group in task.groups:
        pairs = zip(asked, right, strict=True)
        report |= part_report(group, [x for entry, x in pairs if entry.item.group == group])
    return report


def _by_contamination(asked: Sequence[Asked], right: Sequence[bool]) -> Report:
    """Reports the accuracies of clean and of contaminated items, None without items."""
    report: Report = {}
    for name, is_dirty in (("clean", False), ("contaminated", True)):
        pairs = zip(asked, right, strict=True)
        report |= part_report(name, [x for entry, x in pairs if entry.contaminated is is_dirty])
    return report if asked[0].contaminated is not None else {}
