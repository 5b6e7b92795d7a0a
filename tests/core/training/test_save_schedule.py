"""When a run saves by the clock: rank 0's, at one step on every rank, for 1 % of the time."""

from itertools import count
from pathlib import Path

import pytest
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import GPT, documents, run_config

from mtcli.core.config.loading import load_config, preset_names
from mtcli.core.config.schema import TrainConfig
from mtcli.core.data.indexed import token_dtype
from mtcli.core.training import save_schedule
from mtcli.core.training.loop import train
from mtcli.core.training.save_schedule import SaveSchedule


@pytest.fixture
def clock(monkeypatch):
    """A list whose only item is the time, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(save_schedule, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("minutes", "cost", "wait"),
    [
        (30.0, 0.0, 1800.0),
        (30.0, 17.9, 1800.0),
        (30.0, 40.0, 4000.0),
        (0.5, 0.3, 30.0),
        (0.5, 0.4, 40.0),
    ],
)
def test_the_next_save_is_due_after_the_minutes_and_after_a_hundred_times_its_cost(
    clock, minutes, cost, wait
):
    saves = SaveSchedule(TrainConfig(steps=10, save_minutes=minutes))
    for _ in range(2):
        clock[0] += wait - 0.01
        assert not saves.due_by_time(cost)
        clock[0] += 0.01
        assert saves.due_by_time(cost)
        saves.saved()


def test_without_minutes_no_save_comes_by_time(clock):
    saves = SaveSchedule(TrainConfig(steps=10, save_minutes=0.0))
    clock[0] = 1e9
    assert not saves.due_by_time(0.0)


@pytest.mark.parametrize(("every", "steps"), [(0, [7]), (3, [3, 6, 7]), (7, [7])])
def test_a_run_saves_every_so_many_steps_and_at_its_end(every, steps):
    saves = SaveSchedule(TrainConfig(steps=7, save_every=every))
    assert [step for step in range(1, 8) if saves.due_by_step(step)] == steps


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "30 min after the last save (rarer where that would take over 1% of the time), "
         "at the end; keeps the newest 2"),
        ({"save_every": 1000, "save_minutes": 0, "keep": 0}, "every 1,000 steps, at the end; keeps "
         "all"),
        ({"save_minutes": 0}, "at the end; keeps the newest 2"),
        ({"save_minutes": 0, "keep_best": 1}, "after an evaluation that is among the best 1, at "
         "the end; keeps the newest 2 and the best 1"),
    ],
)  # fmt: skip
def test_the_header_says_when_a_run_saves(settings, words):
    assert str(SaveSchedule(TrainConfig(**settings))) == words


def test_every_preset_saves_by_time():
    assert {load_config(name).train.save_minutes for name in preset_names()} == {30.0}


def _saved_steps(runtime, output, data, sections):
    """The steps that a run saved where each look at rank 0's clock is 100 s after the last one, at
    another rank's no time, and at a third one's a day."""
    times = count(0.0, (100.0, 0.0, 86400.0)[runtime.rank])
    save_schedule.monotonic = lambda: next(times)
    limits = {"output": output, "steps": 9, "save_minutes": 5, "keep": 0, "async_save": False}
    config = run_config(GPT, train=limits, data={"train": [data]}, **sections)
    train(config, runtime, resume=False)
    return sorted(int(path.name[-8:]) for path in (Path(output) / "checkpoints").iterdir())


@pytest.mark.parametrize("sections", [{}, {"parallel": {"pp": 3}}], ids=str)
def test_ranks_whose_clocks_differ_save_at_the_steps_of_the_first_ones(tmp_path, sections):
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    sections = sections | {"batch": {"global_batch_size": 6}}
    arguments = str(tmp_path / "run"), str(tmp_path / "data"), sections
    assert run_ranks(3, _saved_steps, *arguments) == [[3, 6, 9]] * 3
