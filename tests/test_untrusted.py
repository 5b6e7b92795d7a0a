"""Nothing in a file is run: pickles, pipes and devices in the place of files do nothing.

`docs/concepts/untrusted.md` lists what is read, by what, and with which checks.
"""

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
import signal
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hostile import write_manifest

from mtcli.__main__ import run
from mtcli.core.data.samples import Samples, load_kept
from mtcli.core.runtime.work_folder import MARK, WorkFolder

MARKER = "a-pickle-was-loaded"


class Malicious:
    def __reduce__(self):
        return os.mkdir, (MARKER,)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory):
    """Pickles that make a folder where they are loaded, in every form that loaders know."""
    import torch

    path = tmp_path_factory.mktemp("payload") / "x"
    torch.save(Malicious(), path)
    array = np.array([Malicious()], dtype=object)
    np.save(path.with_suffix(".npy"), array, allow_pickle=True)
    return {
        "ascii": pickle.dumps(Malicious(), 0),
        "binary": pickle.dumps(Malicious(), 4),
        "torch": path.read_bytes(),
        "npy": path.with_suffix(".npy").read_bytes(),
    }


def test_the_payloads_work(payloads, tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npy").write_bytes(payloads["npy"])
    (tmp_path / "x.pt").write_bytes(payloads["torch"])
    for load in (
        lambda: pickle.loads(payloads["ascii"]),
        lambda: pickle.loads(payloads["binary"]),
        lambda: np.load("x.npy", allow_pickle=True),
        lambda: torch.load("x.pt", weights_only=False),
    ):
        load()
        (tmp_path / MARKER).rmdir()


@contextmanager
def one_process(folder):
    """Commands run in this process, in a folder, as those of rank 0 of 1."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with text, tiny.bin/.idx, a run of one step in run/, and hf/ made of it."""
    import zstandard

    folder = tmp_path_factory.mktemp("home")
    with one_process(folder):
        (folder / "text.txt").write_text("all the world is a stage\n" * 200)
        assert run(["preprocess", "text.txt", "--output", "tiny", "--tokenizer", "bytes"]) == 0
        sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 257}
        sets = {f"model.{key}": value for key, value in sizes.items()}
        sets |= {"model.max_seq_len": 16, "batch.seq_len": 16, "train.steps": 1}
        sets |= {"batch.micro_batch_size": 1, "batch.global_batch_size": 1, "data.split": "1,0,0"}
        sets |= {"train.output": "run", "data.train": "['tiny']"}
        words = [word for k, v in sets.items() for word in ("--set", f"{k}={v}")]
        assert run(["train", "tiny", *words, "--set", "train.device=cpu"]) == 0
        assert run(["shard", "run", "hf"]) == 0
    for suffix, compress in (
        ("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress),
        (".zst", zstandard.ZstdCompressor().compress),
    ):  # fmt: skip
        (folder / f"a.jsonl{suffix}").write_bytes(compress(b'{"text": "a"}\n'))
    (folder / "a.parquet").touch()
    return folder


STEP = "run/checkpoints/step-00000001"
PREPROCESS = ["--output", "out", "--tokenizer", "bytes", "--workers", "1"]
SAY = ["--prompt", "a", "--max-tokens", "1", "--device", "cpu"]
RETRAIN = ["train", "run/config.toml", "--set", "train.output=again"]
RESUME = ["train", "run/config.toml", "--resume", "--set", "train.steps=2"]
PLACES = [
    (f"{STEP}/manifest.json", ["shard", "inspect", "run"]),
    (f"{STEP}/config.toml", ["shard", "inspect", "run"]),
    (f"{STEP}/rank-00000.safetensors", ["shard", "inspect", "run"]),
    (f"{STEP}/tokenizer/tokenizer.json", ["generate", "run", *SAY]),
    (f"{STEP}/tokenizer/tokenizer_config.json", ["generate", "run", *SAY]),
    (f"{STEP}/huggingface/config.json", ["shard", "run", "out", "--to", "hf"]),
    (f"{STEP}/manifest.json", RESUME),
    ("run/metrics.jsonl", RESUME),
    ("run/metrics.jsonl", ["profile", "run"]),
    ("run/run.json", ["profile", "run"]),
    ("run/events.jsonl", ["profile", "run"]),
    ("run/config.toml", ["profile", "run"]),
    ("run/config.toml", ["train", "run/config.toml"]),
    ("hf/config.json", ["shard", "hf", "out"]),
    ("hf/model.safetensors", ["shard", "hf", "out"]),
    ("hf/model.safetensors.index.json", ["shard", "hf", "out"]),
    ("hf/generation_config.json", ["shard", "hf", "out"]),
    ("x.gguf", ["shard", "inspect", "x.gguf"]),
    ("hf/tokenizer.json", ["generate", "hf", *SAY]),
    ("hf/generation_config.json", ["generate", "hf", *SAY]),
    ("hf/tokenizer_config.json", ["generate", "hf", *SAY]),
    ("hf/special_tokens_map.json", ["generate", "hf", *SAY]),
    ("tiny.idx", RETRAIN),
    ("tiny.bin", RETRAIN),
    ("tiny.json", RETRAIN),
    ("tiny.tokenizer/tokenizer.json", RETRAIN),
    *((name, ["preprocess", name, *PREPROCESS]) for name in ("text.txt", "a.jsonl", "a.parquet")),
    *((f"a.jsonl{end}", ["preprocess", f"a.jsonl{end}", *PREPROCESS])
      for end in (".gz", ".xz", ".bz2", ".zst")),
    ("out.partial/journal.jsonl", ["preprocess", "text.txt", *PREPROCESS, "--resume"]),
    ("t/tokenizer.json", ["preprocess", "text.txt", "--output", "out", "--tokenizer", "t"]),
    ("wiki.test.tokens", ["eval", "run", "--task", "wikitext103=wiki.test.tokens"]),
    ("last.jsonl", ["eval", "run", "--task", "lambada=last.jsonl"]),
    ("race/high/1.txt", ["eval", "run", "--task", "race=race"]),
    ("task.yaml", ["eval", "run", "--task", "lm_eval:task.yaml"]),
    ("plan.toml", ["plan", "plan.toml"]),
]  # fmt: skip


def test_a_pickle_in_the_place_of_a_file_does_nothing(home, payloads, tmp_path, capsys):
    for number, (place, words) in enumerate(PLACES):
        for name in ("binary", "torch"):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(home, folder)
            with one_process(folder):
                plant(Path(place), payloads[name])
                code = run(words)
            where = f"{name} in {place}: mtcli {' '.join(words)}"
            assert not list(folder.rglob(MARKER)), f"{where} has run it"
            refused_or_copied(where, code, capsys.readouterr().err, place in COPIED)


def refused_or_copied(where, code, said, may_succeed):
    """Fails, naming where, unless a command has ended well where it may, or with a clear error."""
    assert code in ((0, 1, 2) if may_succeed else (1, 2)), f"{where}: {code} {said}"
    assert code == 0 or "error: " in said, f"{where}: {said}"
    assert "Traceback" not in said and "unexpected" not in said, f"{where}: {said}"


# Not read by these commands, but copied; or taken for a line that a crash has cut.
COPIED = {
    "out.partial/journal.jsonl",
    "hf/generation_config.json",
    "hf/special_tokens_map.json",
    "run/metrics.jsonl",
}
COPIED |= {
    "run/events.jsonl",
    "tiny.tokenizer/tokenizer.json",
    f"{STEP}/tokenizer/tokenizer_config.json",
}


def plant(path, payload):
    """Puts a payload in the place of a file, compressed as its name says, and in the manifest."""
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress.get(path.suffix, bytes)(payload))
    if path.name == "manifest.json" or not str(path).startswith(STEP):
        return
    manifest = Path(STEP, "manifest.json")
    table = json.loads(manifest.read_text())
    record = {"bytes": len(payload), "xxh3_128": [xxhash.xxh3_128_hexdigest(payload)]}
    table["files"][str(path.relative_to(STEP))] = record
    write_manifest(manifest, table)


