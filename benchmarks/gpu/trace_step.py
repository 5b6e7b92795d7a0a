"""What a step of one rank asks of a GPU, counted without one: launches, bytes, FLOPs, host waits.

    python benchmarks/gpu/trace_step.py llama-3.1-8b --set batch.micro_batch_size=2

The real trainer takes its second step on fake tensors (see step_counts.py) at two depths. Their
difference is what a layer more costs, and the rest is counted at the smaller depth. `--gpus` and
`--rank` choose the rank of a layout, `--by frame` or `--by op` divides the counts, and
`--published` counts the models of docs/reference/performance.md. Attention runs by FlashAttention
here.
"""
# ruff: noqa: E402

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

# Fake ranks have no hooks, of which torch would warn; it reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from cases import CASES
from step_counts import Event, StepCounts

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import Table, load_config, read_table
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.search import with_batch
from mtcli.core.rehearse.fake_world import fake_trainer
from mtcli.core.runtime.console import print_table
from mtcli.core.training.loader import synthetic_loader

COLUMNS = ("", "launches", "aten", "triton", "collectives", "GB\nread", "GB\nwritten")
COLUMNS += ("GEMM\nTFLOP", "attention\nTFLOP", "host\nreads", "host\nuploads")
PARTS = {
    "layer": "a layer, micro-batch",
    "micro_batch": "the rest of a micro-batch",
    "step": "the rest of a step",
}
FIELDS = ("launches", "aten", "triton", "collectives", "bytes_read", "bytes_written")
FIELDS += ("gemm_flops", "attention_flops", "host_reads", "host_uploads")
LLAMA, MIXTRAL, QWEN = "llama-3.1-8b", "mixtral-8x7b", "qwen2-57b-a14b"
SHARDED = ("parallel.tp=2", "parallel.zero=1")
# Models and layouts of docs/reference/performance.md: preset, GPUs, micro-batch, tokens of a row,
# settings.
# fmt: off
PUBLISHED: dict[str, tuple[str, int, int, int, tuple[str, ...]]] = {
    "GPT-2 124M, 32 x 1024": ("gpt2-124m", 1, 32, 1024, ()),
    "GPT 1.3B, 16 x 1024": ("gpt2-1.5b", 1, 16, 1024, CASES["gpt-1.3b"].settings),
    "Llama 8B, 2 x 4096": (LLAMA, 1, 2, 4096, ()),
    "the same in fp8": (LLAMA, 1, 2, 4096, ("train.precision=fp8",)),
    "the same, documents": (LLAMA, 1, 2, 4096, ("data.document_mask=true",)),
    "Llama 8B, tp=2, zero=1, 16 GPUs, 1 x 4096": (LLAMA, 16, 1, 4096, SHARDED),
    "Llama 8B, zero=3, 8 GPUs, 1 x 4096": (LLAMA, 8, 1, 4096, ("parallel.zero=3",)),
    "Mixtral 8x7B, 2 x 4096": (MIXTRAL, 1, 2, 4096, ()),
    "Mixtral 8x7B, tp=2, ep=8, zero=1, 64 GPUs, 1 x 4096":
        (MIXTRAL, 64, 1, 4096, (*SHARDED, "parallel.ep=8")),
    "Qwen2 57B-A14B, 2 x 4096": (QWEN, 1, 2, 4096, ()),
}
# fmt: on


def main() -> None:
    args = parse()
    if args.published:
        rows = []
        for name, (preset, gpus, rows_at_once, seq_len, settings) in PUBLISHED.items():
            batch = {"seq_len": seq_len, "micro_batch_size": rows_at_once}
            table = {
                "model": read_table(preset)["model"],
                "batch": batch | {"global_batch_size": 64},
                "train": {"steps": 4, "precision": "bf16"},
            }
            record = traced(table, gpus, 0, settings).as_json()
            del record["frames"]
            rows.append({"name": name} | record)
            show(name, rows[-1])
        facts = {"what": "step counts", "date": str(date.today()), "torch": torch.__version__}
        write(args.json, facts | {"rows": rows})
        return
    try:
        trace = traced(args.config, args.gpus, args.rank, args.set)
    except MtcliError as error:
        raise SystemExit(str(error)) from None
    record = trace.as_json()
    show(trace.title, record)
    if args.by:
        print()
        print_table(f"By {args.by}, in launches", *trace.table_by(args.by), right=True)
    write(args.json, record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default="tiny", help="a TOML file or a preset")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--by", choices=("frame", "op"), help="divide the counts by what?")
    parser.add_argument("--json", help="write the counts to this file")
    parser.add_argument("--published", action="store_true")
    return parser.parse_args()


def write(path: str | None, record: dict[str, Any]) -> None:
    """Writes a record as JSON, and says where."""
    if path:
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")


