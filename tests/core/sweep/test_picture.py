"""The picture of a sweep: every trial has a name and is to be seen."""

from types import SimpleNamespace

from drawn import axes_of

from mtcli.core.profile.render.drawing import Chart
from mtcli.core.sweep.picture import MOST_NAMES, _against, _curves


def record(name, losses, status="finished", lr=0.1):
    loss = losses[-1]
    trial = SimpleNamespace(values={"optimizer.lr": lr})
    return SimpleNamespace(
        name=name, losses=losses, status=status, score=loss, valid_loss=None, trial=trial
    )


def drawn(ranked):
    return axes_of(Chart(4.0, lambda axes: _curves(axes, ranked)))


def test_every_trial_is_named_the_best_first():
    ranked = [record("a", [4.0, 1.0]), record("b", [4.0, 2.0]), record("c", [4.0, 9.0], "diverged")]
    axes = drawn(ranked)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["a", "b", "c, diverged"]
    last = axes.lines[0]
    assert last.get_marker() == "x" and last.get_markevery() == [-1]


def test_curves_that_coincide_differ_in_their_dashes():
    axes = drawn([record(str(number), [4.0, 2.0]) for number in range(3)])
    assert len({line._dash_pattern and str(line._dash_pattern) for line in axes.lines}) == 3


def test_of_very_many_trials_the_best_are_named():
    axes = drawn([record(str(number), [4.0, 2.0 + number]) for number in range(MOST_NAMES + 40)])
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [str(n) for n in range(MOST_NAMES)]
    assert legend.get_title().get_text() == f"the best {MOST_NAMES} of {MOST_NAMES + 40}"


def test_of_trials_in_one_place_each_is_seen_around_the_better_ones():
    ranked = [record(str(number), [4.0, 2.0]) for number in range(4)]
    chart = Chart(4.0, lambda axes: _against(axes, ranked, "optimizer.lr", joined=False))
    sizes = list(axes_of(chart).collections[0].get_sizes())
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
