"""--task flags are read together and refused together."""

from pathlib import Path

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.tasks.registry import TASKS, parse_tasks


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with some data."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "x", "a=c"):
        (tmp_path / name).write_text("data")


def test_task_flags_are_names_with_paths_or_lm_evals_names():
    specs = parse_tasks(["race=a=c", "lm_eval:hellaswag", "lambada=x"])
    assert specs == [("race", Path("a=c")), ("lm_eval:hellaswag", None), ("lambada", Path("x"))]


def test_the_papers_tasks_are_there():
    of_choice = {"race_h", "boolq", "piqa", "hellaswag", "winogrande", "hans", "wic"}
    others = {"wikitext103", "lambada", "race", "lambada_cloze", "anli_r1", "anli_r2", "anli_r3"}
    assert of_choice | others <= set(TASKS)


@pytest.mark.parametrize(
    "specs, message, hint",
    [
        ([], "no task is given, at least 1 is needed", "wikitext103=PATH"),
        (["lambda=x"], "there is no task 'lambda'", "did you mean lambada=PATH? the"),
        (["lambda="], "there is no task 'lambda'", "did you mean lambada=PATH? the"),
        (["wikitext=x"], "there is no task 'wikitext'", "did you mean wikitext103=PATH? the"),
        (["zzz=x"], "there is no task 'zzz'", "race=PATH"),
        (["race=none"], "race: none does not exist", "the folder it is in"),
        (["race"], "race has no path", "race=PATH"),
        (["race="], "race= has no path", "race=PATH"),
        (["lm_eval:"], "lm_eval: names no task", "lm_eval:NAME"),
        (["race=a", "race=b"], "race is given 2 times", "give each task once"),
    ],
)
def test_a_bad_task_flag_is_refused(specs, message, hint):
    with pytest.raises(MtcliError) as caught:
        parse_tasks(specs)
    (problem,) = caught.value.problems
    assert problem.message == message and hint in problem.hint and problem.field == "--task"


def test_all_bad_task_flags_are_reported_at_once():
    with pytest.raises(MtcliError) as caught:
        parse_tasks(["race", "nope=1", "lambada=a", "lambada=b"])
    assert len(caught.value.problems) == 3
