"""`mtcli select`: which sequences to train on? Core-sets, importance resampling, random ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtcli.commands.options import (
    ComputeDevice,
    JsonOut,
    MovedBase,
    Nproc,
    Overrides,
    taken_from_hub,
)
from mtcli.commands.output import answer, answering, echo, print_facts, say_wrote
from mtcli.commands.ranks import num_ranks, run_ranks
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.nameable import CHECKPOINTS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mtcli.core.data.subset import Subset
    from mtcli.core.runtime.launch import Runtime

    Bar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PREFIX",
        help="what to choose from: a PREFIX of preprocess, or files of labelled examples; several "
        "times for several sources, each with a weight before it where they have any",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="CHECKPOINT",
        callback=taken_from_hub,
        help=f"whose gradients to choose by: {CHECKPOINTS}",
    ),
]
Fraction = Annotated[
    float | None,
    typer.Option("--fraction", min=0.0, max=1.0, help="choose this fraction of the sequences"),
]
Size = Annotated[
    int | None, typer.Option("--size", min=1, max=10**9, help="choose this many sequences")
]
Cover = Annotated[
    float | None,
    typer.Option(
        "--cover",
        metavar="EPS",
        min=0.0,
        max=1e9,
        help="choose the fewest sequences whose weighted gradient is near that of all: at most EPS "
        "times the sum of all sequences' gradient norms",
    ),
]
Output = Annotated[str, typer.Option("--output", metavar="FILE", help="the subset, as JSON")]
Method = Annotated[
    Literal["craig", "dsir", "random"],
    typer.Option("--method", help="core-set, importance resampling to --target, or by the seed"),
]
ProxyKind = Annotated[
    Literal["gradient", "kronecker", "features"],
    typer.Option(
        "--proxy",
        help="what stands for a sequence: its gradient by the last layer's logits, by the last "
        "layer's weights, or its mean hidden state",
    ),
]
GreedyKind = Annotated[
    Literal["lazy", "naive", "stochastic"],
    typer.Option(
        "--greedy",
        help="craig: how picks are found; lazy and naive find the same, stochastic looks at some "
        "random candidates each time",
    ),
]
TargetData = Annotated[
    list[str],
    typer.Option(
        "--target",
        metavar="PREFIX",
        default_factory=list,
        show_default=False,
        help="dsir: tokens that the chosen ones are to resemble",
    ),
]


@answering
def select(
    data: Data,
    output: Output,
    overrides: Overrides,
    target: TargetData,
    model: Model = None,
    fraction: Fraction = None,
    size: Size = None,
    cover: Cover = None,
    method: Method = "craig",
    proxy: ProxyKind = "gradient",
    greedy: GreedyKind = "lazy",
    base: MovedBase = None,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    json_out: JsonOut = None,
) -> None:
    """Choose a core-set of the training data: weighted sequences, for data.subset."""
    from mtcli.core.config.loading import train_settings
    from mtcli.core.runtime.outputs import require_writable
    from mtcli.core.select.request import SelectRequest, require_request

    request = SelectRequest(
        data=tuple(data),
        model=model,
        overrides=tuple(overrides),
        fraction=fraction,
        size=size,
        cover=cover,
        method=method,
        proxy=proxy,
        target=tuple(target),
        greedy=greedy,
        base=base,
    )
    train, *_ = collect_errors(
        lambda: train_settings(overrides, device=device),
        lambda: require_writable(output, "--output"),
        lambda: require_request(request, num_ranks(nproc)),
    )

    def work(runtime: "Runtime") -> "Subset | None":
        from mtcli.core.data.subset import write_subset
        from mtcli.core.select.selection import Console
        from mtcli.core.select.selection import select as run

        subset = run(request, runtime, Console(*_console(quiet=runtime.rank > 0)))
        if runtime.rank:
            return None
        write_subset(output, subset)
        return subset

    subset = run_ranks(nproc, train, work)
    if subset is None:  # of a launcher, and of every rank but the first
        return
    from mtcli.core.data.subset import subset_facts

    if answer(subset_facts(subset), json_out):
        print_facts(_facts(subset))
    say_wrote(output, json_out)


def _console(quiet: bool) -> "tuple[Callable[[str], None], Bar]":
    """(a function that prints a line, a function that opens a progress bar), on stderr."""

    def say(line: str) -> None:
        if not quiet:
            echo(line, err=True)

    @contextmanager
    def bar(name: str, total: int) -> "Iterator[Callable[[int], object]]":
        from mtcli.core.runtime.progress import progress_bar

        with progress_bar(name, total, quiet=quiet) as shown:
            yield shown.update

    return say, bar


def _facts(subset: "Subset") -> dict[str, str]:
    """The facts of a subset for a table, by name."""
    size, total = len(subset.indices), subset.num_candidates
    rows = {"sequences": f"{size:,} of {total:,}, of {subset.seq_len:,} tokens each"}
    rows["chosen_by"] = subset.method + (f", {subset.proxy}" if subset.proxy else "")
    what = "mean_hidden_states" if subset.proxy == "features" else "gradient"
    compared = (
        ("objective", subset.objective, subset.random_objective),
        (f"error_of_the_{what}", subset.error, subset.random_error),
        ("bound_of_that_error", subset.bound, subset.random_bound),
    )
    for name, value, random in compared:
        if value is not None and random is not None:
            baseline = (
                "" if subset.method == "random" else f"; of as many random ones {random:,.4g}"
            )
            rows[name] = f"{value:,.4g}{baseline}"
    weights = subset.weights
    rows["weights"] = f"{min(weights):,.4g} to {max(weights):,.4g}, {sum(weights):,.4g} in all"
    return rows
