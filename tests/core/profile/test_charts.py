"""Charts hold the numbers that they are given, at the places where a reader looks for them."""

import pytest

from mtcli.core.config.loading import config_of, load_config
from mtcli.core.plan.tables import rank_map
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.render import charts
from mtcli.core.profile.render.charts import curves, step_histogram
from mtcli.core.schedule.generators import one_f_one_b
from mtcli.core.schedule.timeline import simulate

MIB = 2**20


def test_the_gantt_has_planned_over_measured_for_each_rank(profile):
    seconds = {"F": 1.0, "B": 2.0}
    planned = simulate(one_f_one_b(2, 2), seconds)
    figure = charts.gantt({"planned": planned, "measured": profile.measured})
    rows = ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    assert list(figure.layout.yaxis.categoryarray) == rows[::-1]
    bars = {
        (row, data[0]): (start, start + width)
        for trace in figure.data
        for row, data, start, width in zip(
            trace.y, trace.customdata, trace.base, trace.x, strict=True
        )
    }
    assert bars["rank 1 measured", "B0.1"] == pytest.approx((2.25, 4.25))
    assert bars["rank 1 planned", "B0.1"] == pytest.approx((2.0, 4.0))
    assert len(bars) == 16


def test_of_a_long_schedule_the_first_ops_are_drawn():
    timeline = simulate(one_f_one_b(4, 1000), lambda op: 1.0)
    figure = charts.gantt({"planned": timeline})
    drawn = [start for trace in figure.data for start in trace.base]
    assert len(drawn) == charts.MOST_SPANS < len(timeline.spans)
    assert max(drawn) <= sorted(span.start for span in timeline.spans)[charts.MOST_SPANS]
    assert figure.data[0].texttemplate is None


def test_bars_hold_the_shares_and_bytes_they_are_given(profile):
    data = profile.as_json()
    rows = [{"label": str(row["pp_rank"]), **row} for row in data["shares_by_rank"]]
    shares = charts.stacked_shares(rows, tuple(data["shares"]))
    assert sum(trace.x[0] for trace in shares.data) == pytest.approx(100.0)
    memory = charts.by_rank([{"label": "a", "weights": 3 * MIB}], ("weights", "gradients"))
    assert [trace.y[0] for trace in memory.data] == [3.0, 0.0]


def test_the_waterfall_rises_kind_by_kind_to_the_process():
    def mib(found):
        return {kind: held * MIB for kind, held in found.items()}

    measured = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 10, "process": 30}
    planned = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 9, "process": 26}
    figure = charts.waterfall(mib(measured), mib(planned), 32 * MIB)
    assert list(figure.data[0].y) == [4, 4, 8, 10, 4, 30]
    assert list(figure.data[1].y) == [4, 4, 8, 9, 1, 26]
    assert figure.layout.shapes[0].y0 == 32.0  # what the device has
    far = charts.waterfall(mib(measured), {}, 1000 * MIB)
    assert len(far.data) == 1 and not far.layout.shapes


def test_memory_over_the_step_is_stacked_by_kind(profile):
    figure = charts.over_time(profile.as_json()["memory_by_kind_over_time"])
    held = {trace.name: trace.y[1] for trace in figure.data}
    assert held["activations"] == 2.0 and held["temporary"] == 1.0
    assert held["optimizer"] == 8001 / MIB


def test_every_rank_is_on_the_map_once_with_its_layers():
    flags = ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2"]
    ranks = rank_map(Workload.of(load_config("tiny", flags), 8))
    figure = charts.grid_map(ranks, "attention").data[0]
    text = str(figure.text)
    assert [text.count(f"rank {rank}<") for rank in range(8)] == [1] * 8
    assert "rank 6<br>dp1 cp0 tp0" in text
    assert list(figure.y) == ["pp0: layers 0, 2", "pp1: layers 1, 3"]


def test_experts_have_a_map_of_their_own():
    table = {"parallel": {"ep": 2, "tp": 2}, "model": {"num_experts": 4, "top_k": 1}}
    small = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 64}
    table["model"] |= small | {"max_seq_len": 8}
    text = str(charts.grid_map(rank_map(Workload.of(config_of(table), 4)), "experts").data[0].text)
    assert "rank 1<br>edp0 ep1 etp0" in text and "rank 2<br>edp1 ep0 etp0" in text


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
    chart = charts.heat_map(data["communication_matrix_bytes"], data["communication_by_axis"]).data[
        0
    ]
    assert [list(row) for row in chart.z] == [[0, 4608], [4609, 0]]
    assert chart.text[1][0] == "data: 4,096 bytes in 2 calls<br>pp_forward: 513 bytes in 2 calls"
    assert chart.text[0][0] == "nothing"


def test_ranks_of_a_large_world_are_added_up_in_blocks():
    world = 300  # of which 3 are in a block
    rows = [
        {"axis": "dp", "from": r, "to": (r + 1) % world, "bytes": 1, "calls": 1} for r in range(300)
    ]
    matrix = [[int(b == (a + 1) % world) for b in range(world)] for a in range(world)]
    chart = charts.heat_map(matrix, rows).data[0]
    assert len(chart.z) == 100 and chart.x[99] == "297-299"
    assert chart.z[0][0] == 2 and chart.z[0][1] == 1 and chart.z[99][0] == 1
    assert chart.text[0][0] == "dp: 2 bytes in 2 calls"


def test_axes_on_which_nothing_moves_are_left_out():
    told = {"tp": {"measured": 0.5, "planned": None}, "cp": {"measured": 0.0, "planned": 0.0}}
    measured, planned = charts.axis_seconds(told).data
    assert list(measured.x) == ["tp"] and list(measured.y) == [500.0] and list(planned.y) == [0.0]


def test_the_curves_are_drawn_where_they_are_told():
    told = {"loss": {"steps": [1, 3], "values": [4.0, None]}}
    told["validation loss"] = {"steps": [2], "values": [4.5]}
    figure = curves(told, resumed=[2])
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data}
    assert lines == {"loss": ([1, 3], [4.0, None]), "validation loss": ([2], [4.5])}
    assert [shape.x0 for shape in figure.layout.shapes] == [2]


def test_a_histogram_counts_every_step():
    assert sum(step_histogram([1.0, 1.0, 2.0, 30.0]).data[0].y) == 4
