"""Charts hold the numbers that they are given, at the places where a reader looks for them."""

import re
from math import isnan

import pytest
from drawn import axes_of, boxes_of, names_of

from mtcli.core.config.loading import config_of, load_config
from mtcli.core.plan.tables import rank_map
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.render import charts
from mtcli.core.profile.render.drawing import Chart, svg
from mtcli.core.schedule.generators import one_f_one_b
from mtcli.core.schedule.timeline import simulate

MIB = 2**20


def test_the_gantt_has_planned_over_measured_for_each_rank(profile):
    planned = simulate(one_f_one_b(2, 2), {"F": 1.0, "B": 2.0})
    chart = charts.gantt({"planned": planned, "measured": profile.measured})
    axes = axes_of(chart)
    rows = ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    assert names_of(axes.yaxis) == rows and axes.get_ylim() == (3.5, -0.5)  # the first on top
    drawn = boxes_of(chart)
    assert len(drawn) == 16
    bars = {tip.split("\n")[0]: box for _, tip, *box in drawn}
    assert bars["B0.1, rank 1 measured"] == pytest.approx([2.25, 3 - 0.4, 2.0, 0.8])
    assert bars["B0.1, rank 1 planned"] == pytest.approx([2.0, 2 - 0.4, 2.0, 0.8])
    kinds = {tip[0]: label for label, tip, *_ in drawn}
    assert kinds == {"F": "forward", "B": "backward"}
    assert "B0.1, rank 1 measured\n2.25000 to 4.25000 s: 2,000.000 ms" in [
        tip for _, tip, *_ in drawn
    ]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("B0.1") == 2  # its name inside
    # Of 9 planned seconds a rank is busy in 6, of 9.5 measured ones too.
    assert texts[-4:] == ["idle 33%", "idle 37%"] * 2


def test_of_a_long_schedule_the_first_ops_are_drawn():
    timeline = simulate(one_f_one_b(4, 1000), lambda op: 1.0)
    assert len(boxes_of(charts.gantt({"": timeline}))) == len(timeline.spans)
    chart = charts.gantt({"": timeline}, charts.MOST_SPANS)
    starts = [left for _, _, left, *_ in boxes_of(chart)]
    assert len(starts) == charts.MOST_SPANS < len(timeline.spans)
    assert max(starts) <= sorted(span.start for span in timeline.spans)[charts.MOST_SPANS]
    texts = [text.get_text() for text in axes_of(chart).texts]  # no name has room
    assert texts == [f"idle {3 / 2003:.0%}"] * 4, "(p - 1) of m + p - 1 ops of equal length"
    assert names_of(axes_of(chart).yaxis) == [f"rank {rank}" for rank in range(4)]


def test_bars_hold_the_shares_and_bytes_they_are_given(profile):
    data = profile.as_json()
    rows = [{"label": str(row["pp_rank"]), **row} for row in data["shares_by_rank"]]
    drawn = boxes_of(charts.stacked_shares(rows, tuple(data["shares"])))
    first = [box for _, tip, *box in drawn if tip.endswith("\n0")]
    assert [width for *_, width, _ in first] == pytest.approx(
        [100 * rows[0][kind] for kind in data["shares"]]
    )
    ends = [left + width for left, _, width, _ in first]
    assert [left for left, *_ in first] == pytest.approx([0.0, *ends[:-1]])
    assert ends[-1] == pytest.approx(100.0)
    rows = [{"label": "a", "weights": 3 * MIB, "gradients": 2 * MIB}, {"label": "b"}]
    memory = boxes_of(charts.by_rank(rows, ("weights", "gradients")))
    assert [(label, lower, height) for label, _, _, lower, _, height in memory] == [
        ("weights", 0, 3), ("weights", 0, 0), ("gradients", 3, 2), ("gradients", 0, 0)
    ]  # fmt: skip


def test_the_waterfall_rises_kind_by_kind_to_the_process():
    def mib(sizes):
        return {kind: size * MIB for kind, size in sizes.items()}

    measured = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 10, "process": 30}
    planned = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 9, "process": 26}
    chart = charts.waterfall(mib(measured), mib(planned), 32 * MIB)
    spans = {"measured": [], "planned": []}
    for label, _, _, lower, _, height in boxes_of(chart):
        spans[label].append((lower, height))
    assert spans["measured"] == [(0, 4), (4, 4), (8, 8), (16, 10), (26, 4), (0, 30)]
    assert spans["planned"] == [(0, 4), (4, 4), (8, 8), (16, 9), (25, 1), (0, 26)]
    assert [list(line.get_ydata()) for line in axes_of(chart).lines] == [[32.0, 32.0]]
    far = charts.waterfall(mib(measured), {}, 1000 * MIB)
    assert {label for label, *_ in boxes_of(far)} == {"measured"} and not axes_of(far).lines


