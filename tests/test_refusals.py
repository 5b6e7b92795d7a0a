"""Wrong input is refused before torch is imported, which takes seconds on a busy machine."""

import json
import subprocess
import sys

import pytest
from indexed_dataset import write_dataset
from tiny import GPT, documents, run_config

from mtcli.commands.ranks import num_ranks
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.data.indexed import token_dtype
from mtcli.core.runtime.worker_errors import LAUNCHED

# Each line of stdin is a command line; the answer is its exit code, whether torch was imported by
# then, and what it said.
CODE = """
import contextlib, io, json, sys
from mtcli.__main__ import run
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = run(json.loads(line))
    print(json.dumps([int(code), "torch" in sys.modules, said.getvalue()]), flush=True)
"""
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 100,
    "max_position_embeddings": 18, "rms_norm_eps": 1e-5,
}  # fmt: skip
TASK = ["--task", "lambada=passages"]
TRAIN = ["train", "tiny", "--set", 'data.train=["data"]', "--set", "train.output=run"]
DATALESS = "there is no training data"
REFUSED = {  # words: what is said
    ("eval", "nowhere", *TASK): "there is no folder nowhere",
    ("eval", "hf", "--nproc", "3", *TASK, "--set", "parallel.tp=3"): "tp=3 does not divide",
    ("eval", "hf", "--nproc", "2", *TASK, "--set", "parallel.cp=2"): "cp=2: evaluation and gener",
    ("eval", "t5", *TASK): "model_type='t5' is not supported",
    ("eval", "sees-all", *TASK): "sees-all has causal=false",
    ("eval", "hf"): "no task is given",
    ("generate", "nowhere", "--prompt", "a"): "there is no folder nowhere",
    ("generate", "hf", "--prompt", "a", "--top-p", "0"): "top_p=0 keeps no token",
    ("generate", "hf", "--prompt", "a", "--set", "train.precision=x"): "'x' should be 'fp64'",
    ("generate", "hf", "--prompt", "a", "--top-k", "3"): "temperature=0 takes the likeliest token",
    ("generate", "hf", "--prompt", "a", "--set", "seed=4"): "seed: it is of a training run",
    ("eval", "hf", *TASK, "--overlap", "3"): "--overlap: lambada with head='lm' has no use for it",
    ("eval", "hf", *TASK, "--set", "batch.seq_len=3"): "batch.seq_len: it is of a training run",
    ("shard", "hf", "passages"): "passages exists and is not a checkpoint",
    ("train", "tiny"): DATALESS,
    ("train", "tiny", "--set", "parallel.tp=3"): DATALESS,
    ("train", "tiny", "--set", 'data.train=["gone"]'): "gone",
    ("train", "x" * 300): "cannot be read: File name too long",
    (*TRAIN, "--set", "model.vocab_size=50"): "token id is 77, and vocab_size=50 takes 0 to 49",
    (*TRAIN[:-1], "train.output=old"): "old already holds a run",
    (*TRAIN, "--init", "nowhere"): "there is no folder nowhere",
    (*TRAIN, "--set", "model.causal=false"): "causal=false: every token sees the next one",
    ("profile", "nowhere"): "there is no config file or preset named 'nowhere'",
    ("profile", "tiny", "--set", "parallel.tp=3"): "tp=3 does not divide",
    ("profile", "tiny", "--trace", "no/trace.json"): "there is no folder 'no'",
    ("shard", "nowhere", "new"): "there is no folder nowhere",
    ("shard", "hf", "new", "--dtype", "fp3"): "there is no dtype 'fp3'",
    ("shard", "hf", "new", "--layout", "qp=2"): "'qp=2' is not a part of a layout",
    ("shard", "hf", "new", "--layout", "tp=20000000"): "20000000 should be at most 1048576",
    ("shard", "hf", "new", "--layout", "tp=2", "--to", "hf"): "--layout tp=2 with --to hf",
    ("shard", "hf", "passages/new"): "passages is a file, and passages/new would be inside of it",
    ("shard", "hf", "sees-all"): "sees-all exists",
    ("shard", "verify", "nowhere", "neither"): "there is no folder neither",
    ("shard", "inspect", "nowhere"): "there is no folder nowhere",
    ("preprocess", "nowhere", "--output", "x", "--tokenizer", "bytes"): "nowhere",
    ("preprocess", "text.txt", "--output", "x", "--tokenizer", "gone/"): "gone",
    ("plan", "tiny", "--gpus", "0"): "--gpus: 0 should be at least 1",
    ("plan", "tiny", "--gpus", "1", "--gpus", "2"): "--gpus: it is given 2 times",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What every command line of REFUSED answers, run one after another in one process."""
    folder = tmp_path_factory.mktemp("refused")
    for name, table in (("hf", LLAMA), ("t5", LLAMA | {"model_type": "t5"})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(table))
    ours = dump_toml(run_config(GPT | {"causal": False}))
    for path in (folder / "sees-all", folder / "old" / "checkpoints" / "step-00000002"):
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
        (path / "config.toml").write_text(ours)
    write_dataset(folder / "data", documents(vocab=78), token_dtype(78))
    (folder / "data.json").write_text('{"max_token_id": 77}')
    for name in ("passages", "text.txt"):
        (folder / name).write_text("text\n")
    lines = "".join(json.dumps(words) + "\n" for words in REFUSED)
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=folder)
    return dict(zip(REFUSED, map(json.loads, done.stdout.splitlines()), strict=True))


def test_what_is_wrong_is_told_without_torch(answers):
    for words, (code, torch, said) in answers.items():
        where = f"mtcli {' '.join(words)}: {said}"
        assert (code, torch) == (2, False), where
        assert REFUSED[words] in said and "hint: " in said, where


def test_a_layout_that_evaluation_has_not_is_one_problem(answers):
    said = answers[("eval", "hf", "--nproc", "2", *TASK, "--set", "parallel.cp=2")][2]
    assert "seq_len" not in said and said.count("error: ") == 1
    assert "the nearest legal layouts on 2 ranks" in said


def test_a_run_without_data_is_told_of_its_layout_too(answers):
    said = answers[("train", "tiny", "--set", "parallel.tp=3")][2]
    assert "tp=3 does not divide num_kv_heads=4" in said and DATALESS in said


def test_no_workers_are_asked_for_in_a_rank_that_another_launcher_started(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv(LAUNCHED, raising=False)
    with pytest.raises(MtcliError, match="2 workers are asked for in one of 4 ranks"):
        num_ranks(2)
    assert num_ranks(1) == 4
    monkeypatch.setenv(LAUNCHED, "1")  # ours, whose workers have its command line
    assert num_ranks(2) == 4
