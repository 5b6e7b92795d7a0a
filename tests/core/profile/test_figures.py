"""The figures of a profile, against numbers worked out by hand for the profile of handmade.py."""

import json
from dataclasses import replace
from io import BufferedWriter, BytesIO, TextIOWrapper

import pytest
from handmade import config_table, record_of, step_of

from mtcli.commands.profile import _show_profile
from mtcli.core.config.loading import config_of, load_config
from mtcli.core.parallel.groups import AXES
from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.plan.hardware import HERE, device_named
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.figures import CARRIERS, Profile, planned_shares
from mtcli.core.profile.records import MemorySample, WaitSeconds
from mtcli.core.profile.render.text import (
    planned_memory_rows,
    show_measured,
    show_planned,
    summary_rows,
)

# GPT of 2 layers of 16, vocabulary 64, 8 tokens: weights of matrices 12 * 16 * 16 a layer and the
# head's 64 * 16; attention 4 * 8 * 16 a layer and token.
FORWARD = 2 * (2 * 12 * 16 * 16 + 64 * 16) + 2 * 4 * 8 * 16
TOKENS = 16


def test_every_group_of_ranks_counts_for_one_axis_of_the_plan():
    counted = [group for groups in CARRIERS.values() for group in groups]
    assert sorted(counted) == sorted([*AXES, "ends", "matrices", "world"])


def test_model_flops_are_three_forward_passes_with_full_attention(profile):
    data = profile.as_json()
    assert data["model_flops_per_step"] == 3 * FORWARD * TOKENS
    assert data["mfu"] == pytest.approx(3 * FORWARD * TOKENS / 12.0 / 2e9)
    assert data["hfu"] == data["mfu"]
    assert data["flop_convention"] == "3x forward, full attention"


@pytest.mark.parametrize(
    ("recompute", "again"), [("selective", 2 * 4 * 8 * 16), ("full", FORWARD - 2 * 64 * 16)]
)
def test_hardware_flops_add_what_is_computed_again(records, recompute, again):
    config = config_of(config_table(recompute=recompute))
    data = Profile(config, 2, "", records).as_json()
    assert data["hardware_flops_per_step"] == pytest.approx((3 * FORWARD + again) * TOKENS)
    assert data["hfu"] / data["mfu"] == pytest.approx((3 * FORWARD + again) / (3 * FORWARD))


@pytest.mark.parametrize("ranks", [64, 1], ids=["a core each", "two ranks on a core"])
def test_step_timeline_and_bubble_are_planned_once(records, ranks, monkeypatch, capsys):
    """The plan's own step, of which the timeline shows the pipeline."""
    monkeypatch.setattr("mtcli.core.plan.hardware.cores", lambda: ranks)
    profile = Profile(config_of(config_table()), 2, "cpu", records)
    data, costs = profile.as_json(), profile.prediction.costs
    step, bubble = profile.prediction.step_seconds, profile.prediction.bubble_fraction
    pipeline = step - costs.gradients_exposed - costs.optimizer - costs.overhead
    assert (costs.crowd, bubble > 0.1) == (2 / min(2, ranks), ranks > 1)
    ends = [row["end"] for row in data["planned_timeline"]]
    assert max(ends) == pytest.approx(pipeline)
    assert data["predicted"]["step_seconds"] == pytest.approx(step)
    assert data["figures"]["step_seconds"]["planned"] == pytest.approx(step)
    told = data["bubble_fraction"], data["predicted"], data["figures"]["bubble_fraction"]
    assert [
        one[key] for one, key in zip(told, ("planned", "bubble_fraction", "planned"), strict=True)
    ] == (pytest.approx([bubble] * 3))
    assert data["bubble_fraction"]["measured"] == pytest.approx(7.0 / 12.0)
    rows = {row[0]: row[2] for row in summary_rows(data)}
    assert rows["step time"] == f"{step:.4g} s"
    assert rows["pipeline, as drawn"] == f"{pipeline:.4g} s"
    assert (
        planned_end(profile, capsys) == 9.5
    )  # where the measured one ends: both are drawn to one scale


