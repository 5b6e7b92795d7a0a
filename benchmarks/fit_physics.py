"""Fits the constants of the time model (`mtcli/core/plan/gpu_time.py`) to published runs, and tells
how well constants that were fitted on other runs predict each source.

Least squares on logarithms, softened so that a run that cannot be what its record says counts
little. Every source has the same weight, as one of them has two thirds of all runs. Runs that judge
(`PublishedRun.judges`, about half of each source) are left out of every fit.

    python benchmarks/fit_physics.py runs.json                # fit on all, print the constants
    python benchmarks/fit_physics.py runs.json --hold-out     # each source, and halves, left out
    python benchmarks/fit_physics.py runs.json --ranges       # of each kind of run, left out
    python benchmarks/fit_physics.py runs.json --check other.json
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from math import exp, log, sqrt
from statistics import mean, median

from arguments import Arguments, write_rows
from published.records import PublishedRun
from published.scores import FEW, Scored, read_records, score, summarize
from published.software import PUBLISHED, PublishedPhysics
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares
from scipy.stats import beta

from mtcli.core.plan.certainty import SHARE, kind_of
from mtcli.core.plan.search import lower_bound
from mtcli.core.plan.step_time import block_costs

LARGEST = 0.5  # a ratio of 1.65 either way counts no more than this in the loss that is printed
CONFIDENCE = 0.9  # that a range holds SHARE of the runs of its kind
SMALL = 0.1  # up to here the square counts, beyond it the distance
FITTED = ("gemm", "narrow_gemm", "attention", "unfused_attention", "misaligned", "traffic")
FITTED += ("network", "shard_overlap", "step_overhead", "blackwell_gemm")
FITTED += ("eager_call", "eager_collective")
SHARES = {"gemm", "narrow_gemm", "attention", "unfused_attention", "misaligned", "memory", "link"}
SHARES |= {"network", "shard_overlap", "blackwell_gemm"}


def main() -> None:
    options = _options()
    records = _timed(read_records(options.runs)[0])
    if options.hold_out:
        return _print_held_out(records, options.processes)
    if options.ranges:
        return _print_ranges(records, options.processes)
    fitted = fit(_fitted(records), fields=options.fields)
    write_rows(options.json, asdict(fitted))
    for name, value in asdict(fitted).items():
        print(f"{name:20} {value:.4g}  (was {getattr(PUBLISHED, name):.4g})")
    for title, chosen in (("before", PUBLISHED), ("after", fitted)):
        _print_errors(f"{options.runs}, {title}", score(records, chosen))
        judging = [record for record in records if record.judges]
        _print_errors(f"those that judge, {title}", score(judging, chosen))
        if options.check:
            others = _timed(read_records(options.check)[0])
            _print_errors(f"{options.check}, {title}", score(others, chosen))


def fit(
    records: Sequence[PublishedRun],
    start: PublishedPhysics = PUBLISHED,
    fields: Sequence[str] = (),
) -> PublishedPhysics:
    """The constants with the least loss on some records.

    The pipeline is simulated once per record; while constants move, its step is taken as the same
    multiple of the search's lower bound, which is much quicker to know.
    """
    names = list(fields or FITTED)
    first = score(records, start)
    over = [one.seconds / _bound(one.record, start) for one in first]
    counts = Counter(record.source for record in records)
    share = [1 / len(counts) / counts[one.source] for one in records]

    def off(logs: Sequence[float]) -> list[float]:
        tried = replace(start, **{n: exp(x) for n, x in zip(names, logs, strict=True)})
        return [
            log(ratio * _bound(one, tried) / one.seconds) * sqrt(weight * len(records))
            for one, ratio, weight in zip(records, over, share, strict=True)
        ]

    begin = [log(getattr(start, name)) for name in names]
    top = [1e-9 if name in SHARES else 9.0 for name in names]
    low = [min(x - 2.5, -1e-6) for x in begin]
    begin = [min(x, -1e-6) if name in SHARES else x for x, name in zip(begin, names, strict=True)]
    found = least_squares(
        off, begin, bounds=(low, top), loss="soft_l1", f_scale=SMALL, diff_step=0.01, max_nfev=25
    )
    return replace(start, **{n: exp(x) for n, x in zip(names, found.x, strict=True)})


def _bound(record: PublishedRun, physics: PublishedPhysics) -> float:
    device = record.reached(physics)
    if record.of_block:
        return block_costs(record.work, device).block.total
    return lower_bound(record.work, device)


def loss(scored: Sequence[Scored]) -> float:
    """The mean over records and the mean over sources of what is off, in equal parts."""
    by_source: dict[str, list[float]] = {}
    for one in scored:
        off = min(LARGEST, abs(log(one.seconds / one.record.seconds)))
        by_source.setdefault(one.record.source, []).append(off)
    whole = mean(off for found in by_source.values() for off in found)
    return (whole + mean(mean(found) for found in by_source.values())) / 2


def _print_held_out(records: list[PublishedRun], processes: int) -> None:
    rows, errors = [], []
    with ProcessPoolExecutor(processes) as pool:
        for source, scored in _left_out(records, pool):
            found = [abs(one.error) for one in scored]
            errors += found
            rows.append([source, str(len(found)), f"{median(found):.1%}"])
    medians = [float(row[2][:-1]) / 100 for row in rows]
    rows.append(["all", str(len(errors)), f"{median(errors):.1%}"])
    rows.append(["mean of the sources' medians", "", f"{mean(medians):.1%}"])
    _print_table("Each source predicted by constants fitted on the others", rows)


def _left_out(
    records: list[PublishedRun], pool: ProcessPoolExecutor
) -> Iterator[tuple[str, list[Scored]]]:
    """Yields each source with its runs, predicted by constants that were fitted on the others."""
    sources = sorted({record.source for record in records})
    yield from zip(sources, pool.map(partial(_without, records), sources), strict=True)


def _print_ranges(records: list[PublishedRun], processes: int) -> None:
    """Prints RANGES of `mtcli/core/plan/certainty.py`: of n errors those of one rank from either
    end, between which SHARE of further runs of a kind lie with a confidence of CONFIDENCE.

    Between ranks r from either end lies a share that is distributed as Beta(n - 2 r + 1, 2 r),
    whatever the errors are (Wilks, Annals of Mathematical Statistics 12, 1941).
    """
    errors: dict[str, list[float]] = {}
    with ProcessPoolExecutor(processes) as pool:
        scored = [one for _, found in _left_out(records, pool) for one in found]
    for one in scored:
        kind = kind_of(one.record.work, one.record.device)
        errors.setdefault(kind, []).append(one.record.seconds / one.seconds)
    for kind, found in sorted(errors.items()):
        found.sort()
        count = len(found)
        ranks = [r for r in range(1, count // 2) if _sure(count, r) >= CONFIDENCE]
        if ranks:
            low, high = found[ranks[-1] - 1], found[-ranks[-1]]
            print(f'    "{kind}": Spread({low:.3f}, {high:.3f}, {count}),')


def _sure(count: int, rank: int) -> float:
    """The probability that SHARE of further errors lie between ranks from either end of `count`."""
    return float(beta.sf(SHARE, count - 2 * rank + 1, 2 * rank))


def _without(records: list[PublishedRun], source: str) -> list[Scored]:
    """A source's runs, predicted by constants that were fitted on the others; those of software
    that few others ran are kept."""
    others = [record for record in _fitted(records) if record.source != source]
    fields = [name for name in FITTED if not name.startswith("eager")]
    fitted = fit(others, fields=fields)
    return score([record for record in records if record.source == source], fitted)


def _fitted(records: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs that constants are fitted on; all, where all of them judge."""
    return [record for record in records if not record.judges] or list(records)


