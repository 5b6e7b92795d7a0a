"""Prints a profile as text: tables for people, and the measured timeline above the planned one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Any

from mtcli.core.config.counts import counted
from mtcli.core.profile.figures import Json, Profile, fullest_stage, planned_memory
from mtcli.core.runtime.console import print_line, print_table, width
from mtcli.core.schedule.timeline import Timeline, draw

MIB = 2**20
SHOWN_KERNELS = 10
DRAWN_WIDTH = 100  # columns of a timeline, where there are as many


def show_measured(profile: Profile) -> None:
    """Prints the measurements: figures, shares by pipeline rank, memory, kernels, timeline."""
    data = profile.measured_json()
    print_table("", ("", "measured"), [row[:2] for row in summary_rows(data)])
    print_table("Share of the step", *share_rows(data), right=True)
    print_table("Memory (MiB)", *memory_rows(data), right=True)
    title = f"Longest kernels of rank 0, in the profiled step of {data['profiled_seconds']:.4g} s"
    print_table(title, *kernel_rows(data), right=True)
    late = [row for row in data["stragglers"] if row["times_median"] > 1.1]
    for row in late:
        times = f"{row['times_median']:.2f} times its replicas' median"
        print_line(f"straggler: rank {row['rank']} works {row['busy_seconds']:.4g} s, {times}")
    _print_timeline("Measured timeline", profile.measured, profile.measured.end)


def show_planned(profile: Profile) -> None:
    """Prints figures measured vs planned, where `mtcli plan` knows the device."""
    if profile.planned is None:
        return
    data = profile.as_json()
    rows = [*summary_rows(data)[:-1], *planned_memory_rows(data)]
    print_table("Beside the plan", ("", "measured", "planned"), rows)
    end = max(profile.measured.end, profile.planned.end)
    _print_timeline("Planned timeline", profile.planned, end)


def _print_timeline(title: str, timeline: Timeline, end: float) -> None:
    print_line(f"\n{title}\n{draw(timeline, width(DRAWN_WIDTH), end)}")


def summary_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the headline figures: (name, measured, planned)."""
    seconds, plan = data["step_seconds"], data.get("predicted")
    spread = f"{seconds['min']:.4g} to {seconds['max']:.4g} s"
    measured = [
        ("step time", f"{seconds['median']:.4g} s ({spread})"),
        ("pipeline, as drawn", f"{_end(data['timeline']):.4g} s"),
        ("tokens/s", f"{data['tokens_per_second']:,.0f}"),
        ("MFU", share_of_peak(data["mfu"])),
        ("HFU", share_of_peak(data["hfu"])),
        ("bubble / busy", f"{data['bubble_fraction']['measured']:.1%}"),
    ]
    planned = [""] * len(measured)
    if plan:
        planned = [f"{plan['step_seconds']:.4g} s", f"{_end(data['planned_timeline']):.4g} s"]
        planned += [f"{plan['tokens_per_second']:,.0f}", f"{plan['mfu']:.1%}", f"{plan['hfu']:.1%}"]
        planned += [f"{plan['bubble_fraction']:.1%}"]
    rows = [[*row, value] for row, value in zip(measured, planned, strict=True)]
    if plan and plan["device_rates"] == "roofline":
        rows.append(["rates", "", "a roofline, not calibrated"])
    peak = f"{data['peak_flops'] / 1e12:.4g} TFLOP/s a rank"
    rows.append(["peak", f"{peak} ({data['flop_convention']})", ""])
    return rows


def share_of_peak(share: float) -> str:
    """Words a share of a device's peak FLOP/s; says what is wrong with one above 100 %."""
    return f"{share:.1%}" + ", so the peak was measured too low" * (share > 1.0)


def _end(rows: Sequence[Json]) -> float:
    return max(float(row["end"]) for row in rows)


def share_rows(data: Json) -> tuple[list[str], list[list[str]]]:
    """Rows of shares of the step, a column per pipeline rank."""
    return _by_rank(data["shares_by_rank"], data["shares"], lambda share: f"{share:.1%}")


def memory_rows(data: Json) -> tuple[list[str], list[list[str]]]:
    """Rows of MiB by kind, a column per pipeline rank."""
    kinds = data["memory_bytes"]
    return _by_rank(data["memory_by_rank"], kinds, lambda size: f"{size / MIB:,.1f}")


