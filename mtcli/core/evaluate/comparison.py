"""Compares two evaluations item by item: which model is better at each task, and how significantly.

McNemar's exact test for accuracies, a paired z-test for log-likelihoods, which a cloze has besides
its accuracy, and Holm's correction over tasks. The verdict is "tied" for an adjusted p-value of at
least 5 %, or a bootstrap interval, over passages where items share them, that contains 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_number, load_json, shown
from mtcli.core.evaluate.journal import read_items
from mtcli.core.evaluate.statistics import (
    LEVEL,
    bootstrap,
    compare_accuracies,
    holm,
    minimum_detectable,
    standard_error,
)
from mtcli.core.evaluate.tasks.task import Record, Report

NEEDED = "give two results of `mtcli eval --json FILE`, their files of items beside them"
FIELD = "--compare"


class Evaluated(NamedTuple):
    """A result of `mtcli eval`: the metric by which each task is published, and its items."""

    name: str
    checkpoint: str
    metrics: dict[str, str]
    items: dict[str, dict[tuple[str, int], Record]]  # task -> (id, which of that id)


def compare_files(a: str, b: str) -> Report:
    """Compares the items of every task that is in both results.

    Raises MtcliError where a file is missing or is no result, or where no item is in both.
    """
    first, second = read_result(a), read_result(b)
    tasks = [task for task in first.items if task in second.items]
    if not any(first.items[task].keys() & second.items[task].keys() for task in tasks):
        counts = " and ".join(
            f"{sum(map(len, side.items.values()))} items of {', '.join(side.items) or 'no task'}"
            for side in (first, second)
        )
        raise wrong(f"{a} and {b} share 0 items: {counts}", "evaluate both on one task", FIELD)
    report: Report = {"a": _about(first), "b": _about(second), "tasks": {}}
    published = {task: first.metrics.get(task, "accuracy") for task in tasks}
    for task, raw in _compared(first, second, dict.fromkeys(tasks, "accuracy")).items():
        report["tasks"][task] = raw
    more_metrics = {task: metric for task, metric in published.items() if metric != "accuracy"}
    more_metrics |= {task: "loss" for task in tasks if _is_cloze(first.items[task])}
    for task, more in _compared(first, second, more_metrics).items():
        report["tasks"][task][more_metrics[task]] = more
    return report


def read_result(path: str) -> Evaluated:
    """Reads a result, and its file of items in the same folder."""
    table = load_json(path, NEEDED, NEEDED, field=FIELD)
    tasks, named = (
        table.get(key) if isinstance(table, dict) else None for key in ("tasks", "items")
    )
    if not isinstance(tasks, dict) or not isinstance(named, str):
        raise wrong(f"{path} is no result of mtcli eval with items", NEEDED, FIELD)
    file = Path(path).parent / named
    try:
        records = read_items(file)
    except OSError as error:
        raise wrong(f"{file} cannot be read: {error.strerror}", NEEDED, FIELD) from None
    except ValueError as error:
        raise wrong(f"{file} is not JSON lines: {error}", NEEDED, FIELD) from None
    metrics = {name: report.get("metric", "accuracy") for name, report in tasks.items()
               if isinstance(report, dict)}  # fmt: skip
    for name, metric in metrics.items():
        if not isinstance(metric, str):
            said = f"{path}: the metric of {shown(name)} is {shown(metric)}, and no name"
            raise wrong(said, NEEDED, FIELD)
    items: dict[str, dict[tuple[str, int], Record]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for number, record in enumerate(records, start=1):
        if problem := _problem(record, metrics):
            raise wrong(f"{file}, line {number}: {problem}", NEEDED, FIELD)
        name = record["task"], record["id"]
        items.setdefault(record["task"], {})[record["id"], seen[name]] = record
        seen[name] += 1
    return Evaluated(path, str(table.get("checkpoint", "")), metrics, items)


TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # fields of an item that may be left out
    "correct": ("true or false", lambda value: isinstance(value, bool)),
    "answer": ("a whole number", lambda value: type(value) is int),
    "num_tokens": ("a whole number", lambda value: type(value) is int and value >= 0),
    "cluster": ("a text", lambda value: isinstance(value, str)),
    "picks": ("whole numbers by metric", lambda value: isinstance(value, dict)
              and all(type(pick) is int for pick in value.values())),
}  # fmt: skip


def _problem(record: Any, metrics: Mapping[str, str]) -> str | None:
    """Says why a line is no item of a task in `metrics`; None where it is one."""
    if not isinstance(record, dict) or not isinstance(record.get("loglikelihoods"), list):
        return "it is no item"
    if not all(isinstance(record.get(key), str) for key in ("task", "id", "hash")):
        return "it is no item"
    if not all(map(is_number, record["loglikelihoods"])):
        return "it is no item: a log-likelihood is no number"
    for key, (what, fits) in TYPES.items():
        if key in record and not fits(record[key]):
            return f"{key} is {shown(record[key])}, and not {what}"
    if "correct" in record:
        metric, picks = metrics.get(record["task"], "accuracy"), record.get("picks", {})
        if metric != "accuracy" and metric not in picks:
            return f"it has no pick of {shown(metric)}, the metric of its task"
        if picks and "answer" not in record:
            return "it has picks and no answer"
    # A choice may be impossible; what was to be predicted is not.
    is_odd = math.isnan if "answer" in record else lambda x: not math.isfinite(x)
    odd = [x for x in record["loglikelihoods"] if is_odd(x)]
    return f"a log-likelihood is {odd[0]}: the model is broken" if odd else None


def _about(result: Evaluated) -> dict[str, str]:
    return {"file": result.name, "checkpoint": result.checkpoint}


def _compared(a: Evaluated, b: Evaluated, metrics: dict[str, str]) -> dict[str, Report]:
    reports = {}
    for task, metric in metrics.items():
        shared = [key for key in a.items[task] if key in b.items[task]]
        pairs = [(a.items[task][key], b.items[task][key]) for key in shared]
        if pairs:
            kinds = {"correct" in record for pair in pairs for record in pair}
            if len(kinds) > 1:
                said = f"{task}: items are right or wrong in one result, and not in the other"
                raise wrong(said, "evaluate both on one task", FIELD)
            of_losses = metric == "loss" or not kinds.pop()
            reports[task] = _likelihoods(pairs) if of_losses else _accuracies(pairs, metric)
            reports[task]["total"] = len(pairs)
            reports[task]["other_prompts"] = sum(x["hash"] != y["hash"] for x, y in pairs)
    adjusted = holm({task: report["p_value"] for task, report in reports.items()})
    for task, report in reports.items():
        low, high = report["interval"]
        is_significant = adjusted[task] < LEVEL and not low <= 0 <= high
        b_is_better = (report["difference"] > 0) == (report["metric"] != "loss")
        verdict = ("b" if b_is_better else "a") if is_significant else "tied"
        report |= {"adjusted_p_value": adjusted[task], "verdict": verdict}
        if report["minimum_detectable"] is None:
            differs = report["difference"] or report.get("only_a")
            report["reason"] = "the differences have no spread" if differs else "no item differs"
    return reports


def _is_cloze(items: Mapping[tuple[str, int], Record]) -> bool:
    """Says whether the items are texts to predict, right where each token is the argmax."""
    return all(
        "correct" in record and "answer" not in record and len(record["loglikelihoods"]) == 1
        for record in items.values()
    )


Pairs = Sequence[tuple[Record, Record]]


def _accuracies(pairs: Pairs, metric: str) -> Report:
    a, b = ([_is_right(pair[side], metric) for pair in pairs] for side in (0, 1))
    comparison = compare_accuracies(a, b, _clusters(pairs))
    return {
        "metric": metric,
        "a": sum(a) / len(a),
        "b": sum(b) / len(b),
        **comparison._asdict(),
        "only_a": sum(x and not y for x, y in zip(a, b, strict=True)),
        "only_b": sum(y and not x for x, y in zip(a, b, strict=True)),
    }


def _is_right(record: Record, metric: str) -> bool:
    picks = record.get("picks", {})
    return bool(picks[metric] == record["answer"] if metric in picks else record["correct"])


def _clusters(pairs: Pairs) -> list[str] | None:
    clusters = [pair[0].get("cluster") for pair in pairs]
    return None if None in clusters else [str(cluster) for cluster in clusters]


def _likelihoods(pairs: Pairs) -> Report:
    """Compares the mean loss of a token, over pairs of windows, or that of
    an item's target."""
    tokens = np.array([pair[0].get("num_tokens", 1) for pair in pairs], np.float64)
    if not tokens.sum():
        raise wrong(f"{len(pairs)} items hold 0 tokens", NEEDED, FIELD)
    a, b = (np.array([-sum(pair[side]["loglikelihoods"]) for pair in pairs]) for side in (0, 1))
    scale = len(tokens) / tokens.sum()
    differences = (b - a) * scale
    if not np.isfinite(differences).all():
        raise wrong(
            f"log-likelihoods of {len(pairs)} items are too large to compare", NEEDED, FIELD
        )
    clusters = _clusters(pairs)
    error = standard_error(differences, clusters)
    z = abs(float(differences.mean())) / error if error else 0.0
    return {
        "metric": "loss",
        "a": float(a.mean() * scale),
        "b": float(b.mean() * scale),
        "difference": float(differences.mean()),
        "interval": bootstrap(differences, clusters),
        "p_value": 2 * NormalDist().cdf(-z),
        "minimum_detectable": minimum_detectable(differences, clusters),
    }
