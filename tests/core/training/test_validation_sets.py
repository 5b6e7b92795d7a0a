"""Several validation sets by name: each as if it were the only one, and in bits a byte."""

import json
import math
from pathlib import Path

import pytest
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import documents, metrics, run_config

from mtcli.core.config.annotated import annotated
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import config_of, dump_toml, load_config
from mtcli.core.config.origins import entries, values_of
from mtcli.core.data.indexed import token_dtype
from mtcli.core.data.loader import require_data
from mtcli.core.training.loop import train
from mtcli.core.training.validation_sets import SetLosses, open_validation, token_bytes

STATED = {"wiki": (1000, 3500), "code": (500, 1100)}  # tokens and bytes of PREFIX.json


@pytest.fixture
def home(tmp_path):
    """A folder with the data sets train, wiki and code; PREFIX.json states the size of the last
    two."""
    for seed, name in enumerate(["train", "wiki", "code"]):
        write_dataset(tmp_path / name, documents(seed=seed), token_dtype(101))
    for name, (tokens, size) in STATED.items():
        facts = {"tokens": tokens, "text_bytes": size}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    return tmp_path


def config_for(home, valid, name="run", **fields):
    fields = {"steps": 6, "eval_every": 2, "eval_batches": 3, "output": str(home / name)} | fields
    return run_config(data={"train": [str(home / "train")], "valid": valid}, train=fields)


def run(runtime, config):
    return train(config, runtime, resume=False)


def evaluations(config):
    rows = metrics(Path(config.train.output))
    return [{k: v for k, v in row.items() if "valid" in k} for row in rows if "valid_loss" in row]


@pytest.mark.parametrize("world", [1, 2])
def test_a_named_set_has_the_loss_of_a_run_that_has_no_other(home, world):
    blend = ["0.5", str(home / "wiki"), "0.5", str(home / "code")]
    sets = {"wiki": str(home / "wiki"), "code": [str(home / "code")], "both": blend}
    together = config_for(home, sets)
    assert run_ranks(world, run, together) == [True] * world
    alone = {}
    for name, words in sets.items():
        config = config_for(home, words, name)
        run_ranks(world, run, config)
        alone[name] = evaluations(config)
    rows = evaluations(together)
    assert len(rows) == 3
    for number, row in enumerate(rows):
        losses = {name: alone[name][number]["valid_loss"] for name in sets}
        assert {name: row[f"valid_loss/{name}"] for name in sets} == losses
        assert row["valid_loss"] == pytest.approx(sum(losses.values()) / 3, rel=1e-15)
        rate = losses["wiki"] * 1000 / 3500 / math.log(2)
        assert row["valid_bits_per_byte/wiki"] == pytest.approx(rate, rel=1e-12)
        assert alone["wiki"][number]["valid_bits_per_byte"] == pytest.approx(rate, rel=1e-12)


def byte_means(runtime, config):
    """({set: mean bytes of a token}, {set: samples by data set})."""
    from mtcli.core.training.step import run_groups

    loaders = open_validation(config, run_groups(config, runtime))
    counts = {}
    for name, loader in loaders.items():
        ids = loader.batches.sample_ids(0, len(loader.batches))
        prefixes = [Path(sample.prefix).name for sample in ids]
        counts[name] = {prefix: prefixes.count(prefix) for prefix in set(prefixes)}
        loader.close()
    return token_bytes(config, loaders), counts


def test_the_bytes_of_a_blend_are_those_of_the_samples_that_it_gives(home):
    blend = ["0.75", str(home / "wiki"), "0.25", str(home / "code")]
    unstated = [str(home / "wiki"), str(home / "train")]
    config = config_for(home, {"blend": blend, "unstated": unstated})
    ((means, counts),) = run_ranks(1, byte_means, config)
    wiki, code = counts["blend"]["wiki"], counts["blend"]["code"]
    assert wiki + code == 12 and wiki > code > 0
    assert means == {"blend": pytest.approx((3.5 * wiki + 2.2 * code) / 12, rel=1e-15)}


def test_the_loss_that_a_run_goes_by_is_the_mean_or_that_of_one_set():
    by_set = {"a": 1.0, "b": 4.0}
    assert SetLosses(by_set, {}, None).row() == {
        "valid_loss": 2.5,
        "valid_loss/a": 1.0,
        "valid_loss/b": 4.0,
    }
    assert SetLosses(by_set, {}, "b").row()["valid_loss"] == 4.0
    assert SetLosses({"": 3.0}, {"": 1.5}, None).row() == {
        "valid_loss": 3.0,
        "valid_bits_per_byte": pytest.approx(2.0 / math.log(2), rel=1e-15),
    }


def test_the_best_checkpoint_is_that_of_the_set_that_is_named(home):
    sets = {"wiki": str(home / "wiki"), "code": str(home / "code")}
    config = config_for(home, sets, best_of="code", keep_best=1, keep=1, steps=20)
    run_ranks(1, run, config)
    rows = {row["step"]: row for row in metrics(home / "run") if "valid_loss" in row}
    assert all(row["valid_loss"] == row["valid_loss/code"] for row in rows.values())
    best = min(rows, key=lambda step: rows[step]["valid_loss/code"])
    assert (home / "run/checkpoints/best").readlink().name == f"step-{best:08d}"


def test_the_faults_of_all_sets_are_told_at_once_by_their_names(home):
    sets = {"wiki": str(home / "wki"), "code": str(home / "cde")}
    with pytest.raises(MtcliError) as raised:
        require_data(config_for(home, sets))
    assert [name in str(raised.value) for name in ("wki.idx", "cde.idx")] == [True, True]


def test_a_table_of_sets_is_written_and_read_back(home):
    sets = {"wiki": ["0.5", "a", "0.5", "b"], "code": "c"}
    config = config_for(home, sets)
    assert config.data.valid == {"wiki": ("0.5", "a", "0.5", "b"), "code": ("c",)}
    assert config_for(home, "c").data.valid == ("c",)
    (home / "run.toml").write_text(dump_toml(config))
    assert load_config(str(home / "run.toml")) == config
    changed = load_config(str(home / "run.toml"), ["data.valid.code=d"])
    assert changed.data.valid == {**config.data.valid, "code": ("d",)}
    table = {"data": {"train": "t", "valid": sets}}
    assert dict(entries(table)) == {"data.train": "t", "data.valid": sets}
    comments = {field: "here" for field, _ in values_of(config)}
    text = annotated(config, comments)
    (home / "shown.toml").write_text(text)
    assert load_config(str(home / "shown.toml")) == config
    assert f"{'[data.valid]':<36}  # here\n" in text
    with pytest.raises(MtcliError, match=r"data\.valid"):
        config_of({"model": {"preset": "tiny"}, "data": {"valid": {"wiki": 5}}})
