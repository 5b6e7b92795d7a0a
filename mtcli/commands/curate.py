"""`mtcli curate`: clean, filter, deduplicate and decontaminate a corpus."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import (
    Force,
    JsonOut,
    Overrides,
    Resume,
    SkipBad,
    SplitOn,
    TextKey,
    refuse_flags,
)
from mtcli.commands.output import answer, answering, echo, print_facts

if TYPE_CHECKING:
    from mtcli.core.curate.engine import Engine

TRAIN = "train-quality"  # in the place of an input
LEFT_OUT = {  # of a blend
    "missing": "a weight in [blend], and no documents",
    "unweighted": "documents, and no weight in [blend]: in no data.train",
}
OF_CORPORA = (
    *("overrides", "against", "config", "workers", "split_on", "format", "skip_bad"),
    *("engine", "address", "dry_run", "resume"),
)

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="files, folders and globs of .html .warc .wet .jsonl .txt (also .gz .zst .xz .bz2) "
        "and .parquet; https:// s3:// gs:// hub:owner/name; or train-quality, with --good and "
        "--bad, to train a quality classifier",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="where shards, removed.jsonl.zst and the report go; with train-quality, a file",
    ),
]
ConfigPath = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="a TOML file of stages and their settings"),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="worker processes", show_default="one per core"),
]
Against = Annotated[
    list[str],
    typer.Option(
        metavar="DIR",
        default_factory=list,
        show_default=False,
        help="an older corpus, whose documents are removed from the new one",
    ),
]
Format = Annotated[
    Literal["text", "jsonl", "csv", "tsv", "parquet", "html", "warc"] | None,
    typer.Option("--format", help="format of all inputs", show_default="by their endings"),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print documents, bytes, memory and disk; do nothing")
]
Good = Annotated[
    list[str],
    typer.Option(
        metavar="INPUT",
        default_factory=list,
        show_default=False,
        help="curate train-quality: curated text, such as Wikipedia; any number of times",
    ),
]
Bad = Annotated[
    list[str],
    typer.Option(
        metavar="INPUT",
        default_factory=list,
        show_default=False,
        help="curate train-quality: crawled text; any number of times",
    ),
]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option(help="local: processes of this machine; ray: tasks of a Ray cluster"),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="--engine ray: join this cluster",
        show_default="one of --workers cores is started here",
    ),
]


@answering
def curate(
    context: typer.Context,
    inputs: Inputs,
    output: Output,
    overrides: Overrides,
    against: Against,
    good: Good,
    bad: Bad,
    config: ConfigPath = None,
    workers: Workers = None,
    text_key: TextKey = "text",
    split_on: SplitOn = None,
    format: Format = None,
    skip_bad: SkipBad = False,
    engine: EngineName = "local",
    address: Address = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    force: Force = False,
    json_out: JsonOut = None,
) -> None:
    """Clean, filter, deduplicate and decontaminate a corpus."""
    from mtcli.core.curate.extras import require

    for module in ("orjson", "zstandard"):
        require(module, "curate")
    if inputs[0] == TRAIN or good or bad:
        refuse_flags(context, OF_CORPORA, "is for corpora, and train-quality has none")
        _train_quality(inputs, good, bad, output, text_key, json_out)
        return
    from time import perf_counter

    from mtcli.core.curate.config import load_config
    from mtcli.core.curate.passes import curate as run
    from mtcli.core.curate.request import CurateRequest
    from mtcli.core.runtime.launch import cores

    _check_engine(engine, address, workers)
    request = CurateRequest(
        inputs=tuple(inputs),
        output=output,
        config=load_config(config, overrides),
        workers=cores() if workers is None else workers,
        against=tuple(against),
        text_key=text_key,
        split_on_blank=split_on == "blank",
        skip_bad=skip_bad,
        resume=resume,
        force=force,
        format=format,
    )
    if dry_run:
        from mtcli.core.curate.estimate import estimate

        facts = estimate(request)
        if answer(facts, json_out):
            print_facts({name: _told(name, value) for name, value in facts.items()})
        return
    began = perf_counter()
    with _open_engine(engine, address, request.workers) as opened:
        report = run(request, opened, lambda line: echo(line, err=True))
    timing: dict[str, Any] = {"seconds": perf_counter() - began, "workers": request.workers}
    timing |= {"output": str(output)}
    if report["blend"]:
        from mtcli.core.curate.blend import commands_of

        timing |= commands_of(report["blend"], output)
    if answer(report | timing, json_out):
        _show(report | timing, output)


def _check_engine(engine: str, address: str | None, workers: int | None) -> None:
    """Raises MtcliError for flags that exclude each other."""
    from mtcli.core.config.errors import wrong

    if address and engine != "ray":
        raise wrong(f"--engine is {engine}, and joins no cluster", "--engine ray", "--address")
    if address and workers:
        hint = "leave --workers out"
        raise wrong(f"the cluster at {address} has its own cores", hint, "--workers")


@contextmanager
def _open_engine(engine: str, address: str | None, workers: int) -> "Iterator[Engine]":
    from mtcli.core.curate.engine import LocalEngine

    if engine == "local":
        yield LocalEngine(workers)
        return
    from mtcli.core.curate.cluster import ClusterEngine
    from mtcli.core.curate.ray_cluster import ray_cluster

    with ray_cluster(address, workers) as cluster:
        yield ClusterEngine(cluster)


def _train_quality(
    inputs: list[str],
    good: list[str],
    bad: list[str],
    output: Path,
    text_key: str,
    json_out: str | None,
) -> None:
    from mtcli.core.config.errors import wrong
    from mtcli.core.curate.quality import train_quality
    from mtcli.core.runtime.outputs import require_writable

    if inputs != [TRAIN]:
        first = next(word for word in inputs if word != TRAIN) if len(inputs) > 1 else inputs[0]
        hint = "mtcli curate train-quality --good A --good B --bad C --output q.bin"
        raise wrong(
            f"--good and --bad are of train-quality, and {first!r} is a word too many", hint
        )
    missing = [flag for flag, given in (("--good", good), ("--bad", bad)) if not given]
    if missing:
        raise wrong("no input", "name files, folders or globs", missing[0])
    require_writable(str(output), "--output")
    facts = train_quality(good, bad, output, text_key)
    if answer(facts, json_out):
        print_facts({name: str(value) for name, value in facts.items()})


def _told(name: str, value: Any) -> str:
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show(report: dict[str, Any], output: Path) -> None:
    """Prints a table of stages, then the name of the written folder."""
    from mtcli.core.curate.report import why
    from mtcli.core.runtime.console import print_table

    parts = ("documents_in", "documents_dropped", "documents_cut", "pieces", "documents_out")
    rows = []
    for stage in report["stages"]:
        counts = {name: f"{stage[name]:,}" for name in parts}
        if not stage["documents_cut"]:
            counts |= {"documents_cut": "", "pieces": ""}
        size = f"{stage['bytes_out'] / 1e6:,.2f}"
        rows.append([stage["stage"], *counts.values(), size, why(stage)])
    columns = ("stage", "documents", "dropped", "cut", "pieces", "left", "MB left", "why")
    print_table("", columns, rows)
    bad = report["bad_lines"]
    if bad["count"]:
        echo(f"bad lines left out: {bad['count']:,}, such as {bad['examples'][0]}")
    for large in report["clusters"].get("fuzzy", {}).get("large", ()):
        echo(
            f"note: {large['clustered']:,} of {large['documents']:,} documents of "
            f"{large['source']} are one fuzzy cluster, of which {large['kept_id']} stays: look at "
            "removed.jsonl.zst; larger fuzzy.shingle and fuzzy.threshold remove less",
            err=True,
        )
    echo(
        f"{report['documents']:,} documents in {len(report['shards'])} shards, "
        f"{report['seconds']:.1f} s"
    )
    for line in report.get("preprocess", ()):
        echo(line)
    if report["blend"]:
        for source, facts in report["blend"]["sources"].items():
            echo(f"{source}: weight {facts['weight']:.5f}, {facts['epochs']:.2f} epochs")
        echo(f"data.train = {report['data.train']}")
        for kind, what in LEFT_OUT.items():
            if names := report["blend"][kind]:
                echo(f"note: {', '.join(names)}: {what}", err=True)
    echo(str(output))
