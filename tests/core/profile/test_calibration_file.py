"""What was measured of a device takes the place of its datasheet, and of the fitted shares."""

import json
from dataclasses import replace

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.plan.hardware import GPUS, Link, device_named, for_run
from mtcli.core.plan.physics import Physics
from mtcli.core.profile.calibration_file import measured_device

RATE, SENT = 989.4e12 * 0.75, 100e9  # of an H100's GEMMs, and of its ring
SIDE = 132 * 128  # whole tiles, and whole waves
PLAIN = replace(GPUS["h100"], physics=Physics(fill=0.0))


def ring(rounds, moved, ranks, latency=2e-6):
    return rounds * (ranks - 1) * (moved / ranks / SENT + latency)


def written(tmp_path, ranks=8, nodes=1, **fields):
    gemms = [[SIDE, SIDE, side, 2 * SIDE * SIDE * side / (0.7 * RATE)] for side in (SIDE, 8192)]
    found = {
        "device": "h100", "precision": "bf16", "gemms": gemms, "copy": 0.8 * 3352e9,
        "attention": 0.5 * RATE, "call": 2e-6, "launch": 4.5e-6, "ranks": ranks, "nodes": nodes,
        "collectives": [
            [kind, moved, ring(rounds, moved, ranks)]
            for moved in (8, 2**24, 2**28)
            for kind, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1))
        ],
    }  # fmt: skip
    file = tmp_path / "h100.json"
    file.write_text(json.dumps(found | fields))
    return str(file)


def test_measured_rates_are_recovered_as_shares_and_links(tmp_path):
    device = measured_device(PLAIN, written(tmp_path))
    physics = device.physics
    assert (physics.gemm, physics.memory) == (pytest.approx(0.7), pytest.approx(0.8))
    assert physics.attention == pytest.approx(0.5)
    assert physics.call == pytest.approx(2e-6 + 4.5e-6 * 24 / 450)
    assert device.reached_link == pytest.approx(SENT)
    assert device.link.latency == pytest.approx(2e-6, rel=1e-4)
    assert device.network == PLAIN.network and device.rates == "calibration"


def test_collectives_over_several_nodes_measure_the_network_of_each_gpu(tmp_path):
    device = measured_device(PLAIN, written(tmp_path, ranks=16, nodes=2))
    assert device.link == PLAIN.link
    assert 8 * device.reached_network == pytest.approx(SENT)


def test_one_rank_leaves_the_links_as_they_are(tmp_path):
    device = measured_device(PLAIN, written(tmp_path, ranks=1, collectives=[]))
    assert device.link == Link(450e9, 0.6e-6)


def test_a_cpus_best_gemm_and_other_rates_are_its_calibration(tmp_path, tiny):
    fields = {"device": "cpu", "element": 3e-9, "socket": 2e9, "widens": True}
    device = measured_device(device_named("cpu"), written(tmp_path, **fields))
    run = for_run(device, tiny, 1)
    assert run.rates == "calibration" and run.peak("fp32") == pytest.approx(0.7 * RATE)
    assert (run.physics.call, run.physics.element, run.widens) == (2e-6, 3e-9, True)


@pytest.fixture
def tiny():
    from mtcli.core.config.loading import load_config

    return load_config("tiny")


def test_another_device_or_a_damaged_file_is_refused_by_name(tmp_path):
    with pytest.raises(MtcliError) as error:
        measured_device(GPUS["a100-80gb"], written(tmp_path))
    assert "was measured on h100, and the plan is for a100-80gb" in str(error.value)
    for broken in ({"copy": 0.0}, {"gemms": [[1, 2]]}, {"call": "quick"}):
        with pytest.raises(MtcliError, match="holds no calibration"):
            measured_device(PLAIN, written(tmp_path, **broken))
    with pytest.raises(MtcliError, match="holds no calibration"):
        measured_device(PLAIN, str(tmp_path / "none.json"))
