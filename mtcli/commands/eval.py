"""`mtcli eval`: how good is this checkpoint? Our tasks and lm-eval's, on any layout."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcli.commands.options import ComputeDevice, JsonOut, Nproc, OptionalCheckpoint, Overrides
from mtcli.commands.output import answer, answering, say_wrote
from mtcli.commands.ranks import num_ranks, require_model, run_ranks
from mtcli.core.config.errors import wrong

if TYPE_CHECKING:
    from pathlib import Path

    from mtcli.core.config.model import ModelConfig
    from mtcli.core.data.tokenize import Tokenizer
    from mtcli.core.evaluate.tasks.registry import TaskRun
    from mtcli.core.evaluate.tasks.task import Report
    from mtcli.core.inference.model import OpenModel
    from mtcli.core.runtime.launch import Runtime

Tasks = Annotated[
    list[str],
    typer.Option(
        "--task",
        metavar="NAME=PATH",
        default_factory=list,
        show_default=False,
        help="wikitext103=FILE, lambada=FILE, piqa=FOLDER and so on (docs/tasks.md lists them), or "
        "FILE.toml=PATH for one of your own, any number of times; of encoders mlm=PREFIX, "
        "race=FOLDER or classification=FILE; or lm_eval:NAME (or lm_eval:FILE.yaml) for a task of "
        "lm-evaluation-harness",
    ),
]
Harness = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="tasks of lm-evaluation-harness, with commas between: as --task lm_eval:NAME each",
    ),
]
Shots = Annotated[
    int, typer.Option(min=0, max=10**4, help="solved examples before each item, or as many as fit")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of the examples' draw")]
Items = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="every item's result, a JSON line each; default: FILE.items.jsonl beside --json "
        "FILE.json, else in ~/.cache/mtcli",
    ),
]
Contaminated = Annotated[
    str | None,
    typer.Option(
        metavar="REPORT",
        show_default=False,
        help="the report of `mtcli curate`: accuracies of clean and contaminated items too",
    ),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="A.json B.json",
        show_default=False,
        help="compare two results on the items that they share, and evaluate nothing",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10**9,
        help="the first N items only: passages, articles of each level, words of wikitext103",
    ),
]
Overlap = Annotated[
    int | None,
    typer.Option(
        min=1, max=10**9, help="tokens by which wikitext103's windows advance (the paper's 32)"
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(min=1, max=10**9, help="tokens per forward pass; default: what suits the device"),
]
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", help="a tokenizer file, folder or name; default: the checkpoint's"),
]

Ensemble = Annotated[
    list[str],
    typer.Option(
        "--ensemble",
        metavar="CHECKPOINT",
        default_factory=list,
        show_default=False,
        help="a further classifier whose probabilities are averaged in, any number of times",
    ),
]


@answering
def eval(
    tasks: Tasks,
    overrides: Overrides,
    ensemble: Ensemble,
    checkpoint: OptionalCheckpoint = None,
    harness: Harness = "",
    shots: Shots = 0,
    seed: Seed = 1234,
    compare: Compare = None,
    contaminated: Contaminated = None,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    limit: Limit = None,
    overlap: Overlap = None,
    batch_tokens: BatchTokens = None,
    tokenizer: TokenizerName = None,
    items: Items = None,
    json_out: JsonOut = None,
) -> None:
    """Evaluate a checkpoint on WikiText-103, LAMBADA, RACE, PIQA and other published tasks or your
    own, with or without examples, on tasks of lm-evaluation-harness or, with an encoder's head, on
    masked tokens and labelled texts; or compare two results."""
    if compare is not None:
        return _compare(*compare, json_out)
    if checkpoint is None:
        raise wrong("no checkpoint is given", "mtcli eval CHECKPOINT --task NAME=PATH")
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import train_settings
    from mtcli.core.evaluate.contamination import read_ngrams
    from mtcli.core.evaluate.tasks.registry import parse_tasks

    every = [checkpoint, *ensemble]
    specs, train, ngrams, *models = collect_errors(
        lambda: parse_tasks([*tasks, *(f"lm_eval:{name}" for name in harness.split(",") if name)]),
        lambda: train_settings(overrides, device=device),
        lambda: None if contaminated is None else read_ngrams(contaminated),
        *(
            partial(require_model, path, overrides, num_ranks(nproc), encoders=True)
            for path in every
        ),
    )
    if ensemble:
        _require_members(dict(zip(every, models, strict=True)))

    kept = _items_file(items, json_out, checkpoint)

    def work(runtime: "Runtime") -> dict[str, Any] | None:
        from mtcli.core.evaluate.encode import encoder_for
        from mtcli.core.evaluate.encoders import encoder_runs
        from mtcli.core.evaluate.journal import Journal
        from mtcli.core.evaluate.packing import BATCH_TOKENS
        from mtcli.core.evaluate.tasks.registry import Evaluation, task_runs
        from mtcli.core.evaluate.tasks.task import TaskOptions
        from mtcli.core.inference.model import open_model

        opened = open_model(checkpoint, overrides, runtime, encoders=True)
        options = TaskOptions(opened.scorer.max_seq_len, limit, overlap, shots, seed, ngrams)
        tokens = batch_tokens or BATCH_TOKENS[runtime.device.type]
        read = replace(opened, tokenizer=_tokenizer(opened, tokenizer))
        journal = Journal(kept if runtime.rank == 0 else None, read.identity())
        if opened.scorer.config.model.head == "lm":
            encoder, share = encoder_for(read.require_tokenizer()), _sharing(opened)
            kinds = encoder, options, tokens, journal, share, read.end_ids()
            about = Evaluation(opened.scorer, *kinds)
            runs = task_runs(specs, about)
        else:
            others = [open_model(path, overrides, runtime, encoders=True) for path in ensemble]
            models = [one.scorer for one in (opened, *others)]
            runs = encoder_runs(specs, models, read.require_tokenizer(), limit, tokens)
        summary = _summary(checkpoint, opened, runtime)
        if runtime.rank == 0:
            _announce(summary, runs)
        reports = _run(runs, quiet=runtime.rank > 0)
        journal.finish(list(reports["tasks"]))
        if runtime.rank > 0:
            return None
        return summary | reports | ({"items": _beside(kept, json_out)} if journal.lines else {})

    result = run_ranks(nproc, train, work)
    if result is None:  # of a launcher, and of every rank but the first
        return
    if answer(result, json_out):
        _print_table(result["tasks"])
        typer.echo(f"{result['seconds']:.1f} s", err=True)
    say_wrote(str(kept) if "items" in result else None, None if json_out == "-" else json_out)


def _compare(a: str, b: str, json_out: str | None) -> None:
    """Prints who of two results is better at each task, and whether that is known."""
    from mtcli.core.evaluate.comparison import compare_files
    from mtcli.core.runtime.console import print_table

    result = compare_files(a, b)
    if answer(result, json_out):
        rows = []
        for task, report in result["tasks"].items():
            more = [value for value in report.values() if isinstance(value, dict)]
            rows += [_compared_row(task, one) for one in (report, *more)]
        columns = "task", "metric", "A", "B", "B - A", "95 % interval", "p", "Holm", "MDE", "better"
        print_table(f"A is {a}, B is {b}", columns, rows)
        say_wrote(json_out)


def _compared_row(task: str, report: "Report") -> list[str]:
    low, high = report["interval"]
    figures = [report[key] for key in ("p_value", "adjusted_p_value", "minimum_detectable")]
    return [
        task,
        report["metric"],
        _show(report["a"]),
        _show(report["b"]),
        f"{report['difference']:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        *map(_show, figures),
        report["verdict"].upper() if report["verdict"] != "tied" else "tied",
    ]


def _items_file(items: str | None, json_out: str | None, checkpoint: str) -> "Path":
    """Where each item's result goes: the file that --items names, one beside that of --json, or one
    in the user's cache."""
    import os
    from pathlib import Path

    from mtcli.core.runtime.atomic_writes import require_writable

    if items is not None:
        require_writable(items, "--items")
        return Path(items)
    if (
        json_out
        and json_out != "-"
        and Path(json_out).suffix
        and not Path(json_out).is_char_device()
    ):
        return Path(json_out).with_suffix(".items.jsonl")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "mtcli" / "eval"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"items cannot be kept in {folder}: {error.strerror}"
        raise wrong(message, "name a file", "--items") from None
    name = Path(checkpoint).resolve()
    return folder / f"{name.name}-{sha256(str(name).encode()).hexdigest()[:8]}.items.jsonl"


