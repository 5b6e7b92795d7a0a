"""Nothing that a command did not make is emptied, replaced or written through a link."""

import json
import os
import shutil
from contextlib import contextmanager

import pytest
from command_line import in_process
from eval_data import make_data
from transformers import GPT2Config, GPT2LMHeadModel

from mtcli.core.runtime.work_folder import WorkFolder, lock_output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder with a tokenizer of bytes."""
    from mtcli.core.data.tokenize import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 257, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture
def room(tmp_path, model):
    """A folder with a corpus, tasks and a model."""
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n')
    make_data(tmp_path / "tasks")
    shutil.copytree(model, tmp_path / "model")
    return tmp_path


def tree(folder):
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.name != "x.json" and (path.is_symlink() or path.is_file())  # it says why
    }


def refused(room, line, *said):
    """Fails where a line is not refused, or anything has changed after it."""
    before = tree(room)
    done = in_process(*line.split(), folder=room)
    assert done.returncode == 2, done.stderr
    assert tree(room) == before
    for words in said:
        assert words in done.stderr, done.stderr
    assert "hint:" in done.stderr


WORK = {  # the work folder of each command, and its line
    "out.partial": "preprocess a.txt --output out --tokenizer bytes",
    "clean/.curate": "curate a.jsonl --output clean --set stages=['exact']",
    "dst.partial": "shard model dst --to mtcli",
}


@pytest.mark.parametrize("name", WORK)
def test_a_folder_of_the_users_that_has_a_work_folders_name_is_refused(name, room):
    (room / name).mkdir(parents=True)
    (room / name / "notes.txt").write_text("precious")
    refused(room, WORK[name], f"{name} was not made by mtcli, and holds notes.txt")
    refused(room, WORK[name].replace("shard", "shard --force"), "notes.txt")
    (room / name).rename(room / "mine")
    (room / name).symlink_to(room / "mine")
    refused(room, WORK[name], f"{name} is a link")


@contextmanager
def held(take):
    """Another process holds what `take` locks."""
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        lock = take()
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        del lock
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield
    finally:
        os.write(done[1], b"x")
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", WORK)
def test_one_run_at_a_time_writes_a_folder(name, room):
    with held(lambda: WorkFolder(room / name, room / "out")):
        refused(room, WORK[name], "another run is writing")
    assert in_process(*WORK[name].split(), folder=room).returncode == 0
    assert not (room / name).exists()


def test_one_evaluation_at_a_time_writes_a_file_of_items(room):
    line = "eval model --task piqa=tasks/piqa --json x.json"
    partial = room / "x.items.jsonl.partial"
    with held(lambda: lock_output(partial, partial)):
        refused(room, line, "another run is writing x.items.jsonl")
    assert in_process(*line.split(), folder=room).returncode == 0
    assert json.loads((room / "x.json").read_text())["items"] == "x.items.jsonl"
    assert not partial.exists()


def test_a_run_that_is_refused_clears_nothing_that_an_ended_one_left(room):
    for name in WORK:
        WorkFolder(room / name, room / "out").close()
        (room / name / "journal.jsonl").write_text('{"fingerprint": "f"}\n')
    refused(room, "preprocess a.txt --output out --tokenizer no/such", "no/such")
    refused(room, "preprocess a.txt --output out --tokenizer train:5", "5")
    refused(room, "curate a.jsonl --output clean --set stages=['quality']", "quality")
    refused(room, "shard model dst --layout tp=5", "tp=5")


INPUTS = [  # a line whose input is its output, and what is said of it
    ("preprocess foo.json --format jsonl --output foo --tokenizer bytes --force", "foo.json"),
    ("preprocess foo.partial/x.jsonl --output foo --tokenizer bytes --force", "foo.partial/x"),
    ("eval model --task lambada=x.items.jsonl --json x.json", "x.items.jsonl"),
    ("curate clean/.curate/x.jsonl --output clean --set stages=['exact']", ".curate/x.jsonl"),
    ("shard dst.partial/model dst --to mtcli", "dst.partial/model"),
]


@pytest.mark.parametrize(("line", "name"), INPUTS)
def test_an_input_is_no_output_by_a_derived_name(line, name, room):
    for path in ("foo.json", "foo.partial/x.jsonl", "x.items.jsonl", "clean/.curate/x.jsonl"):
        (room / path).parent.mkdir(parents=True, exist_ok=True)
        (room / path).write_text('{"text": "one two three"}\n')
    shutil.copytree(room / "model", room / "dst.partial" / "model")
    for path in ("foo.partial", "clean/.curate", "dst.partial"):  # as ours as can be
        (room / path / "mtcli.lock").touch()
    refused(room, line, "the input", name, "would be replaced")


def test_a_checkpoint_in_which_someone_keeps_other_files_is_not_replaced(room):
    line = "shard model dst --to hf"
    assert in_process(*line.split(), folder=room).returncode == 0
    assert in_process(*line.split(), "--force", folder=room).returncode == 0
    (room / "dst" / ".git").mkdir()
    (room / "dst" / "notes.md").write_text("precious")
    refused(room, f"{line} --force", "dst holds 2 files of no checkpoint: .git, notes.md")


def test_derived_names_that_are_links_are_refused(room):
    (room / "mine").mkdir()
    (room / "x.items.jsonl").symlink_to(room / "mine" / "thesis")
    refused(room, "eval model --task piqa=tasks/piqa --json x.json", "x.items.jsonl is a link")
    train = "train tiny --set data.train=missing --set train.output=run"
    for name in ("checkpoints", "events", "subsets", "wandb"):
        (room / "run").mkdir(exist_ok=True)
        (room / "run" / name).symlink_to(room / "mine")
        refused(room, train, f"train.output: run/{name} is a link")
        (room / "run" / name).unlink()
