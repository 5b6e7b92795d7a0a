"""`mtcli config`: what it shows is what a run writes; wrong words are told; no torch is needed."""

import json
import subprocess
import sys

import numpy as np
import pytest
from chats import fine_tune, save_model, sums, write_lines
from command_line import mtcli
from indexed_dataset import write_dataset

from mtcli.core.config.loading import load_config

QUICK = ("--set", "model.num_layers=1", "--set", "train.steps=2", "--set", "batch.seq_len=8")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with tokens of 600 ids, a Hugging Face model and conversations."""
    folder = tmp_path_factory.mktemp("config")
    write_dataset(folder / "tokens", [np.arange(600)] * 9, np.dtype("<u2"))
    (folder / "tokens.json").write_text(json.dumps({"tokenizer": {"vocab_size": 600}}))
    save_model(folder / "llama")
    write_lines(folder / "my.jsonl", sums(40))
    return folder


def config(home, *words):
    done = mtcli("config", *words, folder=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(home, *words):
    """(the config of the TOML that show prints, its JSON)."""
    (home / "shown.toml").write_text(config(home, "show", *words))
    return load_config(str(home / "shown.toml")), json.loads(
        config(home, "show", *words, "--json", "-")
    )


def test_what_is_shown_is_what_a_run_writes_and_runs_again(home):
    words = ("tiny", *QUICK, "--set", "data.train=tokens")
    done = mtcli("train", *words, folder=home)
    assert done.returncode == 0, done.stderr
    ours, answer = shown(home, *words)
    assert ours == load_config(str(home / "runs/run")) == shown(home, "shown.toml")[0]
    assert (ours.model.vocab_size, ours.optimizer.warmup_steps) == (600, 2)
    origins = {name: answer["fields"][name]["from"] for name in answer["fields"]}
    assert origins["model.vocab_size"] == "data" and origins["optimizer.warmup_steps"] == "flag"
    again = shown(home, "runs/run")[1]["fields"]
    values = {name: entry for name, entry in again.items() if entry["value"] is not None}
    left_out = {name for name, entry in values.items() if entry["from"] != "file"}
    # Another optimizer brings its own, and an empty array of tables is not written.
    arrays = {"optimizer.group", "phase", "eval"}
    assert left_out == {"optimizer.momentum", "optimizer.nesterov", *arrays}


def test_epochs_are_the_steps_of_the_run_while_its_data_can_be_read(home):
    data = {"data.train": "my.jsonl", "train.output": "chats", "train.epochs": 2}
    done = fine_tune(home, "llama", **data)
    assert done.returncode == 0, done.stderr
    theirs = load_config(str(home / "chats"))
    words = [f"--set={name}={value}" for name, value in data.items()]
    words += ["--set=batch.seq_len=128", "--set=batch.global_batch_size=4"]  # fine_tune's
    ours, answer = shown(home, "llama", *words)
    fields = answer["fields"]
    assert ours.train.steps == theirs.train.steps and fields["train.steps"]["from"] == "data"
    assert fields["model.hidden_size"] == {"value": 32, "from": "weights"}
    assert fields["train.init"]["from"] == "weights"
    assert fields["optimizer.lr"] == {"value": 2e-5, "from": "derived"}
    assert fields["train.epochs"]["from"] == "flag" and fields["data.split"]["from"] == "derived"

    (home / "my.jsonl").rename(home / "gone.jsonl")
    fields = shown(home, "chats")[1]["fields"]
    assert fields["train.steps"] == {"value": theirs.train.steps, "from": "file"}
    ours, answer = shown(home, "llama", *words)
    assert answer["fields"]["train.steps"] == {"value": None, "from": "data"}
    assert (
        "steps" not in ours.train.model_fields_set
        and "train.epochs decides" in (home / "shown.toml").read_text()
    )
    (home / "gone.jsonl").rename(home / "my.jsonl")

    done = mtcli("config", "show", "llama", *words, "--set=optimizer.warmup_steps=999", folder=home)
    assert done.returncode == 2 and "999 is above the" in done.stderr


def test_diff_lists_the_fields_that_differ_with_both_values(home):
    (home / "a.toml").write_text('[model]\npreset = "tiny"\n[optimizer]\nlr = 1e-4\n')
    answer = json.loads(config(home, "diff", "a.toml", "tiny", "--json", "-"))
    assert answer["names"] == ["a.toml", "tiny"]
    assert answer["fields"]["optimizer.lr"] == {"values": [1e-4, 1e-3], "from": ["file", "preset"]}
    differing = {"batch", "optimizer", "train"}  # the preset's [model] is the same
    assert {name.partition(".")[0] for name in answer["fields"]} == differing
    lines = config(home, "diff", "a.toml", "tiny").splitlines()
    assert lines[0].split() == ["field", "a.toml", "tiny"]
    assert ["optimizer.lr", "0.0001", "0.001"] in [line.split() for line in lines]
    assert len({line.index(line.split()[1]) for line in lines}) == 1
    assert config(home, "diff", "tiny", "tiny") == "no field differs\n"


def test_a_field_that_one_config_has_not_is_a_difference(home):
    fields = json.loads(config(home, "diff", "tiny", "deepseek-v3", "--json", "-"))["fields"]
    assert fields["model.mla.kv_rank"] == {"values": [None, 512], "from": [None, "preset"]}


# fmt: off
@pytest.mark.parametrize("words, message, hint", [
    ("config", "show|diff|explain|schema: it is missing", "`mtcli config show tiny"),
    ("config tiny", "there is no mtcli config tiny", "mtcli config show or mtcli config diff"),
    ("config show", "show takes CONFIG, and 0 names are given", "mtcli config show CONFIG"),
    ("config diff tiny", "diff takes A B, and 1 names are given", "mtcli config diff A B"),
    ("config schema tiny", "schema takes no name, and 1 names", "mtcli config schema"),
    ("config show tiny --set parallel.tp=3", "tp=3 does not divide num_kv_heads=4", "1, 2 or 4"),
    ("config diff tiny tiny --set seed=1", "--set: --set goes with show", "leave --set out"),
    ("config explain seed --gpus 2", "--gpus: --gpus goes with show", "leave --gpus out"),
    ("config diff tiny bad.toml", "unknown key 'lrr' in [optimizer] (in bad.toml)",
     "did you mean 'lr'?"),
    ("config diff tin gpt2", "named 'tin' (in tin)", "did you mean 'tiny'?"),
    ("config explain lr", "there is no field or section 'lr'", "did you mean optimizer.lr?"),
    ("config explain optimizer.lrr", "'optimizer.lrr'", "did you mean optimizer.lr?"),
    ("config explain model.lr", "'model.lr'", "did you mean optimizer.lr?"),
    ("config explain zero_stage", "'zero_stage'", "did you mean parallel.zero?"),
    ("config explain optimiser", "section 'optimiser'", "did you mean optimizer?"),
    ("config explain nope.toml seed", "no config file or preset named 'nope.toml'", "give a TOML"),
    ("config explain a b c", "explain takes FIELD, and 3 names", "mtcli config explain FIELD"),
    ("config explain xyzzy", "section 'xyzzy'", "sections: model, parallel, batch"),
])
# fmt: on
def test_wrong_words_are_told_with_a_way_out(home, words, message, hint):
    (home / "bad.toml").write_text('[model]\npreset = "tiny"\n[optimizer]\nlrr = 1\n')
    done = mtcli(*words.split(), folder=home)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and hint in done.stderr.partition("hint: ")[2]


def test_explain_with_a_config_has_its_value_there_and_where_it_comes_from(home):
    text = config(home, "explain", "tiny", "optimizer.lr")
    assert "  here     0.001 (preset)\n" in text and "default  0.0003" in text
    table = json.loads(config(home, "explain", "tiny", "optimizer", "--json", "-"))["fields"]
    assert (table["optimizer.lr"]["value"], table["optimizer.lr"]["from"]) == (0.001, "preset")
    assert table["optimizer.clip"]["from"] == "default"
    assert "tp*cp*pp divides the number of ranks" in config(home, "explain", "parallel.pp")


def test_explain_says_what_a_field_means_and_takes(home):
    text = config(home, "explain", "optimizer.trust_bounds")
    assert "least and the largest trust ratio" in text
    assert "docs/reference/config.md#optimizer" in text
    assert "of use with optimizer.name = 'lamb' alone" in text
    assert "the least trust ratio is at most the largest" in text
    fields = json.loads(config(home, "explain", "parallel.zero", "--json", "-"))["fields"]
    assert fields["parallel.zero"]["type"] == "int"
    assert fields["parallel.zero"]["options"] == [0, 1, 3]
    names = ["batch.seq_len", "batch.micro_batch_size", "batch.global_batch_size"]
    assert [*json.loads(config(home, "explain", "batch", "--json", "-"))["fields"]] == names
    lines = config(home, "explain", "batch").splitlines()
    assert [name for name in names if any(line.startswith(name) for line in lines)] == names


@pytest.mark.parametrize("words", [
    ["show", "tiny"], ["diff", "tiny", "mixtral-8x7b"], ["explain", "model"], ["schema"],
])  # fmt: skip
def test_nothing_heavy_is_imported(words):
    code = (
        "import sys; from mtcli.__main__ import run; code = run(['config', *sys.argv[1:]]);"
        "print('torch' in sys.modules, 'transformers' in sys.modules, code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stderr == "False False 0\n"
