"""Trials: what --vary expands to, which of them one array trains, and what is refused."""

import json
import random

import pytest
from indexed_dataset import write_dataset
from tiny import GPT, documents, run_config, write_run

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.data.indexed import token_dtype
from mtcli.core.sweep.run_plan import SweepRequest, plan_notes, sweep_plan
from mtcli.core.sweep.trials import Range, partitions, split_values


def plan_of(folder, *vary, overrides=(), world=1, **asked):
    config = write_run(folder)
    request = SweepRequest(str(config), list(overrides), folder / "out", list(vary), **asked)
    return sweep_plan(request, world)


def refusal(folder, *vary, **asked):
    with pytest.raises(MtcliError) as error:
        plan_of(folder, *vary, **asked)
    return str(error.value)


def test_trials_are_the_grid_with_a_folder_of_their_values_each(tmp_path):
    plan = plan_of(tmp_path, "optimizer.lr=1e-3,3e-4", "optimizer.betas=[0.9,0.95],[0.8,0.9]")
    assert [trial.name for trial in plan.trials] == [
        "lr=0.001_betas=0.9-0.95",
        "lr=0.001_betas=0.8-0.9",
        "lr=0.0003_betas=0.9-0.95",
        "lr=0.0003_betas=0.8-0.9",
    ]
    last = plan.trials[-1].config
    assert (last.optimizer.lr, last.optimizer.betas) == (3e-4, (0.8, 0.9))
    assert last.train.output == str(tmp_path / "out" / plan.trials[-1].name)
    assert len(partitions(plan.trials)) == 1 and plan_notes(plan) == []


def test_a_value_that_is_given_twice_is_one_trial(tmp_path):
    assert len(plan_of(tmp_path, "optimizer.lr=1e-3,0.001").trials) == 1


def test_fields_of_one_name_are_told_apart_by_their_sections(tmp_path):
    plan = plan_of(tmp_path, "seed=1,2", "data.seed=3")
    assert [trial.name for trial in plan.trials] == ["seed=1_data.seed=3", "seed=2_data.seed=3"]


def test_shapes_batches_and_the_rule_partition_trials_and_that_is_said(tmp_path):
    plan = plan_of(
        tmp_path, "optimizer.name=adamw,sgd,lamb", "optimizer.lr=1e-3,1e-2", "batch.seq_len=8,4"
    )
    groups = partitions(plan.trials)
    assert [len(group) for group in groups] == [2] * 6
    assert "optimizer.name, batch.seq_len" in plan_notes(plan)[0]
    assert "12 trials in 6 sets" in plan_notes(plan)[0]


def test_momentum_or_none_is_other_memory_and_how_much_is_not(tmp_path):
    overrides = ["optimizer.name=sgd"]
    plan = plan_of(tmp_path, "optimizer.momentum=0,0.5,0.9", overrides=overrides)
    assert [len(group) for group in partitions(plan.trials)] == [1, 2]
    assert "optimizer.momentum" in plan_notes(plan)[0]
    assert "3 trials in 2 sets" in plan_notes(plan)[0]
    some = plan_of(tmp_path, "optimizer.momentum=0.5,0.9", overrides=overrides)
    assert len(partitions(some.trials)) == 1 and plan_notes(some) == []


def test_all_that_changes_numbers_alone_is_one_array(tmp_path):
    fields = ("optimizer.lr=1e-3", "optimizer.min_lr=0,1e-4", "optimizer.warmup_steps=0,2")
    fields += ("optimizer.schedule=cosine,linear", "optimizer.eps=1e-8,1e-6", "seed=1,2")
    fields += ("model.dropout=0,0.1", "model.init_std=0.02,0.01", "optimizer.clip=0,1")
    plan = plan_of(tmp_path, *fields)
    assert len(plan.trials) == 256 and len(partitions(plan.trials)) == 1