def _beside(kept: "Path", json_out: str | None) -> str:
    """How a result names its file of items: without the folder where both are in one."""
    from pathlib import Path

    of_json = Path(json_out).resolve().parent if json_out and json_out != "-" else None
    return kept.name if kept.resolve().parent == of_json else str(kept.resolve())


def _sharing(opened: "OpenModel") -> Callable[[Any], Any]:
    from mtcli.core.parallel.collectives import gather_values

    world = opened.scorer.groups.world
    return lambda value: gather_values(value, world)[0]


def _require_members(models: "dict[str, ModelConfig | None]") -> None:
    """Raises MtcliError where the models of an ensemble do not classify the same tokens alike."""
    from mtcli.core.config.model import CLASSIFIERS

    fields = ("head", "num_labels", "vocab_size", "max_seq_len")
    found = {
        path: {name: getattr(model, name) for name in fields}
        for path, model in models.items()
        if model is not None
    }
    heads = {facts["head"] for facts in found.values()}
    differ = [name for name in fields if len({facts[name] for facts in found.values()}) > 1]
    if heads <= set(CLASSIFIERS) and not differ:
        return
    said = "; ".join(
        f"{path} has " + ", ".join(f"{name}={facts[name]!r}" for name in differ or fields[:1])
        for path, facts in found.items()
    )
    hint = "classifiers of one kind and tokenizer, classification or multiple_choice"
    raise wrong(f"--ensemble of models that do not vote on the same: {said}", hint, "--ensemble")


