"""The Markdown tables of kernels and steps on a GPU, from the files of benchmarks/results.

    python benchmarks/gpu/table.py benchmarks/results/*.json

scripts/performance_docs.py puts them into docs/reference/performance.md. A model that was measured
by its layers gets one more row: what a step of all its layers would take, and the utilisation of
the layers alone.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
STEP = ["model", "layers", "tokens of a step", "mtcli tok/s", "MFU", "goal", "causal TFLOP/s"]
STEP += ["of the product", "update", "peak GiB", "beside", "tok/s", "ratio", "memory"]
KERNEL = ["kernel", "size", "dtype", "ms", "of the copy", "of the product", "beside, ms"]
COUNTS = ["model, tokens of a micro-batch", "launches of a layer: torch + Triton + collectives"]
COUNTS += ["GB of a layer", "TFLOP of a layer: GEMMs + attention", "launches of the rest"]
COUNTS += ["launches of a step", "host waits"]
DEEPER = ["model", "whose", "a layer, ms", "MFU of the layers", "goal", "all layers, s a step"]


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        print(page(json.loads(path.read_text())))


def page(record: Row) -> str:
    """A heading line and the tables of a record."""
    if record["what"] == "step counts":
        return "\n".join(table(COUNTS, map(count_row, record["rows"])))
    names = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    ceilings = f"copy {record['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
    ceilings += f"product {record['flop_per_s'] / 1e12:.0f} TFLOP/s in bfloat16"
    if "fp8_flop_per_s" in record:
        ceilings += f", {record['fp8_flop_per_s'] / 1e12:.0f} in fp8"
    lines = [f"{record['device']}, {record['date']}: {ceilings}. {names}.", ""]
    rows = record["rows"]
    if record["what"] == "kernels":
        return "\n".join([*lines, *table(KERNEL, kernel_rows(rows)), ""])
    lines += table(STEP, (step_row(row) for row in rows if "ratio" in row))
    if deeper := list(deeper_rows(rows)):
        lines += ["", *table(DEEPER, deeper)]
    reasons = [
        f"- {row['case']} beside {row['contender']}: {row.get('skipped') or row['failed']}"
        for row in rows
        if "ratio" not in row
    ]
    return "\n".join([*lines, "", *reasons])


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def step_row(row: Row) -> list[str]:
    """A pair: our figures, and the other's."""
    ours, other = row["mtcli"], row["other"]
    whole = "" if row["layers"] == row["whole_layers"] else f" of {row['whole_layers']}"
    memory = row["memory_ratio"]
    return [
        row["case"].split("/")[0],
        f"{row['layers']}{whole}",
        f"{row['tokens']:,}",
        f"{ours['tokens_per_s']:,.0f}",
        f"{ours['mfu']:.1%}",
        f"{row['goal_mfu']:.0%}",
        f"{ours['causal_flop_per_s'] / 1e12:.0f}",
        f"{ours['of_product']:.2f}",
        share(ours["phases"], "end"),
        gib(ours["peak_bytes"]),
        row["contender"] + ("" if row["in_turns"] else ", not in turns"),
        f"{other['tokens_per_s']:,.0f}",
        f"{row['ratio']:.2f}" + ("" if row["agrees"] else ", losses differ"),
        "" if memory is None else f"{memory:.2f}",
    ]


def count_row(row: Row) -> list[str]:
    """What trace_step.py counted of a model: of a layer and micro-batch, of the rest of a
    micro-batch, and of the rest of a step."""
    layer, rest, step = (row["parts"][part] for part in ("layer", "micro_batch", "step"))
    waits = [p["host_reads"] + p["host_uploads"] for p in (step, layer)]
    collectives = (
        f" + {layer['collectives']:.1f}".removesuffix(".0") if layer["collectives"] else ""
    )
    return [
        row["name"],
        f"{layer['aten']:.3g} + {layer['triton']:.3g}{collectives}",
        f"{(layer['bytes_read'] + layer['bytes_written']) / 1e9:.1f}",
        f"{layer['gemm_flops'] / 1e12:.2f} + {layer['attention_flops'] / 1e12:.2f}",
        f"{rest['launches']:.0f}",
        f"{step['launches']:.0f}",
        f"{waits[0]:.0f}" + (f" + {waits[1]:.0f} a layer and micro-batch" if waits[1] else ""),
    ]


def deeper_rows(rows: list[Row]) -> Iterator[list[str]]:
    """What each more layer costs, of models measured at two depths beside the same contender."""
    met: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "ratio" in row and row["layers"] != row["whole_layers"]:
            met.setdefault((row["case"].split("/")[0], row["contender"]), []).append(row)
    for (model, contender), both in met.items():
        if len({row["layers"] for row in both}) < 2:
            continue
        few, many = sorted(both, key=lambda row: row["layers"])
        for who in ("mtcli", "other"):
            name = "mtcli" if who == "mtcli" else contender
            yield [model, f"{name}, beside {contender}", *deeper(few, many, who)]


def deeper(few: Row, many: Row, who: str) -> list[str]:
    """Of one of a pair: the difference of two depths, by layer."""
    layers = many["layers"] - few["layers"]
    seconds = (many[who]["median_s"] - few[who]["median_s"]) / layers
    flops = (many["flops_per_token"] - few["flops_per_token"]) * many["tokens"] / layers
    peak = many["flops_per_token"] * many[who]["tokens_per_s"] / many[who]["mfu"]
    whole = many[who]["median_s"] + seconds * (many["whole_layers"] - many["layers"])
    share = flops / seconds / peak
    return [f"{seconds * 1e3:.2f}", f"{share:.1%}", f"{many['goal_mfu']:.0%}", f"{whole:.3f}"]


def kernel_rows(rows: list[Row]) -> Iterator[list[str]]:
    """A row for each size, dtype and pass."""
    for row in rows:
        if row.get("failed"):
            why = row["why"].splitlines()[0].replace("|", "/")
            yield [row["entry"], "", "", "failed", "", "", why]
        if "ms" not in row:
            continue
        others = [f"{who} {ms:.3f}" for who, ms in row["ms"].items() if who != "mtcli"]
        yield [
            f"{row['entry']} {row['pass']}",
            " x ".join(map(str, row["size"])),
            row["dtype"].removeprefix("torch."),
            f"{row['ms']['mtcli']:.3f}",
            f"{row['of_copy']:.2f}" if row["of_copy"] else "",
            f"{row['of_product']:.2f}" if row["of_product"] else "",
            ", ".join(others),
        ]


def share(phases: dict[str, float] | None, name: str) -> str:
    """A phase's part of a step that was timed by the device's clock."""
    return "" if phases is None else f"{phases[name] / sum(phases.values()):.1%}"


def gib(count: int | None) -> str:
    """Bytes in GiB."""
    return "" if count is None else f"{count / 2**30:.1f}"


if __name__ == "__main__":
    main()