def _by_rank(
    ranks: Sequence[Json], kinds: Iterable[str], word: Callable[[float], str]
) -> tuple[list[str], list[list[str]]]:
    rows = [[kind, *(word(row[kind]) for row in ranks)] for kind in kinds]
    return ["", *(f"rank {row['pp_rank']}" for row in ranks)], rows


def planned_memory_rows(data: Json) -> list[list[str]]:
    """Rows of memory of the fullest rank's stage: (name, measured, planned)."""
    plan, measured = planned_memory(data["figures"]), data["memory_bytes"]
    stage = fullest_stage(data)
    return [
        [f"rank {stage} {kind}", f"{measured[kind] / MIB:,.1f} MiB", f"{size / MIB:,.1f} MiB"]
        for kind, size in plan.items()
    ]


def kernel_rows(data: Json) -> tuple[list[str], list[list[str]]]:
    """Rows of kernels: name, calls, seconds and share of those listed."""
    rows = [
        [k["name"][:60], str(k["calls"]), f"{1e3 * k['seconds']:,.2f} ms"]
        for k in data["kernels"][:SHOWN_KERNELS]
    ]
    return ["kernel", "calls", "time"], rows


def rank_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a finished run's rank times: (kind, largest, median, the ranks with the largest)."""
    ranks, rows = data["rank_times"], []
    for kind in ("computing", "waiting"):
        seconds = ranks[f"{kind}_seconds"]
        whose = [f"rank {r['rank']} in {r['steps']:,}" for r in seconds["ranks"]]
        often = f"{', '.join(whose)} of {ranks['steps']:,} steps"
        rows.append([kind, f"{seconds['max']:.4g} s", f"{seconds['median']:.4g} s", often])
    return rows


def run_rows(data: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a finished run: (name, value)."""
    spread, seconds = data["step_quantiles"], data["step_seconds"]["median"]
    middle = f"{spread['p5']:.4g} to {spread['p95']:.4g} s in 9 of 10"
    rows = [
        ["steps", f"{data['steps']:,}"],
        ["tokens", f"{data['tokens']:,}"],
        ["step time, median", f"{seconds:.4g} s ({middle})"],
        ["tokens/s, median", f"{data['tokens_per_second']:,.0f}"],
        ["parameters", f"{data['parameters']:,}"],
    ]
    if not isnan(data["mfu"]):
        rows.insert(-1, ["MFU, median", share_of_peak(data["mfu"])])
    if "loss" in data:
        loss = data["loss"]
        text = f"{loss['first']:.4f} to {loss['last']:.4f}, least {loss['min']:.4f}"
        rows.insert(0, ["loss", text])
    if data["world"]:
        rows.append(["ranks", f"{data['world']:,}"])
    if data["resumed_at"]:
        rows.append(["took up again at step", ", ".join(map(str, data["resumed_at"]))])
    if data["saves"]:
        stalls = [save["stall_seconds"] for save in data["saves"]]
        text = f"{len(stalls)}, training waited {sum(stalls):.3f} s in all"
        rows.append(["saves", f"{text}, {max(stalls):.3f} s at most"])
    if data["saves_failed"]:
        rows.append(["saves that failed", str(len(data["saves_failed"]))])
    return rows


def show_run(rows: Sequence[Json], data: Json) -> None:
    """Prints a finished run's figures, and its first, middle and last steps."""
    print_table("", ("", "of the run"), run_rows(data))
    if "rank_times" in data:
        columns = ("", "largest", "median of ranks", "largest of")
        print_table("Seconds of a step, by rank", columns, rank_rows(data))
    picked = [rows[0], rows[len(rows) // 2], rows[-1]] if len(rows) > 2 else list(rows)
    cells = [
        [
            str(row["step"]),
            f"{row['loss']:.4f}",
            f"{row['grad_norm']:.4g}",
            f"{row['step_seconds']:.4g} s",
            f"{row['tokens_per_second']:,.0f}",
            *([] if isnan(data["mfu"]) else [f"{row['mfu']:.1%}"]),
        ]
        for row in picked
    ]
    titles = ["step", "loss", "gradient norm", "step time", "tokens/s"]
    titles += [] if isnan(data["mfu"]) else ["MFU"]
    print_table(counted(len(rows), "step"), titles, cells, right=True)