def _timed(records: Sequence[PublishedRun]) -> list[PublishedRun]:
    return [record for record in records if record.seconds]


def _print_errors(title: str, scored: list[Scored]) -> None:
    found = summarize(scored)
    rows = [
        [name, str(of["timed"]), f"{of['median_error']:+.1%}", f"{of['median_absolute_error']:.1%}"]
        + [f"{of['spearman']:.2f}" if of["spearman"] is not None else ""]
        for name, of in found["sources"].items()
    ]
    whole = found["median_absolute_error"], found["mean_of_source_medians"]
    rows.append([f"loss {loss(scored):.4f}", str(len(scored)), "", *(f"{x:.1%}" for x in whole)])
    _print_table(title, rows)


def _print_table(title: str, rows: list[list[str]]) -> None:
    table = Table(*("" for _ in rows[0]), title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def _options() -> argparse.Namespace:
    parser = Arguments(__doc__, fields=["gemm"])
    words = "a JSON list of records, see docs/reference/plan.md [published/few.json]"
    parser.add_argument("runs", nargs="?", default=str(FEW), help=words)
    parser.add_argument("--hold-out", action="store_true", help="predict what is not fitted on")
    parser.add_argument("--ranges", action="store_true", help="print the ranges of kinds of runs")
    parser.add_argument("--check", metavar="FILE", help="records to score with the result as well")
    parser.add_argument("--fields", nargs="*", default=(), help="fit these constants [FITTED]")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
