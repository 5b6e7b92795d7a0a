"""Trackers: a run that goes on is the same run, with the project, names, tags and config it had."""

import json
import sys
from types import ModuleType, SimpleNamespace

import accelerate.tracking  # noqa: F401 - which looks for the trackers as it is loaded
import pytest
from tiny import GPT, run_config

from mtcli.core.training.trackers import open_trackers

VARIABLES = ("WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_ID", "WANDB_ENTITY", "MLFLOW_RUN_ID")


@pytest.fixture
def calls(monkeypatch):
    """What the stand-ins of three trackers are called with: (name, settings) and (name, step)."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("accelerate.state.PartialState._shared_state", {})
    heard = []

    def stand_in(name, **attributes):
        module = ModuleType(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)

    def started(name):
        def init(**settings):
            heard.append((name, settings))
            log = lambda values, step, **_: heard.append((name, step))  # noqa: E731
            return SimpleNamespace(log=log, finish=lambda: None)

        return init

    def start_run(**settings):
        heard.append(("mlflow", settings))
        return SimpleNamespace(info=SimpleNamespace(run_id=settings["run_id"] or "theirs"))

    validation = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=1000)
    stand_in("wandb", init=started("wandb"))
    stand_in("trackio", init=started("trackio"))
    stand_in(
        "mlflow",
        search_experiments=lambda **_: [],
        create_experiment=lambda **about: about["name"],
        start_run=start_run,
        log_params=lambda params: heard.append(("params", params)),
        log_metrics=lambda values, step: heard.append(("mlflow", step)),
        utils=SimpleNamespace(validation=validation),
    )
    return heard


def opened(folder, calls, *names, step=0, **settings):
    """What trackers are told as they start, by their names."""
    calls.clear()
    folder.mkdir(exist_ok=True)
    train = {"output": str(folder), "trackers": list(names)} | settings
    for tracker in open_trackers(run_config(GPT, train=train), step):
        tracker.log({"loss": 1.0}, step=step + 1)
    return {name: told for name, told in calls if isinstance(told, dict)}


def test_a_run_that_goes_on_is_the_same_run(tmp_path, calls, capsys):
    first = opened(tmp_path / "run", calls, "wandb", "mlflow", "trackio")
    again = opened(tmp_path / "run", calls, "wandb", "mlflow", "trackio", step=40)
    assert capsys.readouterr().err == ""
    assert first["wandb"]["id"] == again["wandb"]["id"] and again["wandb"]["resume"] == "allow"
    assert first["trackio"]["name"] == again["trackio"]["name"]
    assert first["mlflow"]["run_id"] is None and again["mlflow"]["run_id"] == "theirs"
    assert "params" in first and "params" not in again
    assert [told for told in calls if told[1] == 41] == [
        ("wandb", 41), ("mlflow", 41), ("trackio", 41)]  # fmt: skip
    anew = opened(tmp_path / "run", calls, "wandb", "mlflow", "trackio")
    assert anew["wandb"]["id"] != first["wandb"]["id"] and anew["mlflow"]["run_id"] is None
    assert anew["trackio"]["name"] != first["trackio"]["name"]


def test_names_tags_and_the_config_are_told(tmp_path, calls):
    fields = {"project": "p", "entity": "e", "name": "n", "tags": ["a", "b"]}
    settings = {f"tracker_{name}": value for name, value in fields.items()}
    told = opened(tmp_path / "run", calls, "wandb", "mlflow", "trackio", **settings)
    assert told["wandb"].items() >= fields.items()
    assert told["wandb"]["config"]["model"]["hidden_size"] == 16
    assert told["mlflow"]["experiment_id"] == "p" and told["mlflow"]["run_name"] == "n"
    assert told["mlflow"]["tags"] == {"a": "true", "b": "true"}
    assert told["params"]["model.hidden_size"] == 16
    assert (told["trackio"]["project"], told["trackio"]["name"]) == ("p", "n")


def test_what_is_not_set_is_wandb_s_environment_s_or_the_folder_s(tmp_path, calls, monkeypatch):
    told = opened(tmp_path / "run", calls, "wandb")["wandb"]
    assert (told["project"], told["name"], told["entity"], told["tags"]) == (
        "mtcli", "run", None, None)  # fmt: skip
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    told = opened(tmp_path / "run", calls, "wandb")["wandb"]
    assert (told["project"], told["id"]) == ("theirs", "given")


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 3}', '{"wandb": "../x"}'])
def test_ids_that_are_damaged_are_none(tmp_path, calls, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").write_text(text)
    told = opened(tmp_path / "run", calls, "wandb", step=3)["wandb"]
    ids = json.loads((tmp_path / "run" / "trackers.json").read_text())
    assert told["id"] == ids["wandb"] and len(told["id"]) == 8


def test_tensorboard_has_each_step_of_a_run_that_died_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train = {"output": str(tmp_path), "trackers": ["tensorboard"]}
    for first, last in ((0, 5), (3, 6)):
        (tracker,) = open_trackers(run_config(GPT, train=train), first)
        for step in range(first + 1, last + 1):
            tracker.log({"loss": 10.0 * first + step}, step=step)
        tracker.finish()
    seen = EventAccumulator(str(tmp_path / "events")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in seen] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 34.0), (5, 35.0), (6, 36.0)]  # fmt: skip
