"""Rehearsals run in processes beside this one, and are kept."""

import pytest
from tiny import run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.workload import Workload
from mtcli.core.rehearse import request
from mtcli.core.rehearse.request import planned, representatives

H100 = GPUS["h100"]
GPT = {"architecture": "gpt", "num_layers": 8, "hidden_size": 64, "num_heads": 4}
GPT |= {"vocab_size": 1000, "max_seq_len": 64}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request._process.cache_clear()
    yield tmp_path / "mtcli" / "rehearsals"
    request._process.cache_clear()


def config_of(**parallel):
    batch = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 16}
    return run_config(GPT, parallel=parallel, batch=batch, train={"precision": "bf16"})


def test_a_plan_is_rehearsed_once_and_found_again_by_its_layout(monkeypatch, cache):
    found = planned(config_of(pp=4), 4, H100)
    assert found.is_rehearsed and len(list(cache.iterdir())) == 3  # both ends, and one between
    # an input and a block's activations a layer: a rank further on has a micro-batch fewer
    first, second, third, _ = (stage.activations for stage in found.stages)
    assert first > second > third and second / third == pytest.approx(3 / 2, rel=0.02)
    monkeypatch.setattr(request, "_run", lambda missing: pytest.fail("again") if missing else [])
    assert planned(config_of(pp=4), 4, H100).stages == found.stages
    next(cache.iterdir()).write_text('{"stages": 3}')
    with pytest.raises(pytest.fail.Exception, match="again"):
        planned(config_of(pp=4), 4, H100)


def test_fields_that_bytes_depend_on_are_of_the_key_and_the_runs_name_is_not():
    def key(**fields):
        config = config_of()
        train = config.train.model_copy(update=fields)
        config = config.model_copy(update={"train": train})
        return request.Rehearsal.of(config, 1, H100, 0).key

    assert key(output="runs/other") == key()
    for fields in ({"precision": "fp8"}, {"fp8_scaling": "tensorwise"}):
        assert key(**fields) != key(), fields


def test_ranks_with_stages_of_the_same_kinds_share_a_rehearsal():
    assert representatives(Workload.of(config_of(pp=4), 4)) == [0, 1, 1, 3]
    uneven = config_of(pp=4, stage_layers=(1, 2, 3, 2))
    assert representatives(Workload.of(uneven, 4)) == [0, 1, 2, 3]


def test_a_process_that_cannot_rehearse_ends_the_plan_with_its_last_word(monkeypatch, cache):
    monkeypatch.setattr(request, "SERVE", "raise SystemExit('no torch here')")
    with pytest.raises(
        MtcliError, match="could not be run on fake tensors: no torch here"
    ) as error:
        planned(config_of(), 1, H100)
    assert error.value.code == 1 and not cache.exists()
