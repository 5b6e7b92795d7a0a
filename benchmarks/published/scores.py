"""Scores the predictor against published runs: error in time per source, ranks, memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.untrusted import load_json
from mtcli.core.plan.certainty import RANGES, Spread, kind_of
from published.records import PublishedRun, read_record
from published.software import PUBLISHED, PublishedPhysics

Json = dict[str, Any]

FEW = Path(__file__).parent / "few.json"  # four published runs, to try what reads records
SHOWN_REASONS = 20  # of records that cannot be read, where none can


@dataclass(frozen=True)
class Scored:
    """A record, measured vs predicted."""

    record: PublishedRun
    seconds: float
    memory_gib: float
    fits: bool

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less one."""
        return self.seconds / self.record.seconds - 1 if self.record.seconds else None

    @property
    def kind(self) -> str:
        """The run's kind, a key of RANGES where there are enough of it."""
        return kind_of(self.record.work, self.record.device)

    def lies_in(self, known: Spread) -> bool:
        """Whether plan's range holds the measured seconds."""
        return known.low <= (self.record.seconds or 0.0) / self.seconds <= known.high

    def as_dict(self) -> Json:
        """The run's figures, for `--json`."""
        record = self.record
        return {
            "id": record.id,
            "source": record.source,
            "judges": record.judges,
            "seconds": record.seconds,
            "predicted_seconds": self.seconds,
            "error": self.error,
            "memory_gb": record.memory_gb,
            "predicted_memory_gib": self.memory_gib,
            "out_of_memory": record.out_of_memory,
            "fits": self.fits,
        }


def read_records(path: str) -> tuple[list[PublishedRun], list[str]]:
    """The records of a JSON list, and a line for each that describes no step to predict.

    A folder stands for the lists in its *.json files. An object with `columns` and `rows` stands
    for as many records that share its other fields. Raises MtcliError where a file is no such
    list, or no record can be predicted.
    """
    folder = Path(path)
    files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    records, left_out = [], []
    for index, row in enumerate(row for file in files for row in _rows(file)):
        try:
            records.append(read_record(row))
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            name = row.get("id", index) if isinstance(row, dict) else index
            left_out.append(f"{name}: {_reason(error)}")
    if not records:
        none = Problem(f"{path} holds no run that can be predicted")
        each = [Problem(f"record {line}") for line in left_out[:SHOWN_REASONS]]
        raise MtcliError(none, *each, hint="docs/reference/plan.md says what a record holds")
    return records, left_out


def _rows(file: Path) -> list[Any]:
    rows = load_json(
        file, "see docs/reference/plan.md", "name a JSON list of records, or a folder of them"
    )
    if not isinstance(rows, list):
        raise wrong(f"{file} holds no list of records", "see docs/reference/plan.md")
    return [row for group in rows for row in _expanded(group)]


def _expanded(group: Any) -> Iterator[Any]:
    """Yields the records of a group: a column such as `parallel.tp` is a field of a table."""
    if not (isinstance(group, dict) and {"columns", "rows"} <= set(group)):
        yield group
        return
    shared = {name: field for name, field in group.items() if name not in ("columns", "rows")}
    for values in group["rows"]:
        record = deepcopy(shared)
        for column, value in zip(group["columns"], values, strict=True):
            *table, field = column.split(".")
            (record.setdefault(table[0], {}) if table else record)[field] = value
        yield record


def score(records: Sequence[PublishedRun], physics: PublishedPhysics = PUBLISHED) -> list[Scored]:
    """Predicts each record, in order."""
    scored, known = [], {}
    for record in records:
        key = record.work, record.device
        if key not in known:  # sources print the same run again and again
            known[key] = record.predict(physics)
        prediction = known[key]
        used = prediction.memory.total / 2**30
        block = prediction.costs.block
        seconds = block.total if record.of_block else prediction.step_seconds
        scored.append(Scored(record, seconds, used, prediction.fits))
    return scored


