"""A run's saves and failures: closed forms by hand, a simulation, and the bytes of a real run."""

import json
import random
from math import ceil, inf, isclose
from pathlib import Path

import pytest
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, documents, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.config.schema import TrainConfig
from mtcli.core.data.indexed import token_dtype
from mtcli.core.plan.answer import read_tokens
from mtcli.core.plan.interruptions import (
    HERE,
    Assumed,
    checkpoint_bytes,
    interruptions,
    read_assumed,
)
from mtcli.core.plan.predict import predict
from mtcli.core.plan.workload import Workload
from mtcli.core.training.loop import train

# By hand: 8 GPUs, a failure a day of 4; 40 MB/s copied, 20 MB/s written.
ASSUMED = Assumed(storage=0.02, copy=0.04, failures=250.0, restart=10.0)
DAY = 86400.0


def planned(world=8, **fields):
    fields |= {"batch.global_batch_size": 64, "parallel.zero": 0}
    return predict(load_config("tiny", [f"{k}={v}" for k, v in fields.items()]), world, "h100")


def test_saves_and_failures_are_the_closed_forms():
    p, days = planned(), 30
    run = interruptions(p, TrainConfig(save_minutes=60), 2.0, days * DAY, ASSUMED)
    written = 12 * 5_322_240  # float32: a weight and two moments
    assert run.bytes == written and run.interval == 3600.0 and run.saves == days * 24
    assert run.write == pytest.approx(written / 20e6)  # 3.19 s
    # zero=0: each of the 8 ranks reads all of it
    assert run.read == pytest.approx(8 * run.write)
    assert run.stall == pytest.approx(p.memory.host / 40e6) and p.memory.host == written
    assert run.between_failures == DAY / 2
    assert run.lost == pytest.approx(1800 + 600 + 9 * run.write)
    useful = days * DAY + 720 * run.stall
    assert run.wall == pytest.approx(useful / (1 - run.lost / (DAY / 2)))
    assert run.failures == pytest.approx(run.wall / (DAY / 2))
    # Young: sqrt(2 * 1.597 s * 43,200 s), 6.2 minutes
    assert run.best == pytest.approx((2 * run.stall * DAY / 2) ** 0.5)


def test_no_other_interval_than_young_s_ends_a_run_sooner():
    p, seconds = planned(), 30 * DAY
    at = {
        minutes: interruptions(p, TrainConfig(save_minutes=minutes), 1.0, seconds, ASSUMED).wall
        for minutes in (2.7, 3.5, 5.0, 6.0, 6.5, 8.0, 12.0, 30.0)
    }
    best = interruptions(p, TrainConfig(), 1.0, seconds, ASSUMED)
    assert best.at_best <= min(at.values()) * 1.0001 and best.wall == at[30.0]
    assert best.at_best < 0.999 * min(
        wall for minutes, wall in at.items() if minutes not in (6, 6.5, 8, 5)
    )


def test_a_simulation_of_failures_takes_as_long():
    """Failures at random; each throws away what no complete checkpoint has."""
    p = planned()
    run = interruptions(p, TrainConfig(save_minutes=60), 2.0, 2000 * DAY, ASSUMED)
    draws, clock, saved = random.Random(0), 0.0, 0.0
    down = run.lost - run.interval / 2 - run.write
    while saved < 2000 * DAY:
        alive, cycle = draws.expovariate(1 / run.between_failures), run.interval + run.stall
        cycles = max(0, int((alive - run.write) / cycle))
        saved, clock = saved + cycles * run.interval, clock + alive + down
    assert run.wall == pytest.approx(clock, rel=0.003)


