"""`mtcli train` on files and folders of text: tokenized once, beside them."""

import json
import os
import shutil

import pytest
from chats import save_model
from command_line import launched, mtcli
from test_train_dry_run import files
from tiny import metrics

SETTINGS = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"]
SETTINGS += ["batch.seq_len=16", "batch.micro_batch_size=2", "batch.global_batch_size=4"]
SETTINGS += ["train.steps=3", "train.output=run", "optimizer.warmup_steps=1"]
SAID = "tokenizing texts once"


@pytest.fixture
def home(tmp_path):
    """A folder with a folder of text."""
    (tmp_path / "texts").mkdir()
    for number in range(6):
        words = " ".join(f"word{number * n % 50}" for n in range(120))
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number}. {words}\n")
    return tmp_path


def words(*settings):
    sets = [word for one in (*SETTINGS, *settings) for word in ("--set", one)]
    return ("train", "tiny", *sets)


def train(home, *settings, flags=()):
    return mtcli(*words(*settings), *flags, folder=home)


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


def datasets(home):
    return sorted(path.stem for path in (home / "texts.tokenized").glob("*.idx"))


def test_a_run_on_text_is_a_run_on_what_preprocess_makes_of_it(home):
    done = train(home, "data.train=texts", "data.tokenizer=train:300")
    assert done.returncode == 0 and SAID in done.stderr, done.stderr
    (name,) = datasets(home)
    assert "data   6 documents of texts, " in done.stdout and name in done.stdout
    made = mtcli("preprocess", "texts", "--output", "d", "--tokenizer", "train:300", folder=home)
    assert made.returncode == 0, made.stderr
    for suffix in (".bin", ".idx"):
        ours = (home / "texts.tokenized" / name).with_suffix(suffix).read_bytes()
        assert ours == (home / f"d{suffix}").read_bytes()
    assert train(home, "data.train=d", "train.output=other").returncode == 0
    assert losses(home / "run") == losses(home / "other") != []
    again = mtcli("train", "run", "--resume", "--set", "train.steps=4", folder=home)
    assert again.returncode == 0 and SAID not in again.stderr, again.stderr
    said = mtcli("generate", "run", "--prompt", "Text", "--max-tokens", "2", folder=home)
    assert said.returncode == 0 and said.stdout.startswith("Text"), said.stderr


def test_a_phase_goes_on_with_text_by_the_same_tokenizer(home):
    shutil.copytree(home / "texts", home / "more")
    (home / "more" / "0.txt").write_text("Other words\n" * 40)
    later = ("data.train=texts", "phase.0.from_tokens=128", "phase.0.data.train=more")
    done = train(home, *later, "data.tokenizer=train:300")
    assert done.returncode == 2 and not (home / "texts.tokenized").exists()
    assert "tokenizer='train:300' is trained on one text, and the data names 2" in done.stderr
    made = "`mtcli preprocess texts more --output DATA --tokenizer train:300` trains one on all"
    assert made in done.stderr
    dry = train(home, *later, "data.tokenizer=bytes", flags=("--dry-run",))
    assert dry.returncode == 0 and "texts: 6 files" in dry.stdout and "; more: 6" in dry.stdout
    assert train(home, *later, "data.tokenizer=bytes").returncode == 0
    for name in ("texts", "more"):
        made = mtcli(
            "preprocess", name, "--output", f"d/{name}", "--tokenizer", "bytes", folder=home
        )
        assert made.returncode == 0, made.stderr
    named = ("data.train=d/texts", "phase.0.from_tokens=128", "phase.0.data.train=d/more")
    assert train(home, *named, "train.output=other").returncode == 0
    assert losses(home / "run") == losses(home / "other") and len(losses(home / "run")) == 3


def test_text_is_tokenized_once_until_it_changes(home):
    data = ("data.train=texts/", "data.tokenizer=bytes")
    assert "tokenizing texts/ once" in train(home, *data).stderr
    (first,) = datasets(home)
    before = files(home / "texts.tokenized")
    again = train(home, *data, "train.output=again")
    assert again.returncode == 0 and "tokenizing" not in again.stderr
    assert files(home / "texts.tokenized") == before
    assert train(home, *data, 'data.valid=["texts/1.txt"]', "train.output=v").returncode == 0
    assert (home / "texts" / "1.txt.tokenized").is_dir()
    other = train(home, data[0], "data.tokenizer=train:300", "train.output=other")
    assert other.returncode == 0 and len(datasets(home)) == 2
    path = home / "texts" / "2.txt"
    path.write_text(path.read_text().replace("Text", "Next"))
    os.utime(path, (1, 1))
    changed = train(home, *data, "train.output=changed")
    assert changed.returncode == 0 and len(datasets(home)) == 3 and first in datasets(home)
    resumed = train(home, *data, "train.steps=4", flags=("--resume",))
    assert resumed.returncode == 2 and "the run was trained on" in resumed.stderr