def summarize(scored: Sequence[Scored]) -> Json:
    """Errors in time over all and per source, rank correlations, memory and out-of-memory rows."""
    sources = sorted({run.record.source for run in scored})
    per_source = {source: _of_source(scored, source) for source in sources}
    errors = [abs(run.error) for run in scored if run.error is not None]
    unsaid = [run.record.id for run in scored if run.error is None and not run.record.out_of_memory]
    medians = [of["median_absolute_error"] for of in per_source.values() if of["timed"]]
    judged = [abs(run.error) for run in scored if run.error is not None and run.record.judges]
    ranges = [(run, RANGES.get(run.kind)) for run in scored if run.record.seconds]
    inside = Counter(run.kind for run, known in ranges if known and run.lies_in(known))
    with_memory = [run for run in scored if run.record.memory_gb]
    memory_errors = [
        abs(run.memory_gib / float(run.record.memory_gb or 1) - 1) for run in with_memory
    ]
    out = [run for run in scored if run.record.out_of_memory]
    return {
        "records": len(scored),
        "timed": len(errors),
        "median_absolute_error": median(errors) if errors else None,
        "mean_of_source_medians": mean(medians) if medians else None,
        "judged": len(judged),
        "judged_median_absolute_error": median(judged) if judged else None,
        "in_range": {
            kind: [inside[kind], runs]
            for kind, runs in Counter(run.kind for run, known in ranges if known).items()
        },
        "memory_records": len(with_memory),
        "median_absolute_memory_error": median(memory_errors) if memory_errors else None,
        "out_of_memory_right": sum(not run.fits for run in out),
        "out_of_memory": len(out),
        "measured_runs_said_to_fit": sum(run.fits for run in with_memory),
        "untimed": unsaid,
        "sources": per_source,
        "runs": [run.as_dict() for run in scored],
    }


def summary_rows(summary: Json) -> list[list[str]]:
    """Rows of a table: one per source, and all of them at the end."""
    rows = [
        [
            source,
            f"{of['timed']}",
            _percent(of["median_error"]),
            _percent(of["median_absolute_error"]),
            f"{of['judged']}",
            _percent(of["judged_median_absolute_error"]),
            *(_correlation(of[key]) for key in ("spearman", "spearman_seconds")),
        ]
        for source, of in summary["sources"].items()
    ]
    overall = [f"{summary['timed']}", "", _percent(summary["median_absolute_error"])]
    overall += [f"{summary['judged']}", _percent(summary["judged_median_absolute_error"]), "", ""]
    means = ["", "", _percent(summary["mean_of_source_medians"]), "", "", "", ""]
    return [*rows, ["all", *overall], ["mean of the sources' medians", *means]]


def memory_line(summary: Json) -> str:
    """Compares printed memory, and runs that went out of it, with the prediction, in a line."""
    runs, out = summary["memory_records"], summary["out_of_memory"]
    return (
        f"memory: median |error| {_percent(summary['median_absolute_memory_error']) or 'unknown'} "
        f"over {runs} runs, {summary['measured_runs_said_to_fit']} of them said to fit; "
        f"{summary['out_of_memory_right']} of {out} that ran out said not to"
    )


def range_lines(summary: Json) -> list[str]:
    """Says of each kind how many runs lie in plan's range."""
    counts = summary["in_range"].items()
    return [f"in the range of {kind}: {inside} of {runs}" for kind, (inside, runs) in counts]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation of two lists; None for fewer than 3 pairs or where one is constant."""
    x, y = _ranks(a), _ranks(b)
    if len(x) < 3:
        return None
    mx, my = mean(x), mean(y)
    top = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    bottom = sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y)
    return top / bottom**0.5 if bottom else None


def _of_source(scored: Sequence[Scored], source: str) -> Json:
    of_source = [run for run in scored if run.record.source == source]
    timed = [(run, run.record.seconds) for run in of_source if run.record.seconds]
    errors = [run.error for run, _ in timed if run.error is not None]
    judged = [abs(run.error or 0.0) for run, _ in timed if run.record.judges]
    works = [run.record.work for run, _ in timed]
    sizes = [(work.tokens_per_step, work.layout.world) for work in works]
    # Rates per GPU, so that a larger batch or world does not make the ranking easy.
    said = [t / run.seconds / w for (run, _), (t, w) in zip(timed, sizes, strict=True)]
    was = [t / seconds / w for (_, seconds), (t, w) in zip(timed, sizes, strict=True)]
    seconds = [run.seconds for run, _ in timed], [seconds for _, seconds in timed]
    return {
        "records": len(of_source),
        "timed": len(timed),
        "median_error": median(errors) if errors else None,
        "median_absolute_error": median(map(abs, errors)) if errors else None,
        "judged": len(judged),
        "judged_median_absolute_error": median(judged) if judged else None,
        "spearman": spearman(said, was),
        "spearman_seconds": spearman(*seconds),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, ties sharing their mean."""
    first: dict[float, int] = {}
    for index, value in enumerate(sorted(values)):
        first.setdefault(value, index)
    count = Counter(values)
    return [first[value] + (count[value] - 1) / 2 for value in values]


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no field {error}"
    if isinstance(error, AttributeError | TypeError):
        return f"not a record: {error}"
    return " ".join(str(error).split())[:120]


def _correlation(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