def planned_end(profile, capsys):
    """The last moment on the ruler of the planned timeline."""
    show_planned(profile)
    *_, ruler, _ = capsys.readouterr().out.splitlines()
    return float(ruler.split()[-2])


def test_measured_and_planned_ops_can_be_joined_by_rank_and_name(cpu_profile):
    data = cpu_profile.as_json()
    joined = [{(r["rank"], r["op"]) for r in data[key]} for key in ("timeline", "planned_timeline")]
    assert joined[0] == joined[1]
    assert len(joined[0]) == 8


def test_every_op_has_its_planned_times_beside_the_measured(cpu_profile):
    data = cpu_profile.as_json()
    plan = {(row["rank"], row["op"]): row for row in data["planned_timeline"]}
    rows = {(row["rank"], row["op"]): row for row in data["joined_timeline"]}
    assert len(rows) == 8
    assert rows[1, "B0.1"] == {
        "rank": 1,
        "op": "B0.1",
        "planned_start": plan[1, "B0.1"]["start"],
        "planned_end": plan[1, "B0.1"]["end"],
        "start": pytest.approx(2.25),
        "end": pytest.approx(4.25),
    }
    assert 0.0 < plan[1, "B0.1"]["start"] < plan[1, "B0.1"]["end"]


def test_a_rank_alone_that_waits_for_its_host_is_planned_to_communicate_nothing():
    plan = predict_workload(Workload.of(load_config("tiny"), 1), device_named("h100"))
    assert plan.costs.block.total > 1.05 * plan.costs.busy.total
    shares = planned_shares(plan)
    assert shares["communication"] == pytest.approx(0.0, abs=1e-3)
    assert sum(shares.values()) == pytest.approx(1.0) and shares["forward"] > 0.1


def test_each_figure_has_the_planned_one_beside_it(records):
    data = Profile(config_of(config_table()), 2, "cpu", records).as_json()
    plan, found = data["predicted"], data["figures"]
    assert found["step_seconds"] == {
        "measured": 12.0,
        "planned": plan["step_seconds"],
        "unit": "s",
    }
    assert found["mfu"]["measured"] == data["mfu"] and found["mfu"]["planned"] == plan["mfu"]
    shares = [row for name, row in found.items() if name.startswith("share.")]
    for column in ("measured", "planned"):
        assert sum(row[column] for row in shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fullest", "elements"),
    [
        # 12 h^2 + 13 h in a block: tokens, padded to 128, and positions before it; a norm and the
        # head after it.
        (0, 128 * 16 + 8 * 16 + 12 * 16**2 + 13 * 16),
        (1, 12 * 16**2 + 13 * 16 + 2 * 16 + 128 * 16),
    ],
)
def test_measured_and_planned_memory_are_of_the_same_rank(records, fullest, elements):
    records[fullest] = records[fullest]._replace(state_bytes={"weights": 10**7})
    profile = Profile(config_of(config_table()), 2, "cpu", records)
    data = profile.as_json()
    assert data["fullest_rank"] == fullest
    found = data["figures"]
    weights = {"measured": 10**7, "planned": 4 * elements, "unit": "bytes"}
    assert found["memory.weights"] == weights
    of_rank = profile.prediction.stages[fullest]
    device = HERE.reserved_bytes  # of `other`, what is not a step's
    step = of_rank.activations + of_rank.other - device
    assert found["memory.activations"]["planned"] == pytest.approx(step, abs=1)
    assert found["memory.peak"]["planned"] == round(of_rank.total - device)
    assert found["memory.process"]["planned"] == round(of_rank.total)
    assert planned_memory_rows(data)[0][0] == f"rank {fullest} weights"


def test_a_device_that_plan_does_not_know_has_nothing_planned(profile, capsys):
    data = profile.as_json()
    assert {row["planned"] for row in data["figures"].values()} == {None}
    assert {row["planned_start"] for row in data["joined_timeline"]} == {None}
    assert data["planned_timeline"] is data["bubble_fraction"]["planned"] is None
    show_planned(profile)
    assert capsys.readouterr().out == ""