@pytest.mark.parametrize(
    ("settings", "step", "every", "stall"),
    [
        ({"save_minutes": 30}, 1.0, 1800.0, 1.596672),
        ({"save_minutes": 1}, 1.0, 159.6672, 1.596672),  # 1 % of the time
        ({"save_minutes": 30, "save_every": 100}, 2.0, 200.0, 1.596672),
        ({"save_minutes": 0, "save_every": 1000}, 2.0, 2000.0, 1.596672),
        ({"save_minutes": 0, "save_every": 1}, 2.0, 2.0, 2.790016),  # waits for the write before it
        ({"save_minutes": 0}, 2.0, DAY, 1.596672),  # at the end
        ({"save_minutes": 1, "async_save": False}, 2.0, 319.3344, 3.193344),
    ],
    ids=str,
)
def test_saves_come_when_training_makes_them(settings, step, every, stall):
    p = planned(**{f"train.{name}": value for name, value in settings.items()})
    run = interruptions(p, TrainConfig(**settings), step, DAY, ASSUMED)
    assert run.interval == pytest.approx(every, rel=1e-9)
    assert run.stall == pytest.approx(stall, rel=1e-9) and run.saves == ceil(DAY / run.interval)


def test_a_run_whose_failures_cost_more_than_the_time_between_them_never_ends():
    often = ASSUMED._replace(failures=50_000.0)  # one in 216 s
    run = interruptions(planned(), TrainConfig(save_minutes=60), 1.0, DAY, often)
    assert run.wall == inf and run.lost > run.between_failures
    none = interruptions(planned(), TrainConfig(), 1.0, DAY, ASSUMED._replace(failures=0.0))
    assert none.failures == 0 and none.wall == DAY + 48 * none.stall


def test_llama_3_s_own_rate_is_assumed():
    assert isclose(Assumed().failures * 16.384 * 54, 419)
    assert read_assumed([], "cpu") == HERE and HERE.failures == 0


def test_assumptions_are_changed_by_name_and_all_wrong_ones_are_refused():
    assert read_assumed(["storage=400,pue=1.3", "restart=0"], "h100") == Assumed(
        storage=400.0, pue=1.3, restart=0.0
    )
    with pytest.raises(MtcliError) as caught:
        read_assumed(["storage=0,storag=3", "pue=0.9", "failures=nan", "copy"], "h100")
    messages = [problem.message for problem in caught.value.problems]
    assert [text.split("'")[1] for text in messages] == [
        "storage=0", "storag=3", "pue=0.9", "failures=nan", "copy",
    ]  # fmt: skip
    assert "did you mean 'storage'" in caught.value.problems[1].hint


@pytest.mark.parametrize(
    ("text", "tokens"), [("15T", 15e12), ("300b", 300e9), ("2e9", 2e9), ("1.5M", 1.5e6)]
)
def test_tokens_are_read_with_their_unit(text, tokens):
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["T", "0", "-3B", "nan", "inf", "1e7T", "3X", ""])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(MtcliError, match="is no number of tokens"):
        read_tokens(text)


def _stored_bytes(runtime, output, sections):
    """(bytes of the tensors of a run's checkpoint, by the headers of its files; as planned)."""
    limits = {"output": output, "steps": 1, **sections.pop("train", {})}
    config = run_config(**sections, train=limits)
    train(config, runtime, resume=False)
    stored = 0
    for path in Path(output).glob("checkpoints/step-*/*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ends = [one["data_offsets"] for name, one in header.items() if name[:2] != "__"]
        stored += sum(end - start for start, end in ends)
    return stored, checkpoint_bytes(Workload.of(config, runtime.world))


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"model": GPT}),
        (2, {"model": LLAMA, "train": {"precision": "bf16"}, "parallel": {"tp": 2}}),
        (2, {"model": MOE, "optimizer": {"name": "muon"}, "parallel": {"ep": 2}}),
        (1, {"model": LLAMA, "train": {"precision": "bf16", "moments": "bf16"}}),
        (2, {"model": GPT, "optimizer": {"name": "sgd", "momentum": 0.9},
             "sync": {"method": "lsgd", "period": 1}}),
    ],
    ids=["fp32", "bf16", "muon", "narrow moments", "replicas"],
)  # fmt: skip
def test_a_real_checkpoint_has_as_many_bytes(tmp_path, ranks, sections):
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    sections = sections | {"data": {"train": [str(tmp_path / "data")]}}
    for stored, expected in run_ranks(ranks, _stored_bytes, str(tmp_path / "run"), sections):
        assert stored == expected > 0
