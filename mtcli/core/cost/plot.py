"""The simulated timeline as a picture, written with matplotlib (the `report` extra)."""

import os
from pathlib import Path

from mtcli.core.schedule.timeline import Timeline
from mtcli.core.spec.errors import failed, wrong

COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#72b7b2"}
LABELS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def save_timeline(timeline: Timeline, title: str, target: str) -> None:
    """Writes the timeline as a picture, a row per pipeline rank; the suffix says which kind.

    Raises MtcliError where matplotlib is missing, the suffix is unknown or the folder is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        hint = "pip install 'mtcli[report]'"
        raise wrong("--plot needs matplotlib, which is not installed", hint, "--plot") from None
    path = Path(target)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise wrong(
            f"--plot writes no {path.suffix or 'file without suffix'}", ".png, .svg or .pdf"
        )
    if not path.parent.is_dir():
        raise wrong(f"there is no folder {str(path.parent)!r}", "create it first", "--plot")
    figure = Figure(figsize=(12, 1.5 + 0.3 * timeline.num_ranks), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="seconds", ylabel="pipeline rank")
    for kind in sorted({span.op.kind for span in timeline.spans}):
        for rank in range(timeline.num_ranks):
            bars = [
                (span.start, span.end - span.start)
                for span in timeline.spans
                if span.rank == rank and span.op.kind == kind
            ]
            label = LABELS[kind] if rank == 0 else None
            axes.broken_barh(
                bars, (rank - 0.4, 0.8), color=COLORS[kind], edgecolor="white", lw=0.3, label=label
            )
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(LABELS))
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(aside, dpi=150)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise failed(f"{target} cannot be written: {error.strerror}", "name another file") from None