def test_memory_over_the_step_is_stacked_by_kind(profile):
    axes = axes_of(charts.over_time(profile.as_json()["memory_by_kind_over_time"]))
    tops = {layer.get_label(): layer.get_datalim(axes.transData).y1 for layer in axes.collections}
    state = (4000 + 4000 + 8001) / MIB
    assert tops["optimizer"] == pytest.approx(state)
    assert tops["activations"] == pytest.approx(state + 2.0)
    assert tops["temporary"] == pytest.approx(state + 3.0)


def test_memory_is_on_the_clock_of_the_timeline(profile):
    data = profile.as_json()["memory_by_kind_over_time"]
    limits = charts.time_limits(data, [profile.measured])
    assert limits == (-0.5, 9.5)
    drawn = [charts.gantt({"measured": profile.measured}, limits=limits)]
    drawn.append(charts.over_time(data, limits))
    axes = [axes_of(chart) for chart in drawn]
    assert [one.get_xlim() for one in axes] == [(-0.5, 9.5)] * 2
    assert {one.get_xlabel() for one in axes} == {"seconds since the first op of the step"}


def test_shares_of_the_peak_that_no_device_reaches_are_marked():
    curves = {"MFU (%)": {"steps": [1, 2, 3], "values": [40.0, 120.0, None]}}
    (chart,) = charts.curves(curves)
    _, limit, marked = axes_of(chart).lines
    assert list(limit.get_ydata()) == [100.0, 100.0]
    assert (list(marked.get_xdata()), list(marked.get_ydata())) == ([2], [120.0])
    assert marked.get_label() == "1 of 3 above 100 %: the peak was measured too low"
    curves["MFU (%)"]["values"][1] = 100.0
    assert len(axes_of(charts.curves(curves)[0]).lines) == 1


def test_every_rank_is_on_the_map_once_with_its_layers():
    flags = ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2"]
    ranks = rank_map(Workload.of(load_config("tiny", flags), 8))
    chart = charts.grid_map(ranks, "attention")
    cells = {tip: (round(left), round(lower)) for _, tip, left, lower, *_ in boxes_of(chart)}
    text = str(cells)
    assert [text.count(f"rank {rank}\\n") for rank in range(8)] == [1] * 8
    assert cells["rank 6\ndp1 cp0 tp0\nlayers 1, 3"] == (2, 1)
    axes = axes_of(chart)
    assert names_of(axes.yaxis) == ["pp0: layers 0, 2", "pp1: layers 1, 3"]
    assert "rank 6\ndp1 cp0 tp0" in [text.get_text() for text in axes.texts]
    assert axes.get_xlabel() == "dp=2 cp=1 tp=2"


def test_experts_have_a_map_of_their_own():
    table = {"parallel": {"ep": 2, "tp": 2}, "model": {"num_experts": 4, "top_k": 1}}
    small = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 64}
    table["model"] |= small | {"max_seq_len": 8}
    text = str(boxes_of(charts.grid_map(rank_map(Workload.of(config_of(table), 4)), "experts")))
    assert "rank 1\\nedp0 ep1 etp0" in text and "rank 2\\nedp1 ep0 etp0" in text


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([0, 1, 2, 8, 9], "layers 0-2, 8-9"),
        ([3], "layer 3"),
        ([], "no layers"),
    ],
)
def test_layers_are_told_as_runs(layers, words):
    assert charts.layers_of({"layers": layers}) == words


def test_the_heat_map_has_senders_in_rows_and_tells_the_axes(profile):
    data = profile.as_json()
    chart = charts.heat_map(data["communication_matrix_bytes"], data["communication_by_axis"])
    cells = {(round(lower), round(left)): tip for _, tip, left, lower, *_ in boxes_of(chart)}
    assert cells[1, 0] == (
        "from 1 to 0: 4,609 bytes\ndata: 4,096 bytes in 2 calls\npp_forward: 513 bytes in 2 calls"
    )
    assert cells.keys() == {(0, 1), (1, 0)}  # nothing is sent to oneself
    axes = axes_of(chart)
    assert axes.get_ylim() == (1.5, -0.5) and "4,609 bytes" in axes.get_xlabel()