def test_what_was_measured_has_left_before_a_cpu_is_calibrated(cpu_profile, monkeypatch):
    """Down a pipe too, where nothing leaves until it is flushed."""
    pipe, seen = BytesIO(), []

    def calibrated(config, world):
        seen.append(pipe.getvalue().decode())

    monkeypatch.setattr("mtcli.core.plan.hardware.calibrated", calibrated)
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BufferedWriter(pipe, 2**20)))
    _show_profile(cpu_profile, None, None, None)
    assert "12 s (12 to 12 s)" in seen[0] and "Measured timeline" in seen[0]
    assert "Beside the plan" not in seen[0] and len(seen) == 1


def test_without_calibration_a_roofline_is_beside_what_was_measured(
    cpu_profile, monkeypatch, capsys
):
    monkeypatch.setattr("mtcli.core.plan.hardware.calibrated", lambda *_: pytest.fail("asked"))
    profile = replace(cpu_profile, calibrates=False)
    assert profile.as_json()["predicted"]["device_rates"] == "roofline"
    show_planned(profile)
    assert "a roofline, not calibrated" in capsys.readouterr().out


def test_the_matrix_adds_up_the_axes_from_rank_to_rank(profile):
    data = profile.as_json()
    assert data["communication_matrix_bytes"] == [[0, 4096 + 512], [4096 + 513, 0]]
    assert data["communication_by_axis"][3] == {
        "axis": "pp_forward",
        "from": 1,
        "to": 0,
        "bytes": 513,
        "calls": 2,
    }


def test_hops_are_the_seconds_between_an_inputs_being_made_and_its_op(profile):
    # Rank 0 takes B0.1 and B1.1 0.25 s after they were made, rank 1 takes F0.0; F1.0 was early.
    by_axis = profile.as_json()["communication"]["by_axis"]
    assert by_axis["pp"] == {"measured": pytest.approx((0.5 + 0.25) / 2), "planned": None}


def test_waits_and_kernels_are_counted_for_the_axis_they_serve(records):
    waiting = WaitSeconds({"F": 0.0, "B": 0.0}, {"data": 0.5, "ends": 0.25, "sequence": 1.0})
    waits = records[0]._replace(steps=[step._replace(waiting=waiting) for step in records[0].steps])
    kernels = records[1]._replace(profiled=records[1].profiled._replace(by_axis={"data": 2.0}))
    data = Profile(config_of(config_table()), 2, "", [waits, kernels]).as_json()
    found = {axis: row["measured"] for axis, row in data["communication"]["by_axis"].items()}
    assert found["dp"] == pytest.approx((0.75 + 2.0) / 2)
    assert found["tp"] == pytest.approx(0.5)


def test_every_rank_is_on_the_map_with_its_layers(profile):
    first, last = profile.as_json()["rank_map"]
    assert first["layers"] == [0] and last["layers"] == [1]
    assert last["attention"] == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert last["experts"]["pp"] == 1


def test_memory_over_time_has_the_state_under_what_the_step_adds(profile):
    data = profile.as_json()["memory_by_kind_over_time"]
    assert data["rank"] == 1  # the fullest
    assert data["optimizer"] == [8001] * 3
    assert data["activations"] == [0, 2 * 2**20, 0]
    assert data["temporary"] == [0, 2**20, 0]


