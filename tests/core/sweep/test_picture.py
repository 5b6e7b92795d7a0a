"""The picture of a sweep: every trial has a name and is to be seen."""

import re
from types import SimpleNamespace

import pytest
from drawn import axes_of

from mtcli.core.profile.render.drawing import Chart
from mtcli.core.sweep.picture import MOST_NAMES, _against, _curves, save_picture


def record(name, losses, status="finished", lr=0.1, **more):
    loss = losses[-1]
    trial = SimpleNamespace(values={"optimizer.lr": lr} | more)
    return SimpleNamespace(
        name=name,
        losses=losses,
        status=status,
        score=loss,
        loss=loss,
        valid_loss=None,
        trial=trial,
        order=(status == "stopped", loss),
    )


def drawn(ranked):
    return axes_of(Chart(4.0, lambda axes: _curves(axes, ranked, 3)))


def against(ranked, field="optimizer.lr", joined=True):
    return axes_of(Chart(4.0, lambda axes: _against(axes, ranked, field, joined)))


def names_in(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_every_trial_is_named_the_best_first():
    ranked = [record("a", [4.0, 1.0]), record("b", [4.0, 2.0]), record("c", [4.0, 9.0], "diverged")]
    axes = drawn(ranked)
    assert names_in(axes.figure.legends[0]) == ["a", "b", "c, diverged"]
    last = axes.lines[0]
    assert last.get_marker() == "x" and last.get_markevery() == [-1]


def test_curves_that_coincide_differ_in_their_dashes():
    axes = drawn([record(str(number), [4.0, 2.0]) for number in range(3)])
    assert len({line._dash_pattern and str(line._dash_pattern) for line in axes.lines}) == 3


def test_of_very_many_trials_the_best_are_named():
    axes = drawn([record(str(number), [4.0, 2.0 + number]) for number in range(MOST_NAMES + 40)])
    (legend,) = axes.figure.legends
    assert names_in(legend) == [str(n) for n in range(MOST_NAMES)]
    assert legend.get_title().get_text() == f"the best {MOST_NAMES} of {MOST_NAMES + 40}"


def test_of_trials_in_one_place_each_is_seen_around_the_better_ones():
    ranked = [record(str(number), [4.0, 2.0]) for number in range(4)]
    sizes = list(against(ranked, joined=False).collections[0].get_sizes())
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


STOPPED = [
    record("a", [4.0, 3.0, 2.0, 1.0], lr=0.1),
    record("b", [4.0, 3.0, 2.0, 1.5], lr=0.3),
    record("c", [4.0, 3.5], "stopped", lr=0.2),
]


def test_trials_that_were_stopped_early_are_named_so_and_end_in_a_hollow_dot():
    axes = drawn(STOPPED)
    assert names_in(axes.figure.legends[0]) == ["a", "b", "c, stopped at 2"]
    by_name = {line.get_label(): line for line in axes.lines}
    last = by_name["c, stopped at 2"]
    assert (last.get_marker(), last.get_markerfacecolor(), last.get_markevery()) == (
        "o",
        "none",
        [-1],
    )
    assert by_name["a"].get_marker() == "None"


def test_the_line_of_final_losses_joins_no_trial_that_was_stopped_early():
    axes = against(STOPPED)
    assert axes.lines[0].get_xydata().tolist() == [[0.1, 1.0], [0.3, 1.5]]
    whole, stopped = axes.collections
    assert stopped.get_offsets().tolist() == [[0.2, 3.5]] and len(stopped.get_facecolors()) == 0
    assert "stopped early" in names_in(axes.get_legend()) and len(whole.get_offsets()) == 2


def test_settings_of_several_seeds_are_joined_at_their_means_with_their_deviations():
    losses = {(0.1, 1): 2.0, (0.1, 2): 3.0, (0.3, 1): 1.0, (0.3, 2): 1.5}
    ranked = [
        record(f"{lr} {seed}", [4.0, loss], lr=lr, seed=seed) for (lr, seed), loss in losses.items()
    ]
    axes = against(ranked)
    assert axes.lines[0].get_xydata().tolist() == [[0.1, 2.5], [0.3, 1.25]]
    bars = [path.vertices[:, 1].tolist() for path in axes.collections[0].get_paths()]
    half = 1 / 2**0.5  # the deviation of two numbers is their distance over the root of 2
    expected = [[2.5 - half, 2.5 + half], [1.25 - half / 2, 1.25 + half / 2]]
    assert [pytest.approx(bar) for bar in bars] == expected


def test_a_saved_picture_has_plain_ticks_and_no_panel_of_seeds(tmp_path):
    ranked = [
        record(f"{lr} {seed}", [4.0, 3.0, 2.0], lr=10.0**-lr, seed=seed)
        for lr in range(1, 8)
        for seed in (1, 2)
    ]
    save_picture(tmp_path / "a.svg", ranked, ["optimizer.lr", "seed"])
    texts = re.findall(r">([^<>]+)</text>", (tmp_path / "a.svg").read_text())
    assert "1e\u221204" in texts and "optimizer.lr" in texts and "seed" not in texts
    assert not any("$" in text for text in texts)
    assert all("." not in text for text in texts[: texts.index("step")]), texts


def test_a_sweep_of_seeds_alone_has_them_on_its_axis():
    ranked = [record(str(seed), [4.0, 2.0 + seed], seed=seed) for seed in (3, 4)]
    axes = against(ranked, "seed")
    assert axes.lines[0].get_xydata().tolist() == [[3, 5.0], [4, 6.0]]