def test_ranks_of_a_large_world_are_added_up_in_blocks():
    world = 180  # of which 3 are in a block
    rows = [
        {"axis": "dp", "from": r, "to": (r + 1) % world, "bytes": 1, "calls": 1}
        for r in range(world)
    ]
    matrix = [[int(b == (a + 1) % world) for b in range(world)] for a in range(world)]
    tips = [tip for _, tip, *_ in boxes_of(charts.heat_map(matrix, rows))]
    assert len(tips) == 120
    for line in (
        "from 0-2 to 0-2: 2 bytes\ndp: 2 bytes in 2 calls",
        "from 0-2 to 3-5: 1 bytes\ndp: 1 bytes in 1 calls",
        "from 177-179 to 0-2: 1 bytes\ndp: 1 bytes in 1 calls",
    ):
        assert line in tips


def test_axes_on_which_nothing_moves_are_left_out():
    rows = {"tp": {"measured": 0.5, "planned": None}, "cp": {"measured": 0.0, "planned": 0.0}}
    chart = charts.axis_seconds(rows)
    assert names_of(axes_of(chart).xaxis) == ["tp"]
    assert [(label, height) for label, *_, height in boxes_of(chart)] == [
        ("measured", 500.0), ("planned", 0.0)
    ]  # fmt: skip


def test_the_longest_kernels_are_on_top():
    rows = [{"name": f"kernel {n}", "seconds": 1 / n, "calls": n} for n in range(1, 20)]
    chart = charts.kernel_bars(rows)
    names = names_of(axes_of(chart).yaxis)
    assert names == [f"kernel {n}" for n in range(1, 13)]
    assert [width for *_, width, _ in boxes_of(chart)][:2] == [1000.0, 500.0]
    assert boxes_of(chart)[1][1] == "500.00 ms in 2 calls"


def test_ticks_of_steps_are_whole_and_logarithmic_ones_are_no_tex():
    curve = {"steps": [1, 2, 3, 4], "values": [3.0, 2.0, 1.5, 1.2]}
    rows = [charts.curves({"loss": curve})[0], charts.step_bars([0.2, 0.1, 0.3])]
    rows.append(Chart(2.0, lambda axes: axes.semilogx([1e-4, 1e-1], [1, 2])))
    texts = re.findall(r">([^<>]+)</text>", svg(rows))
    steps = texts[: texts.index("step")], texts[texts.index("loss") : texts.index("timed step")]
    assert [[text for text in ticks if text[0].isdigit()] for ticks in steps][0] == list("1234")
    assert not any("." in text for text in texts[: texts.index("step")]), texts
    assert "1e\u221203" in texts and not any("$" in text for text in texts)


def test_an_axis_names_no_more_bars_than_it_has_room_for():
    rows = [{"label": f"pipeline rank {n}", "weights": MIB} for n in range(64)]
    names = names_of(axes_of(charts.by_rank(rows, ("weights",))).xaxis)
    assert 4 <= len(names) <= 8 and names[0] == "pipeline rank 0"


def test_each_timed_step_has_a_bar():
    heights = [height for *_, height in boxes_of(charts.step_bars([1.0, 3.0, 2.0]))]
    assert heights == [1.0, 3.0, 2.0]
    many = boxes_of(charts.step_bars([1.0] * 5000 + [9.0] + [1.0] * 5000))
    assert len(many) <= 2002 and max(height for *_, height in many) == 9.0  # no spike is lost


def test_the_curves_are_drawn_where_they_are_told():
    curves = {"loss": {"steps": [1, 3], "values": [4.0, None]}}
    curves["validation loss"] = {"steps": [2], "values": [4.5]}
    (chart,) = charts.curves(curves, resumed=[2])
    assert chart.title == "loss"
    loss, resumed, valid = axes_of(chart).lines
    assert list(loss.get_xdata()) == [1, 3]
    assert loss.get_ydata()[0] == 4.0 and isnan(loss.get_ydata()[1])
    assert (list(valid.get_xdata()), list(valid.get_ydata())) == ([2], [4.5])
    assert list(resumed.get_xdata()) == [2, 2]


def test_named_validation_sets_share_the_loss_s_picture_and_a_task_has_its_own():
    names = ("loss", "validation loss", "validation loss wiki", "eval/race/accuracy")
    curves = {name: {"steps": [1], "values": [float(n)]} for n, name in enumerate(names)}
    loss, task = charts.curves(curves)
    assert (loss.title, task.title) == ("loss", "eval/race/accuracy")
    lines = axes_of(loss).lines
    assert [list(line.get_ydata()) for line in lines] == [[0.0], [1.0], [2.0]]
    assert len({line.get_color() for line in lines}) == 3
    assert [list(line.get_ydata()) for line in axes_of(task).lines] == [[3.0]]


def test_a_histogram_counts_every_step():
    drawn = boxes_of(charts.step_histogram([1.0, 1.0, 2.0, 30.0]))
    assert sum(height for *_, height in drawn) == 4
    assert re.fullmatch(r"2 steps of 1 to 1\.\d+ s", drawn[0][1])