def test_memory_is_told_by_the_clock_of_the_timed_step(records):
    """The profiler stretches rank 1 threefold, and its last op tenfold."""
    stretched = step_of(1, scale=3.0)
    *spans, (last, start, end) = stretched.spans
    late = OpSpan(last, start, start + 10 * (end - start) / 3)
    phases = stretched.phases._replace(end=late.end + 3 * (12.0 - 7.75))
    step = stretched._replace(spans=(*spans, late), phases=phases)
    samples = [MemorySample(m, n, 0) for n, m in enumerate((0.0, 3 * 2.25, start + 10, phases.end))]
    slow = records[1]._replace(
        profiled=records[1].profiled._replace(step=step, memory=samples),
        state_bytes={"weights": 10**9},
    )
    profile = Profile(config_of(config_table()), 2, "", [records[0], slow])
    data = profile.memory_over_time
    assert data["rank"] == 1 and data["activations"] == [0, 1, 2, 3]
    # Since the first op of all, which rank 0 begins at 0.5: B1.1 is half done at 6.75.
    assert data["seconds"] == pytest.approx([-0.5, 1.75, 6.25, 11.5])


def test_step_times_are_those_of_the_slowest_rank():
    slow = [record_of(1).steps[0]._replace(phases=p) for p in _phases(12.0, 15.0, 13.0)]
    fast = [record_of(0).steps[0]._replace(phases=p) for p in _phases(11.0, 11.5, 14.0)]
    records = [record_of(0, steps=fast), record_of(1, steps=slow)]
    data = Profile(config_of(config_table()), 2, "", records).as_json()
    assert data["step_seconds"] == {"min": 12.0, "median": 14.0, "max": 15.0}
    assert data["tokens_per_second"] == pytest.approx(TOKENS / 14.0)


def test_padding_is_no_token_of_a_step():
    steps = [[step_of(rank, tokens=tokens) for tokens in (10.0, 4.0, 7.0)] for rank in (0, 1)]
    records = [record_of(rank, steps=steps[rank]) for rank in (0, 1)]
    data = Profile(config_of(config_table()), 2, "", records).as_json()
    assert data["tokens_per_second"] == pytest.approx(7.0 / 12.0)
    assert data["model_flops_per_step"] == 3 * FORWARD * 7


def test_memory_is_that_of_the_fullest_rank(profile):
    assert profile.as_json()["memory_bytes"] == {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8001,
        "activations": 3 * 2**20,
        "peak": 16001 + 3 * 2**20,
        "process": 2**30,
    }


def test_the_json_is_json_and_keeps_its_keys(profile):
    data = json.loads(json.dumps(profile.as_json()))
    assert data["predicted"] is None  # no plan for a device it does not know
    assert data["layout"]["pp"] == 2 and data["world"] == 2
    promised = "step_seconds tokens_per_second mfu hfu model_flops_per_step peak_flops parameters "
    promised += "memory_bytes timeline planned_timeline shares bubble_fraction kernels layout world"
    assert set(promised.split()) <= set(data)
    assert {"rank", "op", "start", "end"} <= set(data["timeline"][0])


def test_a_known_device_has_the_plans_figures_at_the_measured_peak(records):
    data = Profile(config_of(config_table()), 2, "cpu", records).as_json()
    seconds = data["predicted"]["step_seconds"]
    assert data["predicted"]["mfu"] == pytest.approx(3 * FORWARD * TOKENS / seconds / 2e9)
    assert data["predicted"]["memory_bytes"]["weights"] > 0


def test_the_text_shows_shares_kernels_stragglers_and_both_timelines(profile, cpu_profile, capsys):
    slow = record_of(0)._replace(rank=2, speaks=False)
    longer = slow._replace(steps=[s._replace(spans=_stretched(s.spans)) for s in slow.steps])
    profile = Profile(profile.config, 3, "", [*profile.records, longer])
    show_measured(profile)
    show_planned(cpu_profile)
    text = capsys.readouterr().out
    assert "optimizer" in text and "10.4%" in text  # 1.25 of 12 s
    assert "aten::mm" in text and "3,000.00 ms" in text
    assert "straggler: rank 2" in text
    assert text.index("Measured timeline") < text.index("Planned timeline")


def _stretched(spans):
    return tuple(span._replace(end=span.start + 2 * (span.end - span.start)) for span in spans)


def _phases(*ends):
    return [record_of(0).steps[0].phases._replace(end=end) for end in ends]
