"""`mtcli data explain`: which documents did a step consume?"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mtcli.commands.options import ConfigFile, JsonOut, Overrides
from mtcli.commands.output import answer, answering

Action = Annotated[Literal["explain"], typer.Argument(metavar="explain", help="what to do")]
Step = Annotated[int, typer.Option(min=1, max=10**9, help="the step, counted from 1")]


@answering
def data(
    action: Action, config: ConfigFile, overrides: Overrides, step: Step, json_out: JsonOut = None
) -> None:
    """Say which documents a training step consumed."""
    from mtcli.core.checkpoint.folder import CHECKPOINTS, find_checkpoint, step_folders
    from mtcli.core.config.loading import load_config
    from mtcli.core.data.explain import explain_step
    from mtcli.core.runtime.console import print_table
    from mtcli.core.training.run_tokenizer import extended_tokenizer

    run, planned = load_config(config, overrides), None
    if step_folders(Path(config) / CHECKPOINTS):
        from mtcli.core.checkpoint.opening import open_folder  # imports torch
        from mtcli.core.checkpoint.run_progress import planned_samples

        newest = open_folder(find_checkpoint(Path(config)), alone=True)
        planned, tokenizer = planned_samples(newest), newest.tokenizer_folder
    else:
        tokenizer = extended_tokenizer(run)
    documents = explain_step(run, step, planned, tokenizer)
    if answer({"step": step, "documents": documents}, json_out):
        columns = [name for name in documents[0] if name != "data"]
        print_table("", columns, [[_cell(row[name]) for name in columns] for row in documents])


def _cell(value: object) -> str:
    return "" if value is None else str(value)