def test_seeds_multiply_trials_and_shared_batches_have_one_order(tmp_path):
    plan = plan_of(tmp_path, "optimizer.lr=1e-3,1e-2", seeds=3, shared_batches=True)
    assert [trial.config.seed for trial in plan.trials] == [7, 8, 9] * 2
    assert {trial.config.data_seed for trial in plan.trials} == {7}
    own = plan_of(tmp_path, "optimizer.lr=1e-3", seeds=3)
    assert [trial.config.data_seed for trial in own.trials] == [7, 8, 9]


def test_random_trials_are_points_of_the_grid_or_of_a_range_and_the_same_each_time(tmp_path):
    grid = plan_of(tmp_path, "optimizer.lr=1e-3,2e-3,3e-3", "seed=1,2,3", random=4)
    assert len({trial.name for trial in grid.trials}) == 4
    drawn = [
        plan_of(tmp_path, "optimizer.lr=1e-4..1e-1", "optimizer.warmup_steps=0..3", random=40)
        for _ in range(2)
    ]
    assert [t.name for t in drawn[0].trials] == [t.name for t in drawn[1].trials]
    rates = [trial.config.optimizer.lr for trial in drawn[0].trials]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 10 < sum(rate < 10**-2.5 for rate in rates) < 30
    assert {trial.config.optimizer.warmup_steps for trial in drawn[0].trials} == {0, 1, 2, 3}


def test_a_range_of_one_decade_is_drawn_by_logarithms_and_a_narrow_one_evenly():
    source = random.Random(0)
    wide = [Range(1e-3, 1.0, False).draw(source) for _ in range(2000)]
    assert 900 < sum(x < 10**-1.5 for x in wide) < 1100
    narrow = [Range(0.0, 0.2, False).draw(source) for _ in range(2000)]
    assert 900 < sum(x < 0.1 for x in narrow) < 1100


def test_commas_in_brackets_and_quotes_part_no_values():
    assert split_values("[0.9, 0.95],[0.8,0.9]") == ["[0.9, 0.95]", "[0.8,0.9]"]
    assert split_values('"a,b", c') == ['"a,b"', "c"]


def test_all_unknown_fields_and_values_are_told_at_once_with_the_nearest(tmp_path):
    text = refusal(
        tmp_path, "optimizer.lrr=1", "optimizer.schedule=cosin", "optimizer.lr=-1", "lr=1", "seed"
    )
    assert "there is no field 'optimizer.lrr'" in text and "did you mean optimizer.lr?" in text
    assert "did you mean 'cosine'?" in text
    assert "--vary optimizer.lr: -1 should be at least 0" in text
    assert "there is no field 'lr'" in text
    assert "names no field and values" in text


REFUSED = [  # --vary, the other flags, and what is said
    (["train.output=a,b"], {}, "a folder of its own"),
    (["optimizer.lr=1e-3", "optimizer.lr=1e-2"], {}, "optimizer.lr is varied twice"),
    (["optimizer.lr=1e-4..1e-2"], {}, "--random N draws from it"),
    (["optimizer.lr=1e-2..1e-4"], {"random": 2}, "is empty"),
    (["optimizer.schedule=0..1"], {"random": 2}, "takes no number"),
    (["seed=1,2"], {"seeds": 2}, "leave out --seeds"),
    (["optimizer.lr=1"], {"hyperband": "9"}, "R,ETA such as 81,3"),
    (["optimizer.lr=1"], {"hyperband": "81,3"}, "a unit is at least one step"),
    (["optimizer.lr=1"], {"hyperband": "9,3", "median": 2}, "leave --hyperband or --median out"),
    (["optimizer.warmup_steps=0..900"], {"random": 10_001}, "of 10,000 at most"),
    (["optimizer.min_lr=1e-4,1.0"], {}, "min_lr"),
    (["optimizer.lr=1e-3,,3e-3"], {}, "names no field and values"),
    (["optimizer.lr=0.1..0.1"], {"random": 2}, "the lower number first"),
    (["parallel.tp=1,2"], {}, "--nproc N are dp ranks of the array"),
    (["train.matmul=fast,strict"], {}, "a sweep for each"),
    (["optimizer.lr=1,2,3,4,5"], {"hyperband": "2,2"}, "take 4 trials, and there are 5"),
    (["train.steps=9,2"], {"hyperband": "3,3"}, "R=3 units, and train.steps=2"),
    (["optimizer.lr=1,2"], {"median": 20}, "every 20 steps, and train.steps=20"),
    (["optimizer.lr=1,2"], {"shared_batches": True}, "read the same data without it"),
    (["data.seed=1"], {"seeds": 2, "shared_batches": True}, "leave out --shared-batches, or"),
    ([], {"random": 2}, "no field is varied"),
    (["optimizer.warmup_steps=0..900"], {"random": 900}, "more values are wrong"),
]


