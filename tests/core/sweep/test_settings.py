"""What a sweep sums up: order, means over seeds, and a best that is at the end of a range."""

from types import SimpleNamespace

import numpy as np
import pytest

from mtcli.core.sweep.board import rows
from mtcli.core.sweep.record import TrialRecord
from mtcli.core.sweep.settings import at_ends, settings_of
from mtcli.core.sweep.trials import Range, Varied

LR = "optimizer.lr"


def record(loss, status="finished", steps=8, valid=None, **values):
    values = {LR if name == "lr" else name: value for name, value in values.items()}
    name = "_".join(f"{field}={value}" for field, value in values.items())
    config = SimpleNamespace(train=SimpleNamespace(steps=8, output="out"))
    one = TrialRecord(SimpleNamespace(name=name, values=values, config=config))
    one.losses, one.status, one.valid_loss = [loss] * steps, status, valid
    return one


def test_trials_that_were_stopped_early_are_below_those_that_ended_and_marked():
    records = [
        record(1.0, "stopped", 2, lr=1),
        record(3.0, lr=2),
        record(0.5, "diverged", 3, lr=3),
        record(2.0, lr=4),
        record(1.5, "stopped", 4, lr=5),
    ]
    table = rows(records)
    assert [row[0][-1] for row in table] == ["4", "2", "5", "1", "3"]
    assert [row[-1] for row in table] == ["finished"] * 2 + ["stopped early"] * 2 + ["diverged"]
    assert [one.as_json()["stopped_early"] for one in records] == [True, False, False, False, True]


@pytest.mark.parametrize("valid", [False, True])
def test_settings_have_the_mean_and_deviation_of_their_seeds(valid):
    losses = np.random.default_rng(0).uniform(2, 5, (2, 5))
    records = [
        record(losses[at, seed], valid=10 - losses[at, seed] if valid else None, lr=lr, seed=seed)
        for at, lr in enumerate((0.1, 0.3))
        for seed in range(5)
    ]
    records[2].status, records[9].status = "diverged", "stopped"
    counted = {0.1: losses[0, [0, 1, 3, 4]], 0.3: losses[1, :4]}
    settings = settings_of(records)
    means = [counted[setting.values[LR]].mean() for setting in settings]
    assert means == sorted(means, reverse=valid)
    for setting in settings:
        table = setting.as_json()
        expected = counted[setting.values[LR]]
        assert table["loss"] == pytest.approx(
            {"mean": expected.mean(), "std": expected.std(ddof=1)}
        )
        assert table["values"] == setting.values and (table["seeds"], table["finished"]) == (5, 4)
        assert (table["valid_loss"] or {}).get("mean") == (
            pytest.approx(10 - expected.mean()) if valid else None
        )
        cells = setting.row()
        assert cells[1:4] == ["4", f"{expected.mean():.4f}", f"{expected.std(ddof=1):.4f}"]
        assert (cells[4] != "") == valid and cells[-1] == "1"


def test_trials_of_one_seed_are_no_settings():
    assert settings_of([record(1.0, lr=1, seed=3), record(2.0, lr=2, seed=3)]) == []


def ends(best, values, drawn=False, legal=lambda field, word: True, **more):
    records = [record(1.0 + (value != best), lr=value, **more) for value in values]
    return at_ends(records, [Varied(LR, tuple(values))], drawn, legal)


def test_a_best_at_the_end_is_said_with_the_values_to_try_next():
    (end,) = ends(3e-3, [3e-4, 1e-3, 3e-3])
    assert str(end) == (
        "note: the best optimizer.lr, 0.003, is the highest of those tried: try --vary "
        "optimizer.lr=0.0003,0.001,0.003,0.009,0.027 --resume"
    )
    (end,) = ends(8, [8, 12, 16])
    assert (end.end, end.words) == ("lowest", "4,5,8,12,16")
    (end,) = ends(0.0, [0.0, 0.1])
    assert end.words == "-0.2,-0.1,0,0.1"
    (end,) = ends(3e-3, [1e-3, 3e-3], drawn=True)
    assert str(end).endswith("optimizer.lr=0.001,0.003,0.009,0.027 in another folder")


def test_nothing_is_said_inside_a_range_or_where_no_value_beyond_is_legal_or_trials_go_on():
    assert ends(1e-3, [3e-4, 1e-3, 3e-3]) == []
    assert ends(3e-3, [3e-3]) == []
    assert ends(0.0, [0.0, 0.1], legal=lambda field, word: float(word) >= 0) == []
    assert ends(3e-3, [1e-3, 3e-3], status="running") == []


@pytest.mark.parametrize(
    ("best", "limits", "words"),
    [
        (9e-3, Range(1e-4, 1e-2, False), "0.001..0.1"),
        (1.1e-4, Range(1e-4, 1e-2, False), "1e-05..0.001"),
        (1e-3, Range(1e-4, 1e-2, False), None),
        (0.48, Range(0.1, 0.5, False), "0.3..0.7"),
        (10, Range(10, 30, True), "0..20"),
    ],
)
def test_a_best_near_the_end_of_a_drawn_range_is_said_with_a_range_around_it(best, limits, words):
    found = at_ends([record(1.0, lr=best)], [Varied(LR, (), limits)], True, lambda *_: True)
    assert [end.words for end in found] == ([words] if words else [])


def test_the_best_of_several_seeds_is_the_setting_with_the_best_mean():
    losses = {(1.0, 0): 1.0, (1.0, 1): 9.0, (2.0, 0): 3.0, (2.0, 1): 3.0, (4.0, 0): 4, (4.0, 1): 4}
    records = [record(loss, lr=lr, seed=seed) for (lr, seed), loss in losses.items()]
    assert at_ends(records, [Varied(LR, (1.0, 2.0, 4.0))], False, lambda *_: True) == []
