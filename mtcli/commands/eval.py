"""`mtcli eval`: how good is this checkpoint? Tasks of mtcli and of lm-eval, on any layout."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import (
    ComputeDevice,
    JsonOut,
    MovedBase,
    Nproc,
    OptionalCheckpoint,
    Overrides,
    Weights,
    given_flags,
    refuse_flags,
    taken_from_hub,
)
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.commands.ranks import num_ranks, require_model, run_ranks
from mtcli.core.config.errors import wrong

if TYPE_CHECKING:
    from mtcli.core.config.model import ModelConfig
    from mtcli.core.evaluate.request import EvalRequest
    from mtcli.core.evaluate.tasks.task import Report
    from mtcli.core.runtime.launch import Runtime

Tasks = Annotated[
    list[str],
    typer.Option(
        "--task",
        metavar="NAME=PATH",
        default_factory=list,
        show_default=False,
        help="wikitext103=FILE, lambada=FILE, piqa=FOLDER and so on (docs/reference/tasks.md has "
        "them); FILE.toml=PATH, a task of your own; with encoders mlm=PREFIX, race=FOLDER or "
        "classification=FILE; lm_eval:NAME or lm_eval:FILE.yaml, a task of lm-evaluation-harness; "
        "any number of times",
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
ShotsPer = Annotated[
    Literal["item", "task", "lm-eval"],
    typer.Option(
        help="draw them anew for each item, once for the task, or as lm-eval does, one after "
        "another"
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the examples' draw")]
Items = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="where each item's result goes, a JSON line each; default: FILE.items.jsonl next to "
        "--json FILE.json, else in ~/.cache/mtcli",
    ),
]
Contaminated = Annotated[
    str | None,
    typer.Option(
        metavar="REPORT",
        show_default=False,
        help="a report of `mtcli curate`: adds the accuracies of clean and contaminated items",
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

Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="contexts of lm-evaluation-harness as a user's turns, by the folder's chat template, "
        "and solved examples as earlier turns",
    ),
]
Ensemble = Annotated[
    list[str],
    typer.Option(
        "--ensemble",
        metavar="CHECKPOINT",
        callback=taken_from_hub,
        default_factory=list,
        show_default=False,
        help="a further classifier whose probabilities are averaged in, any number of times",
    ),
]


@answering
def eval(
    context: typer.Context,
    tasks: Tasks,
    overrides: Overrides,
    ensemble: Ensemble,
    checkpoint: OptionalCheckpoint = None,
    harness: Harness = "",
    shots: Shots = 0,
    chat: Chat = False,
    shots_per: ShotsPer = "item",
    seed: Seed = 1234,
    compare: Compare = None,
    contaminated: Contaminated = None,
    weights: Weights = None,
    base: MovedBase = None,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    limit: Limit = None,
    overlap: Overlap = None,
    batch_tokens: BatchTokens = None,
    tokenizer: TokenizerName = None,
    items: Items = None,
    json_out: JsonOut = None,
) -> None:
    """Evaluate a checkpoint on published tasks or your own; or compare two results.

    Tasks are WikiText-103, LAMBADA, RACE, PIQA and others, those of lm-evaluation-harness and, with
    an encoder's head, masked tokens and labelled texts.
    """
    of_evaluation = [name for name in context.params if name not in ("compare", "json_out")]
    if compare is not None:
        refuse_flags(context, of_evaluation, "is of an evaluation, and --compare does none")
        return _compare(*compare, json_out)
    if checkpoint is None:
        raise wrong("no checkpoint is given", "mtcli eval CHECKPOINT --task NAME=PATH")
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import train_settings
    from mtcli.core.evaluate.contamination import read_ngrams
    from mtcli.core.evaluate.request import EvalRequest, items_file, require_members, require_used
    from mtcli.core.evaluate.tasks.registry import parse_tasks

    def model_of(path: str) -> "ModelConfig | None":
        ranks = num_ranks(nproc)
        return require_model(path, overrides, ranks, encoders=True, base=base, weights=weights)

    paths = [checkpoint, *ensemble]
    specs, train, ngrams, *models = collect_errors(
        lambda: parse_tasks([*tasks, *_of_harness(harness)]),
        lambda: train_settings(overrides, device=device),
        lambda: None if contaminated is None else read_ngrams(contaminated),
        *(partial(model_of, path) for path in paths),
    )
    require_members(dict(zip(paths, models, strict=True)))
    require_used(given_flags(context, of_evaluation), specs, models[0])
    request = EvalRequest(
        checkpoint=checkpoint,
        ensemble=tuple(ensemble),
        tasks=tuple(specs),
        overrides=tuple(overrides),
        shots=shots,
        shots_per=shots_per,
        seed=seed,
        limit=limit,
        overlap=overlap,
        batch_tokens=batch_tokens,
        tokenizer=tokenizer,
        contaminated=ngrams,
        items=items_file(items, json_out, checkpoint, specs),
        json_out=json_out,
        base=base,
        weights=weights,
        chat=chat,
    )
    result = run_ranks(nproc, train, partial(_evaluate, request))
    if result is None:  # of a launcher, and of every rank but the first
        return
    _print_result(result, str(request.items) if "items" in result else None, json_out)


def _evaluate(request: "EvalRequest", runtime: "Runtime") -> dict[str, Any] | None:
    """Evaluates on this rank; returns the result on the first one, None on others."""
    from mtcli.core.evaluate.run import evaluate

    return evaluate(request, runtime, lambda line: echo(line, err=True))


def _of_harness(names: str) -> list[str]:
    """The names of tasks of lm-evaluation-harness, as --task takes them."""
    return [f"lm_eval:{name}" for name in names.split(",") if name]


def _print_result(result: dict[str, Any], items: str | None, json_out: str | None) -> None:
    if answer(result, json_out):
        _print_table(result["tasks"])
        echo(f"{result['seconds']:.1f} s", err=True)
    say_wrote(items, None if json_out == "-" else json_out)


def _compare(a: str, b: str, json_out: str | None) -> None:
    """Prints which of two results is better at each task, and whether significantly."""
    from mtcli.core.evaluate.compared_rows import COLUMNS, compared_rows
    from mtcli.core.evaluate.comparison import compare_files
    from mtcli.core.runtime.console import print_table

    result = compare_files(a, b)
    if answer(result, json_out):
        print_table(f"A is {a}, B is {b}", COLUMNS, compared_rows(result))
        say_wrote(json_out)


def _print_table(tasks: "dict[str, Report]") -> None:
    from mtcli.core.evaluate.compared_rows import show_figure
    from mtcli.core.runtime.console import print_table

    rows = [
        [task if number == 0 else "", metric, show_figure(value)]
        for task, report in tasks.items()
        for number, (metric, value) in enumerate(report.items())
    ]
    print_table("", ("task", "metric", "value"), rows)