def test_the_tokenizer_is_that_of_the_initial_weights(home):
    save_model(home / "model")
    sets = ["data.train=texts", "train.steps=1", "train.output=run", "batch.seq_len=16"]
    flags = [word for one in sets for word in ("--set", one)]
    done = mtcli("train", "model", *flags, "--set", "batch.global_batch_size=1", folder=home)
    assert done.returncode == 0, done.stderr
    (name,) = datasets(home)
    made = home / "texts.tokenized" / f"{name}.tokenizer" / "tokenizer.json"
    assert json.loads(made.read_text()) == json.loads(
        (home / "model" / "tokenizer.json").read_text()
    )


def test_one_rank_tokenizes_and_the_others_wait(home):
    done = train(home, "data.train=texts", "data.tokenizer=bytes", flags=("--nproc", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1 and len(datasets(home)) == 1
    line = words("data.train=texts", "data.tokenizer=train:300", "train.output=by-launcher")
    done = launched(*line, "--nproc", "2", folder=home)
    assert done.returncode == 0 and done.stderr.count(SAID) == 1, done.stderr


def test_a_dry_run_says_how_long_it_takes_and_writes_nothing(home):
    before = files(home)
    data = ("data.train=texts", "data.tokenizer=bytes")
    found = json.loads(train(home, *data, flags=("--dry-run", "--json", "-")).stdout)
    assert files(home) == before
    assert found["batch"] is None and found["plan"]["step_seconds"] > 0
    size = sum(path.stat().st_size for path in (home / "texts").iterdir())
    line = f"texts: 6 files of {size / 1e6:,.1f} MB, to be tokenized by bytes into texts.tokenized"
    assert found["header"]["data"] == f"{line} in about 0:00:01"
    done = train(home, data[0], "data.tokenizer=train:300", flags=("--dry-run", "--json", "-"))
    new = json.loads(done.stdout)
    assert new["header"]["data"].endswith("once a new tokenizer is trained on it")
    assert train(home, data[0], "data.tokenizer=train:300").returncode == 0
    assert new["parameters"] - found["parameters"] == (300 - 257) * 32
    run = json.loads(mtcli("profile", "run", "--json", "-", folder=home).stdout)
    assert run["parameters"] == new["parameters"]


def test_other_text_for_the_config_of_a_run_is_read_by_the_run_s_tokenizer(home):
    assert train(home, "data.train=texts", "data.tokenizer=train:300").returncode == 0
    config = home / "run" / "config.toml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if not line.startswith("tokenizer")))
    shutil.copytree(home / "texts", home / "more")
    sets = ("--set", "train.output=other", "--set")
    done = mtcli("train", "run", *sets, "data.train=more", folder=home)
    assert done.returncode == 0 and "tokenizing more once" in done.stderr, done.stderr
    tokens = [next((home / f"{name}.tokenized").glob("*.bin")) for name in ("texts", "more")]
    assert tokens[0].read_bytes() == tokens[1].read_bytes()
    (home / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    done = mtcli("train", "run", *sets, "data.train=talks.jsonl", folder=home)
    assert done.returncode == 2 and "talks.jsonl:1: no key" in done.stderr
    assert "hint: conversations are read with --set data.format=conversations" in done.stderr


def test_nothing_is_tokenized_for_a_run_that_cannot_begin(home):
    data = ("data.train=texts", "data.tokenizer=bytes")
    done = train(home, *data, "optimizer.lrr=1")
    assert done.returncode == 2 and "unknown key 'lrr'" in done.stderr
    (home / "run").mkdir()
    (home / "run" / "run.json").write_text("{}")
    done = launched(*words(*data), folder=home)
    assert done.returncode == 2 and "run already holds a run" in done.stderr
    assert not (home / "texts.tokenized").exists()
    done = train(home, "data.train=texts", "optimizer.lrr=1")
    assert "no tokenizer is known" in done.stderr and "unknown key 'lrr'" in done.stderr


def test_a_folder_of_another_s_is_left_as_it_is(home):
    (home / "texts.tokenized").mkdir()
    (home / "texts.tokenized" / "mine").write_text("mine")
    before = files(home / "texts.tokenized")
    done = train(home, "data.train=texts", "data.tokenizer=bytes")
    assert done.returncode == 2 and "texts.tokenized was not made by mtcli" in done.stderr
    assert files(home / "texts.tokenized") == before


def test_sweeps_and_profiles_take_text_too(home):
    data = words("data.train=texts", "data.tokenizer=bytes")[2:]
    vary = ("--vary", "optimizer.lr=1e-3,1e-4", "--output", "s")
    done = mtcli("sweep", "tiny", *data, *vary, folder=home)
    assert done.returncode == 0 and SAID in done.stderr, done.stderr
    done = mtcli("profile", "tiny", *data, "--steps", "1", "--warmup", "0", folder=home)
    assert done.returncode == 0 and SAID not in done.stderr, done.stderr
