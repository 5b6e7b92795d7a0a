"""Models of the Hugging Face hub, by a stand-in on loopback: fetched, pinned, offline, pushed."""

import json
import os

import pytest
from chats import save_model, sums, write_lines
from command_line import mtcli
from hub_stub import COMMIT, Hub, serving

from mtcli.core.config.loading import load_config

NAME = "some-lab/tiny-llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture
def hub(folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Hub({NAME: files | {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}})


@pytest.fixture
def run(hub, tmp_path):
    """mtcli in an empty folder whose hub is the stand-in, or, with offline, none."""
    with serving(hub) as address:

        def call(*words, offline=False, token="secret"):
            env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": token}
            env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
            env |= {"HF_HUB_OFFLINE": str(int(offline))}
            return mtcli(*words, folder=tmp_path, **env)

        yield call


def paths(hub):
    return {path.rpartition("/")[2] for method, path in hub.requests if "/resolve/" in path}


def test_a_model_is_fetched_once_and_read_offline(run, hub, folder):
    done = run("generate", f"hub:{NAME}", "--prompt", "Hi", "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    local = mtcli("generate", folder, "--prompt", "Hi", "--max-tokens", "3")
    assert done.stdout == local.stdout
    assert "model.safetensors" in paths(hub) and "pytorch_model.bin" not in paths(hub)
    again = run("generate", f"hub:{NAME}", "--prompt", "Hi", "--max-tokens", "3", offline=True)
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr


def test_a_plan_fetches_no_weights_and_a_run_pins_the_commit(run, hub, tmp_path):
    done = run("plan", f"hub:{NAME}@main", "--gpus", "1")
    assert done.returncode == 0, done.stderr
    assert paths(hub) == {"config.json"}
    write_lines(tmp_path / "my.jsonl", sums(4))
    words = (
        "--set",
        "data.train=my.jsonl",
        "--set",
        "train.output=run",
        "--set",
        "batch.seq_len=128",
    )
    done = run("train", f"hub:{NAME}", *words, "--set", "batch.global_batch_size=1")
    assert done.returncode == 0, done.stderr
    assert load_config(str(tmp_path / "run")).train.init == f"hub:{NAME}@{COMMIT}"
    done = run("shard", f"hub:{NAME}", "ours", "--verify")
    assert done.returncode == 0, done.stderr


def test_a_name_of_nothing_here_is_taken_as_one_of_the_hub(run, hub, tmp_path):
    note = "note: no file or folder here is {}: it is taken as hub:{}\n"
    planned = run("plan", f"hub:{NAME}", "--gpus", "1").stdout
    done = run("plan", f"{NAME}@main", "--gpus", "1")
    assert (done.returncode, done.stdout) == (0, planned)
    assert done.stderr.count(note.format(*[f"{NAME}@main"] * 2)) == 1
    (tmp_path / "w.txt").write_text(" = A title = \n A text of some words . \n" * 9)
    write_lines(tmp_path / "my.jsonl", sums(4))
    data = ("--set", "data.train=my.jsonl", "--set", "batch.seq_len=128")
    commands = (
        ("config", "show", NAME),
        ("config", "diff", NAME, "tiny"),
        ("profile", NAME, "--steps", "1", "--warmup", "0", "--set", "batch.global_batch_size=1"),
        ("generate", NAME, "--prompt", "Hi", "--max-tokens", "2"),
        ("eval", NAME, "--task", "wikitext103=w.txt"),
        ("shard", NAME, "other/out"),
        ("shard", "inspect", NAME),
        ("train", NAME, *data, "--dry-run", "--json", "-"),
        ("train", "tiny", "--init", NAME, *data, "--dry-run", "--nproc", "2"),
        ("sweep", NAME, *data, "--vary", "optimizer.lr=1e-4,1e-5", "--output", "s"),
    )
    for words in commands:
        done = run(*words)
        told = done.stderr.count(note.format(NAME, NAME))
        # the tiny model has other shapes than the weights
        assert (told, done.returncode) == (1, 2 if "--init" in words else 0), done.stderr
    assert (tmp_path / "other" / "out" / "manifest.json").exists(), "no name of a folder to write"


def test_a_name_with_a_folder_here_is_none_of_the_hub(run, hub, tmp_path):
    (tmp_path / "some-lab").mkdir()
    done = run("plan", NAME, "--gpus", "1")
    assert done.returncode == 2 and "no config file or preset named" in done.stderr
    done = run("generate", NAME, "--prompt", "Hi")
    assert done.returncode == 2 and f"there is no folder {NAME}" in done.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (("shard", "inspect", "hub:some-lab/none"), "the hub has no some-lab/none", "HF_TOKEN"),
        (("shard", "inspect", f"hub:{NAME}@v9"), "has no revision 'v9'", "a branch, a tag"),
        (("shard", "inspect", "hub:x"), "'hub:x' is no name of the hub", "hub:owner/name"),
        (("shard", "inspect", "hub:../x"), "is no name of the hub", "hub:owner/name"),
        (("plan", "hub:a/b/c", "--gpus", "1"), "is no name of the hub", "hub:owner/name"),
    ],
)
def test_what_the_hub_does_not_give_ends_with_a_hint(run, words, said, hint):
    done = run(*words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert said in done.stderr and hint in done.stderr.partition("hint: ")[2]


def test_without_network_and_cache_the_error_says_so(run):
    done = run("shard", "inspect", f"hub:{NAME}", offline=True)
    assert done.returncode == 2 and "its cache has no copy" in done.stderr
    assert f"`hf download {NAME} --local-dir tiny-llama`" in done.stderr


def test_a_private_model_wants_the_token(run, hub):
    hub.token = "secret"
    done = run("shard", "inspect", f"hub:{NAME}", token="another")
    assert done.returncode == 2 and "not for this token" in done.stderr
    assert run("shard", "inspect", f"hub:{NAME}").returncode == 0


def test_a_folder_is_pushed_with_a_card(run, hub, folder, tmp_path):
    write_lines(tmp_path / "my.jsonl", sums(4))
    words = (
        "--set",
        "data.train=my.jsonl",
        "--set",
        "train.output=run",
        "--set",
        "batch.seq_len=128",
    )
    done = run("train", f"hub:{NAME}", *words, "--set", "batch.global_batch_size=1")
    assert done.returncode == 0, done.stderr
    (tmp_path / "wiki.txt").write_text(" = A title = \n A text of some words . \n" * 9)
    done = run("eval", "run", "--task", "wikitext103=wiki.txt", "--json", "run/wiki.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "wiki.json").read_text())
    (tmp_path / "run" / "x.json").write_text(json.dumps(result | {"checkpoint": "other"}))
    (tmp_path / "run" / "old.json").write_text(json.dumps(result))
    os.utime(tmp_path / "run" / "old.json", (0, 0))
    done = run("shard", "run", "out", "--to", "hf", "--push", "me/sums", "--json", "x.json")
    assert done.returncode == 0, done.stderr
    assert hub.created == ["me/sums"]
    pushed = hub.commits["me/sums"]
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert pushed == local and {"model.safetensors", "config.json", "README.md"} <= pushed.keys()
    card = pushed["README.md"].decode()
    assert f"base_model: {NAME}\n" in card and "| data | my.jsonl |" in card
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert f"| {rows[-1]['step']} | {rows[-1]['loss']:.4f} |  |" in card
    report = result["tasks"]["wikitext103"]
    assert card.count(f"| wikitext103 | perplexity | {report['perplexity']:.4f} |") == 1
    assert str(tmp_path) not in card and "mtcli generate hub:me/sums" in card
    done = run("shard", "run", "out", "--to", "hf", "--force")
    assert done.returncode == 0, done.stderr


def test_only_a_hugging_face_folder_is_pushed_and_with_a_token(run, tmp_path):
    done = run("shard", f"hub:{NAME}", "out", "--to", "mtcli", "--push", "me/x")
    assert done.returncode == 2 and "--push me/x with --to mtcli" in done.stderr
    done = run("shard", f"hub:{NAME}", "out", "--to", "hf", "--push", "x")
    assert done.returncode == 2 and "'x' is no name of the hub" in done.stderr
    done = run("shard", f"hub:{NAME}", "out", "--to", "hf", "--push", "me/x", token="")
    assert done.returncode == 2 and "there is no token" in done.stderr
    assert not (tmp_path / "out").exists()
