"""`mtcli eval`: how good is this checkpoint? Our tasks and lm-eval's, on any layout."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcli.commands.options import CheckpointPath, ComputeDevice, JsonOut, Nproc, Overrides
from mtcli.commands.output import answer, answering, say_wrote
from mtcli.commands.ranks import num_ranks, require_model, run_ranks
from mtcli.core.config.errors import wrong

if TYPE_CHECKING:
    from mtcli.core.config.model import ModelConfig
    from mtcli.core.data.tokenize import Tokenizer
    from mtcli.core.evaluate.encode import Encoder
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
        help="wikitext103=FILE, lambada=FILE or race=FOLDER, any number of times; of encoders "
        "mlm=PREFIX, race=FOLDER or classification=FILE; or lm_eval:NAME (or lm_eval:FILE.yaml) "
        "for a task of lm-evaluation-harness",
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
    checkpoint: CheckpointPath,
    tasks: Tasks,
    overrides: Overrides,
    ensemble: Ensemble,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    limit: Limit = None,
    overlap: Overlap = None,
    batch_tokens: BatchTokens = None,
    tokenizer: TokenizerName = None,
    json_out: JsonOut = None,
) -> None:
    """Evaluate a checkpoint on WikiText-103, LAMBADA, RACE, tasks of lm-evaluation-harness or, with
    an encoder's head, on masked tokens and labelled texts."""
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import train_settings
    from mtcli.core.evaluate.tasks.registry import parse_tasks

    every = [checkpoint, *ensemble]
    specs, train, *models = collect_errors(
        lambda: parse_tasks(tasks),
        lambda: train_settings(overrides, device=device),
        *(
            partial(require_model, path, overrides, num_ranks(nproc), encoders=True)
            for path in every
        ),
    )
    if ensemble:
        _require_members(dict(zip(every, models, strict=True)))

    def work(runtime: "Runtime") -> dict[str, Any] | None:
        from mtcli.core.evaluate.encoders import encoder_runs
        from mtcli.core.evaluate.packing import BATCH_TOKENS
        from mtcli.core.evaluate.tasks.registry import task_runs
        from mtcli.core.evaluate.tasks.task import TaskOptions
        from mtcli.core.inference.model import open_model

        opened = open_model(checkpoint, overrides, runtime, encoders=True)
        options = TaskOptions(opened.scorer.max_seq_len, limit, overlap)
        tokens = batch_tokens or BATCH_TOKENS[runtime.device.type]
        if opened.scorer.config.model.head == "lm":
            runs = task_runs(specs, opened.scorer, _encoder(opened, tokenizer), options, tokens)
        else:
            others = [open_model(path, overrides, runtime, encoders=True) for path in ensemble]
            models = [one.scorer for one in (opened, *others)]
            runs = encoder_runs(specs, models, _tokenizer(opened, tokenizer), limit, tokens)
        summary = _summary(checkpoint, opened, runtime)
        if runtime.rank == 0:
            _announce(summary, runs)
        reports = _run(runs, quiet=runtime.rank > 0)
        return summary | reports if runtime.rank == 0 else None

    result = run_ranks(nproc, train, work)
    if result is None:  # of a launcher, and of every rank but the first
        return
    if answer(result, json_out):
        _print_table(result["tasks"])
        typer.echo(f"{result['seconds']:.1f} s", err=True)
        say_wrote(json_out)


def _require_members(models: "dict[str, ModelConfig | None]") -> None:
    """Raises MtcliError where the models of an ensemble do not classify the same tokens alike."""
    from mtcli.core.config.model import CLASSIFIERS

    fields = ("head", "num_labels", "vocab_size", "max_seq_len")
    found = {
        path: {name: getattr(model, name) for name in fields} for path, model in models.items()
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


def _encoder(opened: "OpenModel", tokenizer: str | None) -> "Encoder":
    from mtcli.core.evaluate.encode import encoder_for

    return encoder_for(_tokenizer(opened, tokenizer))


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
    }


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


def _show(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4e}"