def test_pickled_weights_beside_a_config_are_named_and_not_loaded(
    home, payloads, tmp_path, monkeypatch, capsys
):
    shutil.copytree(home / "hf", tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(payloads["torch"])
    assert run(["shard", "hf", "out"]) == 2
    assert "pytorch_model.bin, a pickle that is never loaded" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_pickle_in_the_cache_of_samples_does_nothing(payloads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for form in ("binary", "torch", "npy"):
        for name in Samples._fields:
            (tmp_path / f"{name}.npy").write_bytes(payloads[form])
        assert load_kept(tmp_path, Samples) is None, form
        assert not (tmp_path / MARKER).exists(), form


LINKS = ("generation_config.json", "chat_template.jinja", "config.json", "merges.txt")


def test_a_link_out_of_a_folder_is_not_copied_and_one_of_the_hubs_cache_is(
    home, tmp_path, monkeypatch, capsys
):
    for name, where in product(LINKS, ("home", "blobs")):
        root = tmp_path / f"{name} in {where}"
        snapshot = root / "models--x" / "snapshots"
        shutil.copytree(home / "hf", snapshot / "hf")
        secret = root / "models--x" / where / "5ec3e7"
        secret.parent.mkdir()
        path = snapshot / "hf" / name
        secret.write_bytes(path.read_bytes() if path.exists() else b"secret")
        path.unlink(missing_ok=True)
        path.symlink_to(os.path.relpath(secret, path.parent))
        monkeypatch.chdir(root)
        cached = where == "blobs"
        assert run(["shard", str(snapshot / "hf"), "out"]) == (0 if cached else 2), root
        assert ("is a link out of" in capsys.readouterr().err) is not cached, root
        assert (root / "out").exists() is cached, root


def test_a_tokenizer_beside_the_data_that_links_elsewhere_is_not_copied(home, tmp_path, capsys):
    shutil.copytree(home, tmp_path / "x")
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "x" / "tiny.tokenizer" / "added_tokens.json").symlink_to(tmp_path / "id_rsa")
    with one_process(tmp_path / "x"):
        assert run(RETRAIN) in (1, 2)
    assert "is a link out of" in capsys.readouterr().err


def test_names_in_messages_move_no_cursor(capsys):
    assert run(["plan", "--\x1b[2Jx\x9b\r"]) == 2
    said = capsys.readouterr().err
    assert r"--\x1b[2Jx\x9b\x0d" in said
    assert not {"\x1b", "\x9b", "\r"} & set(said)


MEGATRON = ["shard", "megatron", "out", "--to", "mtcli", "--config", "run/config.toml"]
# More of what commands open by name, besides PLACES.
MORE_PLACES = [
    ("gpt2/vocab.json", ["preprocess", "text.txt", "--output", "out", "--tokenizer", "gpt2"]),
    ("gpt2/merges.txt", ["preprocess", "text.txt", "--output", "out", "--tokenizer", "gpt2"]),
    ("t.json", ["preprocess", "text.txt", "--output", "out", "--tokenizer", "t.json"]),
    ("new.txt", ["preprocess", "new.txt", *PREPROCESS]),
    (f"out.partial/{MARK}", ["preprocess", "text.txt", *PREPROCESS]),
    ("out.partial/tokens.bin", ["preprocess", "text.txt", *PREPROCESS, "--resume"]),
    ("run/events.jsonl", RESUME),
    ("run/run.json", RESUME),
    (f"{STEP}/tokenizer/tokenizer.json", ["shard", "run", "out", "--to", "hf"]),
    ("run/run.lock", RESUME),
    ("megatron/metadata.json", MEGATRON),
    ("megatron/common.pt", MEGATRON),
    ("megatron/.metadata", MEGATRON),
    ("megatron/latest_checkpointed_iteration.txt", MEGATRON),
]


def test_no_pipe_or_device_in_the_place_of_a_file_is_waited_for(home, tmp_path, capsys):
    makers = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}
    for number, (place, words) in enumerate(PLACES + MORE_PLACES):
        for kind, make in makers.items():
            where = f"a {kind} as {place}: mtcli {' '.join(words)}"
            folder = tmp_path / f"{kind}-{number}"
            shutil.copytree(home, folder)
            gpt2(folder / "gpt2")
            (folder / "megatron").mkdir()
            (folder / "megatron" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
            with one_process(folder), in_time(where):
                plant(Path(place), b"")
                (folder / place).unlink()
                make(folder / place)
                code = run(words)
            refused_or_copied(where, code, capsys.readouterr().err, place in NOT_NEEDED)


# Copied, where it is a file, or replaced by one that the command writes.
NOT_NEEDED = COPIED - {"out.partial/journal.jsonl", "run/metrics.jsonl", "run/events.jsonl"}
NOT_NEEDED |= {"run/run.json", "run/events.jsonl", "out.partial/tokens.bin"}


def gpt2(folder):
    """GPT-2's two files, of three tokens."""
    folder.mkdir()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


@contextmanager
def in_time(what):
    """Fails where a command does not end: a read that blocks is interrupted after a while."""

    def interrupt(*_):
        raise AssertionError(f"{what} is waited for")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_link_in_a_folder_that_is_written_in_leads_nowhere(home, tmp_path, capsys):
    shutil.copytree(home, tmp_path / "x")
    (tmp_path / "mine").write_text("mine")
    for name in (MARK, "tokens.bin", "journal.jsonl"):
        folder = tmp_path / "x" / "out.partial"
        shutil.rmtree(folder, ignore_errors=True)
        WorkFolder(folder, tmp_path / "x" / "out").close()
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "mine")
        with one_process(tmp_path / "x"):
            run(["preprocess", "text.txt", *PREPROCESS, "--resume"])
        assert (tmp_path / "mine").read_text() == "mine"
        assert "Traceback" not in capsys.readouterr().err
