"""Configs as they would run: each value's origin, and what a run makes of what is left open."""

import pytest

from mtcli.core.config.loading import all_fields, load_config, preset_names
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.training.run_config import resolve


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        (tmp_path / "run.toml").write_text(text)
        return str(tmp_path / "run.toml")

    return write


def test_every_preset_is_shown_as_toml_that_loads_to_the_same_config(config_file):
    for name in preset_names():
        text = resolve(name).as_toml()
        assert load_config(config_file(text)) == load_config(name), name
        fields = [field for field in all_fields() if not field.startswith(("phase.", "eval."))]
        for field in fields:  # of sections that are there
            leaf = field.rpartition(".")[2]
            assert f"\n{leaf} = " in text or f"# {leaf}" in text or field.count(".") == 2, field


@pytest.mark.parametrize("overrides", [
    ["optimizer.name=muon", "optimizer.other.lr=1e-3"],
    ["optimizer.name=sgd", "optimizer.momentum=0.9"],
    ["model.position=rope", "model.rope_scaling.factor=2"],
    ["train.output=a # \"b\" = [c]", "train.tracker_tags=['x = 1', '[y]']"],
])  # fmt: skip
def test_toml_reads_back_whatever_is_set(config_file, overrides):
    text = resolve("tiny", overrides).as_toml()
    assert load_config(config_file(text)) == load_config("tiny", overrides)


def test_each_value_has_the_origin_that_won(config_file):
    name = config_file(
        'seed = 1234\n[model]\npreset = "tiny"\nnum_layers = 6\n[optimizer]\nname = "muon"\n'
        "lr = 1e-2\nwarmup_steps = 50\n[train]\nsteps = 100\n"
    )
    overrides = ["optimizer.lr=1e-2", "train.steps=30", "parallel.tp=2", "parallel.tp=1"]
    found = resolve(name, overrides)
    expected = {
        "seed": (1234, "file"),  # though it is the default
        "model.num_layers": (6, "file"),
        "model.hidden_size": (256, "preset"),
        "model.head_dim": (64, "derived"),
        "model.norm": ("layernorm", "derived"),
        "model.dropout": (0.0, "default"),
        "parallel.tp": (1, "flag"),
        "batch.seq_len": (256, "derived"),  # of max_seq_len: the preset's [batch] is not taken
        "optimizer.lr": (1e-2, "flag"),  # though the file says the same
        "optimizer.momentum": (0.95, "derived"),
        "optimizer.warmup_steps": (30, "flag"),  # shortened with the run
        "optimizer.clip": (1.0, "default"),
        "train.steps": (30, "flag"),
    }
    assert {f: (found.values[f], found.origins[f]) for f in expected} == expected
    assert resolve("tiny").origins["model.num_layers"] == "preset"
    by_flag = resolve(config_file("[batch]\nseq_len = 8\n"), ["model.preset=tiny"])
    assert by_flag.origins["model.num_layers"] == "preset"


def test_what_a_run_makes_of_open_values_is_beside_them():
    lsgd = ["sync.method=lsgd", "optimizer.name=sgd", "batch.global_batch_size=48"]
    found = resolve("tiny", [*lsgd, "sync.period=3"], 6).in_run
    groups = {"sync.replicas": 6, "sync.global_period": 12, "sync.group_size": 2}
    assert {f: v for f, v in found.items() if f.startswith("sync.")} == groups
    found = resolve("tiny", ["parallel.pp=2", "parallel.tp=4", "parallel.tp_mode=2d", "seed=5"])
    assert found.world == 8 and found.in_run["parallel.stage_layers"] == [2, 2]
    assert found.in_run["parallel.tp_rows"] == 2 and found.in_run["data.seed"] == 5
    muon = resolve("tiny", ["optimizer.name=muon", "optimizer.other.lr=0.5"])
    assert "optimizer.other.lr" not in muon.in_run
    assert muon.in_run["optimizer.other.betas"] == (0.9, 0.95)
    assert "sync.period" not in resolve("tiny").in_run
    onebit = ["sync.method=onebit", "sync.replicas=2"]
    assert resolve("tiny", onebit).in_run["sync.warmup_steps"] == 40  # a fifth of 200


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_decay_in_the_run_ends_where_the_curve_does(schedule):
    found = resolve("tiny", [f"optimizer.schedule={schedule}", "optimizer.min_lr=0"])
    warmup, steps = 20, found.in_run["optimizer.decay_steps"]
    curve = [learning_rate(found.config.optimizer, step, 200) for step in range(1, 201)]
    assert curve.index(max(curve)) + 1 == warmup and warmup + steps == 200
    assert curve.index(0.0) + 1 == 200


def test_micro_batches_are_those_of_the_ranks():
    sizes = resolve("tiny", ["batch.global_batch_size=48", "batch.micro_batch_size=2"], 4).sizes
    assert sizes == {"ranks": 4, "num_micro_batches": 6, "tokens_per_step": 48 * 256}
    assert resolve("tiny", ["parallel.tp=2", "parallel.pp=2"]).sizes["num_micro_batches"] == 2