class Trace(NamedTuple):
    """The events of a step at two depths, of one rank."""

    title: str
    layers: tuple[int, int, int]  # of this rank: at both depths, and of the model itself
    micro_batches: int
    events: tuple[list[Event], list[Event]]

    def parts(self, weigh: Callable[[Event], float]) -> dict[str, float]:
        """A sum over events by part of the step: a layer's and a micro-batch's are of one of them,
        and a step's is at the model's own depth."""
        few, many, whole = self.layers
        inside, outside = (
            [sum(weigh(e) for e in events if (e.inside is not None) == within)
             for events in self.events]
            for within in (True, False)
        )  # fmt: skip
        layer = (inside[1] - inside[0]) / (many - few) / self.micro_batches
        step = outside[0] + (outside[1] - outside[0]) / (many - few) * (whole - few)
        rest = inside[0] / self.micro_batches - layer * few
        return {"layer": layer, "micro_batch": rest, "step": step}

    def sums(self) -> dict[str, dict[str, float]]:
        """Every field of FIELDS by part."""
        weights: tuple[Callable[[Event], float], ...] = (
            lambda e: e.launches * (e.kind != "collective"),
            lambda e: (e.launches - e.triton) * (e.kind != "collective"),
            lambda e: e.triton,
            lambda e: e.kind == "collective",
            lambda e: e.read_bytes * (e.kind != "collective"),
            lambda e: e.written_bytes * (e.kind != "collective"),
            lambda e: e.gemm_flops,
            lambda e: e.attention_flops,
            lambda e: e.kind == "read",
            lambda e: e.kind == "upload",
        )
        found = [self.parts(weigh) for weigh in weights]
        return {part: {f: x[part] for f, x in zip(FIELDS, found, strict=True)} for part in PARTS}

    def by(self, key: Callable[[Event], str]) -> dict[str, dict[str, float]]:
        """Launches (of waits their number) by part, for each value of a key."""
        names = dict.fromkeys(key(e) for e in (*self.events[0], *self.events[1]))
        return {
            name: self.parts(lambda e, name=name: (e.launches or 1) * (key(e) == name))
            for name in names
        }

    def table_by(self, what: str) -> tuple[tuple[str, ...], list[list[str]]]:
        """Headings and rows of the launches by frame or operation."""
        counts = self.by(lambda e: e.frame if what == "frame" else e.name)
        rows = sorted(counts.items(), key=lambda item: -item[1]["layer"])
        cells = [[name, *(_number(counts[part]) for part in PARTS)] for name, counts in rows]
        return (what, *PARTS.values()), cells

    def as_json(self) -> dict[str, Any]:
        """Sums by part, the lines at which the host waits, and launches by frame."""
        waits = self.by(lambda e: f"{e.kind} {e.frame}" if e.kind in ("read", "upload") else "")
        waits.pop("", None)
        return {
            "title": self.title,
            "layers": self.layers,
            "micro_batches": self.micro_batches,
            "parts": self.sums(),
            "waits": waits,
            "frames": self.by(lambda e: e.frame),
        }


def traced(source: str | Table, gpus: int, rank: int, settings: Sequence[str]) -> Trace:
    """Counts a step of a rank. Raises MtcliError for a config that cannot be planned."""
    config = load_config(source, ["train.device=cuda", *settings])
    rules.require(config, gpus, *rules.ENGINE_RULES, without=rules.TRAINING_RULES)
    layout, b = ParallelLayout.of_run(config, gpus), config.batch
    unit, dense = layout.pp * layout.vpp, config.model.first_dense_layers
    count = 3 if layout.pp == 1 else layout.pp * (1 + (layout.vpp > 1)) + 2 * layout.pp
    config = with_batch(config, count * b.micro_batch_size * layout.batch_shards)
    depths = dense + 2 * unit, dense + 3 * unit
    events = tuple(step_events(with_layers(config, depth), gpus, rank) for depth in depths)
    layers = (*depths, config.model.num_layers)
    few, many, whole = (n // layout.pp for n in layers)
    what = source if isinstance(source, str) else config.model.architecture
    title = f"{what}, rank {rank} of {gpus}: {count} micro-batches of "
    title += f"{b.micro_batch_size} x {b.seq_len} tokens, layers {few} and {many} of {whole}"
    return Trace(title, (few, many, whole), count, (events[0], events[1]))


def with_layers(config: RunConfig, layers: int) -> RunConfig:
    """The config of another depth."""
    model = config.model.model_copy(update={"num_layers": layers})
    parallel = config.parallel.model_copy(update={"stage_layers": ()})
    return config.model_copy(update={"model": model, "parallel": parallel})


def step_events(config: RunConfig, gpus: int, rank: int) -> list[Event]:
    """The events of the second step of a rank: the first one also makes tables."""
    train = config.train.model_copy(update={"steps": 4})
    config = config.model_copy(update={"train": train})
    with (
        fake_trainer(config, gpus, rank, on_cpu=False, widens=False) as (trainer, _),
        closing(synthetic_loader(config, trainer.groups)) as loader,
        StepCounts() as counts,
    ):
        trainer.pipeline.around = counts.around
        trainer.train_step(loader)
        counts.events.clear()
        trainer.train_step(loader)
    return counts.events


def waits_by_place(events: Sequence[Event]) -> dict[str, int]:
    """How often the host waits in a step, by kind, file and function."""
    return dict(Counter(f"{e.kind} {e.place}" for e in events if e.kind in ("read", "upload")))


def show(title: str, record: dict[str, Any]) -> None:
    """Prints the sums by part, and where the host waits."""
    rows = [[PARTS[part], *cells(sums)] for part, sums in record["parts"].items()]
    print_table(title, COLUMNS, rows, right=True)
    for place, parts in record["waits"].items():
        counts = ", ".join(f"{_number(n)} in {PARTS[part]}" for part, n in parts.items() if n)
        print(f"  {place}: {counts}")


def cells(sums: dict[str, float]) -> list[str]:
    """The sums of a part as text: bytes in GB, FLOPs in TFLOP."""
    units = {"bytes_read": 1e9, "bytes_written": 1e9}
    units |= {"gemm_flops": 1e12, "attention_flops": 1e12}
    return [
        f"{sums[field] / units[field]:.2f}" if field in units else _number(sums[field])
        for field in FIELDS
    ]


def _number(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


if __name__ == "__main__":
    main()
