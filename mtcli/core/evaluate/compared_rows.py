"""Words a comparison of two evaluations as the rows of a table."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtcli.core.evaluate.tasks.task import Report

COLUMNS = "task", "metric", "A", "B", "B - A", "95 % interval", "p", "Holm", "MDE", "better"


def compared_rows(result: "Report") -> list[list[str]]:
    """Returns a row for each task of a result of `compare_files`, and for its further metrics."""
    rows = []
    for task, report in result["tasks"].items():
        more = [value for value in report.values() if isinstance(value, dict)]
        rows += [_compared_row(task, metric) for metric in (report, *more)]
    return rows


def _compared_row(task: str, report: "Report") -> list[str]:
    low, high = report["interval"]
    verdict = report["verdict"].upper()
    if verdict == "TIED":
        verdict = f"tied: {report['reason']}" if "reason" in report else "tied"
    figures = [report[key] for key in ("p_value", "adjusted_p_value", "minimum_detectable")]
    return [
        task,
        report["metric"],
        show_figure(report["a"]),
        show_figure(report["b"]),
        f"{report['difference']:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        *map(show_figure, figures),
        verdict,
    ]


def show_figure(value: Any) -> str:
    """Words a figure of an evaluation."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " to ".join(map(show_figure, value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}"