def test_a_sweep_that_makes_no_sense_is_refused(tmp_path):
    for vary, asked, words in REFUSED:
        assert words in refusal(tmp_path, *vary, **asked)


def test_all_flags_that_are_wrong_are_told_with_the_config_s_and_the_data_s_problems(tmp_path):
    wrong = {"hyperband": "9", "median": 2, "sampler": "grid", "seeds": 2, "shared_batches": True}
    said = refusal(
        tmp_path,
        *("seed=1,2", "data.seed=1", "optimizer.lrr=1"),
        overrides=["train.step=3", "optimizer.clip=-1", "parallel.tp=2", "data.valid=gone"],
        **wrong,
    )
    words = ["is no R,ETA", "both stop trials", "no sampler 'grid'", "--random N", "--vary seed"]
    words += ["--vary data.seed", "no field 'optimizer.lrr'", "unknown key 'step'", "-1 should be"]
    words += ["tp=2 shards layers", "gone", "--seeds takes all trials at once"]
    assert [word for word in words if word not in said] == []
    with pytest.raises(MtcliError) as error:
        sweep_plan(SweepRequest("nowhere", [], tmp_path / "out", **wrong), 1)
    assert "named 'nowhere'" in str(error.value) and "both stop trials" in str(error.value)


def test_trials_of_other_values_have_other_folders(tmp_path):
    for name in ("a/data", "a-data", "ä" * 60):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_dataset(tmp_path / name, documents(), token_dtype(GPT["vocab_size"]))
    paths = [tmp_path / "a/data", tmp_path / "a-data", tmp_path / ("ä" * 60)]
    plan = plan_of(tmp_path, f"data.train={','.join(json.dumps([str(path)]) for path in paths)}")
    assert len({trial.name for trial in plan.trials}) == 3
    assert all(len(trial.name.encode()) < 150 for trial in plan.trials)


def test_fewer_trials_than_were_to_be_drawn_are_told(tmp_path):
    few = plan_of(tmp_path, "optimizer.lr=1e-3,1e-2", random=5)
    assert plan_notes(few) == ["5 trials are asked for, and 2 of them differ"]


def test_what_no_array_trains_is_refused_with_its_reason(tmp_path):
    reasons = {
        "parallel.tp=2": "shards layers over ranks",
        "parallel.pp=2": "shards blocks over ranks",
        "parallel.cp=2": "shards sequences over ranks",
        "train.cuda_graphs=true": "replay one model's",
        "data.reselect_every=2": "chooses by one model's weights",
        "train.patience=2": "ends one model's run",
        'eval=[{task = "lambada=x", every = 2}]': "evaluate one model's weights",
    }
    for override, reason in reasons.items():
        text = refusal(tmp_path, "optimizer.lr=1e-3,1e-2", overrides=[override], world=2)
        assert reason in text and override.partition("=")[0] in text


def test_each_trial_s_config_keeps_the_rules_of_a_run(tmp_path):
    (tmp_path / "bad.toml").write_text(dump_toml(run_config(GPT)))
    text = refusal(tmp_path, "batch.global_batch_size=4,6", overrides=["batch.micro_batch_size=4"])
    assert "global_batch_size=6" in text
