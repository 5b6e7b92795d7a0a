"""Scores `mtcli plan` on published runs: prints the error in time per source, and memory.

docs/reference/plan.md says what a record holds. A folder stands for the lists in its *.json files.

    python benchmarks/validate_plan.py runs.json --plot scatter.png
    python benchmarks/validate_plan.py FOLDER --json -
"""

import argparse
import sys
from collections.abc import Sequence

from arguments import Arguments
from published.scores import (
    FEW,
    Scored,
    memory_line,
    range_lines,
    read_records,
    score,
    summarize,
    summary_rows,
)

from mtcli.commands.output import write_json
from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.console import print_table

COLUMNS = ("source", "runs", "median error", "median |error|", "judging", "their |error|")
COLUMNS += ("rank by tokens/s", "by time")


def main() -> int:
    options = _options()
    try:
        return _validate(options)
    except MtcliError as error:
        print(error, file=sys.stderr)
        return 2


def _validate(options: argparse.Namespace) -> int:
    records, left_out = read_records(options.runs)
    for line in left_out:
        print(f"left out record {line}", file=sys.stderr)
    scored = score(records)
    data = summarize(scored) | {"left_out": left_out}
    if data["untimed"]:
        numbers = ", ".join(map(str, data["untimed"]))
        print(f"no step time printed in record {numbers}", file=sys.stderr)
    if options.json:
        write_json(data, options.json)
    if options.json != "-":
        print_table("Predicted against published step times", COLUMNS, summary_rows(data))
        print(memory_line(data), *range_lines(data), sep="\n")
    if options.plot:
        save_scatter(scored, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0


def save_scatter(scored: Sequence[Scored], target: str) -> None:
    """Writes predicted over measured seconds of every run: a colour per source, dots for runs that
    constants were fitted on, and crosses for those that judge."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.add_subplot(
        xlabel="published step time, seconds", ylabel="predicted, seconds", aspect="equal"
    )
    timed = [run for run in scored if run.record.seconds]
    for number, source in enumerate(sorted({run.record.source for run in timed})):
        for mark, judges in ((".", False), ("x", True)):
            runs = [
                run for run in timed if (run.record.source, run.record.judges) == (source, judges)
            ]
            pairs = [run.record.seconds for run in runs], [run.seconds for run in runs]
            label = f"{source}: {len(runs)} that judge" if judges else source
            axes.plot(*pairs, mark, color=f"C{number}", ms=4, alpha=0.6, label=label)
    seconds = [run.record.seconds or 1.0 for run in timed]
    ends = [min(seconds, default=1.0) / 2, max(seconds, default=1.0) * 2]
    axes.plot(ends, ends, color="black", lw=0.8)
    lower, upper = [0.8 * end for end in ends], [1.2 * end for end in ends]
    axes.fill_between(ends, lower, upper, color="black", alpha=0.08, lw=0, label="within 20 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.legend(loc="upper left", fontsize="xx-small")
    figure.savefig(target, dpi=150)


def _options() -> argparse.Namespace:
    parser = Arguments(__doc__, runs=str(FEW))
    words = "a JSON list of records, or a folder of such lists [published/few.json]"
    parser.add_argument("runs", nargs="?", default=str(FEW), help=words)
    parser.add_argument("--plot", metavar="FILE", help="draw predicted over published seconds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