def _tokenizer(opened: "OpenModel", tokenizer: str | None) -> "Tokenizer":
    from mtcli.core.data.tokenize import load_tokenizer

    found = opened.tokenizer if tokenizer is None else load_tokenizer(tokenizer)
    if found is None:
        message = f"the checkpoint {opened.checkpoint.folder} holds no tokenizer"
        raise wrong(message, "name the one that it was trained with", "--tokenizer")
    return found


def _summary(checkpoint: str, opened: "OpenModel", runtime: "Runtime") -> dict[str, Any]:
    from mtcli.core.mesh.parameters import count_parameters

    config = opened.scorer.config
    layout = opened.scorer.groups.layout
    return {
        "checkpoint": checkpoint,
        "model": {
            "architecture": config.model.architecture,
            "num_parameters": count_parameters(config.model),
            "num_layers": config.model.num_layers,
            "hidden_size": config.model.hidden_size,
            "vocab_size": config.model.vocab_size,
            "max_seq_len": config.model.max_seq_len,
            "precision": config.train.precision,
        },
        "layout": {"world": runtime.world, "tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        "device": runtime.device.type,
        "versions": {name: _version(name) for name in ("mtcli", "torch", "lm_eval")},
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _announce(summary: dict[str, Any], runs: "list[TaskRun]") -> None:
    model, layout = summary["model"], summary["layout"]
    sizes = ", ".join(f"{name}={size}" for name, size in layout.items())
    typer.echo(
        f"{summary['checkpoint']}: {model['architecture']}, "
        f"{model['num_parameters']:,} parameters, {model['max_seq_len']:,} positions, "
        f"{model['precision']} on {summary['device']}; {sizes}",
        err=True,
    )
    for run in runs:
        typer.echo(f"{run.name}: {run.summary}", err=True)


def _run(runs: "list[TaskRun]", quiet: bool) -> dict[str, Any]:
    """Runs the tasks; returns each one's report by name, and the seconds they took together."""
    from time import perf_counter

    from tqdm import tqdm

    start, reports = perf_counter(), {}
    for run in runs:
        with tqdm(total=run.num_requests, desc=run.name, unit=" requests", disable=quiet) as bar:
            reports[run.name] = run.run(bar.update)
    return {"tasks": reports, "seconds": perf_counter() - start}


def _print_table(tasks: "dict[str, Report]") -> None:
    from mtcli.core.runtime.console import print_table

    rows = [
        [task if number == 0 else "", metric, _show(value)]
        for task, report in tasks.items()
        for number, (metric, value) in enumerate(report.items())
    ]
    print_table("", ("task", "metric", "value"), rows)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " to ".join(map(_show, value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}"
