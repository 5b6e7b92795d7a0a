"""The figures of a profile, against numbers worked out by hand for the profile of handmade.py."""

import json

import pytest
from handmade import config_table, record_of

from mtcli.core.report.figures import Profile
from mtcli.core.report.tables import show_profile
from mtcli.core.spec.load import config_of

# GPT of 2 layers of 16, vocabulary 64, 8 tokens: weights of matrices 12 * 16 * 16 a layer and the
# head's 64 * 16; attention 4 * 8 * 16 a layer and token.
FORWARD = 2 * (2 * 12 * 16 * 16 + 64 * 16) + 2 * 4 * 8 * 16
TOKENS = 16


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


def test_the_planned_timeline_has_the_measured_op_times_and_nobody_late(profile):
    data = profile.as_json()
    # 1F1B with equal stages: (m + p - 1) (t_F + t_B) = 3 * 3 s, of which 2 * 6 are busy.
    assert max(row["end"] for row in data["planned_timeline"]) == pytest.approx(9.0)
    assert data["bubble_fraction"]["planned"] == pytest.approx(0.5)
    assert data["bubble_fraction"]["measured"] == pytest.approx(7.0 / 12.0)


def test_measured_and_planned_ops_can_be_joined_by_rank_and_name(profile):
    data = profile.as_json()
    joined = [{(r["rank"], r["op"]) for r in data[key]} for key in ("timeline", "planned_timeline")]
    assert joined[0] == joined[1]
    assert len(joined[0]) == 8


def test_step_times_are_those_of_the_slowest_rank():
    slow = [record_of(1).steps[0]._replace(phases=p) for p in _phases(12.0, 15.0, 13.0)]
    fast = [record_of(0).steps[0]._replace(phases=p) for p in _phases(11.0, 11.5, 14.0)]
    records = [record_of(0, steps=fast), record_of(1, steps=slow)]
    data = Profile(config_of(config_table()), 2, "", records).as_json()
    assert data["step_seconds"] == {"min": 12.0, "median": 14.0, "max": 15.0}
    assert data["tokens_per_second"] == pytest.approx(TOKENS / 14.0)


def test_memory_is_that_of_the_fullest_rank(profile):
    assert profile.as_json()["memory_bytes"] == {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8001,
        "activations": 3 * 2**20,
        "peak": 2**30,
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


def test_the_text_shows_shares_kernels_stragglers_and_both_timelines(profile):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    slow = record_of(0)._replace(rank=2, speaks=False)
    longer = slow._replace(steps=[s._replace(spans=_stretched(s.spans)) for s in slow.steps])
    profile = Profile(profile.config, 2, "", [*profile.records, longer])
    show_profile(profile, Console(file=out, width=100))
    text = out.getvalue()
    assert "optimizer" in text and "10.4%" in text  # 1.25 of 12 s
    assert "aten::mm" in text and "3,000.00 ms" in text
    assert "straggler: rank 2" in text
    assert text.index("Measured timeline") < text.index("Planned timeline")


def _stretched(spans):
    return tuple(span._replace(end=span.start + 2 * (span.end - span.start)) for span in spans)


def _phases(*ends):
    return [record_of(0).steps[0].phases._replace(end=end) for end in ends]
