"""Experts stop on one layout and go on on another, and random layouts keep every bit.

The curve's oracle is the run that was never stopped, on one rank. The layouts are those of the
parity table's property: tp, cp, pp, vpp, ep, etp, every zero, uneven stages.
"""

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from parity_runs import MODELS, Row
from ranks import run_ranks
from test_parity import DECODERS, layouts
from test_state import STEPS, STOP, config_of, copy, tensors, train
from tiny import MOE

from mtcli.core.config import rules

EXAMPLES = int(os.environ.get("MTCLI_EXAMPLES", "2"))


@pytest.mark.parametrize(
    "to",
    [
        (4, {"tp": 1, "cp": 2, "ep": 2}, {}),  # dp=2
        (4, {"tp": 1, "cp": 2, "ep": 2, "zero": 3, "recompute": "full"}, {}),
    ],
    ids=str,
)
def test_a_run_stopped_on_tp_and_pp_goes_on_on_cp_dp_and_ep_with_its_curve(to, tmp_path):
    config = config_of(MOE, (1, {}, {}), "fp64")
    whole = run_ranks(1, train, config, tmp_path / "whole", 0, STEPS)[0]
    first = config_of(MOE, (4, {"tp": 2, "pp": 2}, {"micro_batch_size": 2}), "fp64")
    before = run_ranks(4, train, first, tmp_path, 0, STOP)
    after = run_ranks(4, train, config_of(MOE, to, "fp64"), tmp_path, STOP, STEPS)
    for rank in range(4):
        assert before[rank] + after[rank] == pytest.approx(whole, rel=1e-10)
    assert whole[-1] < whole[0] - 0.01


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """For a model of the parity table: a folder with a checkpoint of some steps on one rank."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            run_ranks(1, train, Row(name, 1, {}).config("fp32"), made[name], 0, STOP)
        return made[name]

    return folder


@settings(max_examples=EXAMPLES)
@given(layouts(DECODERS), st.data())
def test_any_layout_to_any_other_and_back_keeps_weights_and_optimizer(
    trained, tmp_path_factory, a, data
):
    b = data.draw(layouts([a.model]), label="b")
    assume(not any(rules.problems(row.config("fp32"), row.world) for row in (a, b)))
    place = trained(a.model)
    expected = tensors(place, STOP)
    assert any(name.startswith("optimizer.exp_avg_sq/") for name in expected)
    for row in (a, b, a):
        then = tmp_path_factory.mktemp("copy")
        run_ranks(row.world, copy, row.config("fp32"), place, then)
        place, found = then, tensors(then, STOP)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{name} after {row}"


def test_the_models_of_those_layouts_include_experts():
    assert {bool(model.get("num_experts")) for model in MODELS.values()} == {True, False}
