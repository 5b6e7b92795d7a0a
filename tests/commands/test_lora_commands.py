"""LoRA from the command line: train on tp=2, resume, evaluate, merge, export, train on peft's."""

import json
import re
import shutil
from math import prod
from pathlib import Path

import pytest
import torch
from chats import fine_tune, save_model, sums, write_lines
from command_line import in_process, mtcli
from indexed_dataset import write_dataset
from marks import slow
from tiny import MOE, documents, metrics, write_run

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, commit, dump_written, write_shards


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "llama")
    write_lines(folder / "my.jsonl", sums(30))
    return folder


def train(home, *words, **settings):
    return fine_tune(home, *words, **{"data.train": "my.jsonl", "optimizer.lr": 1e-2} | settings)


@pytest.fixture(scope="module")
def run(home):
    lora = {"lora.rank": 4, "lora.alpha": 8, "train.output": "run", "train.epochs": 2}
    done = train(home, "llama", "--nproc", "2", **lora, **{"parallel.tp": 2})
    assert done.returncode == 0, done.stderr
    assert "of adapters, of rank 4, are trained" in done.stdout
    return home / "run"


def test_a_run_on_tp_2_is_merged_and_exported_and_peft_gives_its_logits(home, run):
    for words in (("merged", "--to", "hf", "--merge-lora"), ("peft", "--to", "peft")):
        done = mtcli("shard", "run", *words, folder=home)
        assert done.returncode == 0, done.stderr
        assert (home / words[0] / "chat_template.jinja").is_file()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, merged = (AutoModelForCausalLM.from_pretrained(home / n) for n in ("llama", "merged"))
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        before = base(ids).logits
        theirs = PeftModel.from_pretrained(base, home / "peft").eval()(ids).logits
        assert torch.allclose(merged(ids).logits, theirs, atol=1e-4)
    assert (theirs - before).abs().max() > 0.05


def test_a_run_is_resumed_on_another_layout_and_generates(home, run):
    done = train(home, "run", "--resume", "--nproc", "2", **{"parallel.tp": 1, "train.epochs": 3})
    assert done.returncode == 0, done.stderr
    for folder in ("run", "peft"):
        done = mtcli("generate", folder, "--prompt", "12 plus 3?", "--max-tokens", 4, folder=home)
        assert done.returncode == 0, done.stderr


def test_peft_s_folder_is_trained_on(home, run):
    done = train(
        home, "peft", **{"lora.rank": 4, "lora.alpha": 8, "train.output": "more", "train.steps": 1}
    )
    assert done.returncode == 0, done.stderr
    assert metrics(home / "more")[0]["loss"] < metrics(home / "run")[0]["loss"]


def test_another_scale_than_that_of_the_adapters_is_refused(home, run):
    done = train(home, "peft", **{"lora.rank": 4, "train.output": "scaled", "train.steps": 1})
    assert done.returncode == 2 and "are scaled by 8/4" in done.stderr
    assert "hint: --set lora.alpha=8" in done.stderr


def test_a_folder_as_peft_writes_it_is_merged_with_its_base_s_tokenizer(home, run):
    bare = home / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (bare / name).write_bytes((home / "peft" / name).read_bytes())
    done = mtcli("shard", "bare", "from-bare", "--to", "hf", "--merge-lora", folder=home)
    assert done.returncode == 0, done.stderr
    assert (home / "from-bare" / "tokenizer.json").is_file()


def test_what_is_to_be_done_with_adapters_is_asked(home, run):
    done = mtcli("shard", "run", "x", "--to", "hf", folder=home)
    assert done.returncode == 2 and "--merge-lora adds them to its weights" in done.stderr
    done = mtcli("shard", "llama", "x", "--merge-lora", folder=home)
    assert done.returncode == 2 and "llama holds no adapters" in done.stderr
    done = mtcli("shard", "run", "x", "--to", "peft", "--merge-lora", folder=home)
    assert done.returncode == 2 and "which has adapters alone" in done.stderr
    done = train(home, "tiny", **{"lora.rank": 4, "train.output": "none", "model.vocab_size": 300})
    assert done.returncode == 2 and "adapters are trained for weights" in done.stderr


OPENING = {  # what opens a checkpoint, by the words before and behind it
    "eval": (["eval"], ["--task", "lambada=text.jsonl"]),
    "generate": (["generate"], ["--prompt", "12 plus 3?", "--max-tokens", "2"]),
    "inspect": (["shard", "inspect"], []),
    "shard": (["shard"], ["merged", "--to", "hf", "--merge-lora"]),
    "select": (["select", "--data", "data", "--size", "2", "--output", "set", "--model"], []),
}


@pytest.mark.parametrize("kind", ["run", "peft"])
def test_adapters_whose_base_has_moved_are_opened_with_it(home, run, kind, tmp_path, request):
    if not (home / "peft").exists():
        assert mtcli("shard", "run", "peft", "--to", "peft", folder=home).returncode == 0
    shutil.copytree(home / kind, tmp_path / kind)
    config = tmp_path / "peft" / "adapter_config.json"
    if kind == "peft":  # a name of the hub, as peft writes it
        said = json.loads(config.read_text())
        config.write_text(json.dumps(said | {"base_model_name_or_path": "meta/llama"}))
    shutil.move(home / "llama", tmp_path / "moved")
    request.addfinalizer(lambda: shutil.move(tmp_path / "moved", home / "llama"))
    save_model(tmp_path / "other", initializer_range=0.1)
    write_lines(tmp_path / "text.jsonl", [{"text": "12 plus 3 is 15"}])
    write_dataset(tmp_path / "data", documents(), "uint16")
    for name, (before, behind) in OPENING.items():
        words = [*before, kind, *behind]
        done = in_process(*words, folder=tmp_path)
        assert done.returncode == 2 and "--base FOLDER" in done.stderr, (name, done.stderr)
        done = in_process(*words, "--base", "nowhere", folder=tmp_path)
        assert done.returncode == 2 and "there is no folder nowhere" in done.stderr, name
        if kind == "run":  # peft's format has no hash
            done = in_process(*words, "--base", "other", folder=tmp_path)
            found = re.search(r"of other with the hash (\w+), and it has now (\w+)", done.stderr)
            assert done.returncode == 2 and found and found[1] != found[2], (name, done.stderr)
            assert "--base FOLDER names these" in done.stderr
        done = in_process(*words, "--base", "moved", folder=tmp_path)
        assert done.returncode == 0, (name, done.stderr)
        words = [*before, "moved", *behind, "--base", "moved"]
        done = in_process(*words, folder=tmp_path)
        assert done.returncode == 2, name
        assert "--base: moved holds no adapters\n\nhint: leave --base out" in done.stderr, name
    done = in_process("shard", "verify", kind, "merged", "--base", "moved", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ["select", "--data", "data", "--size", "2", "--output", "set", "--method", "random"]
    done = in_process(*words, "--base", "moved", folder=tmp_path)
    assert done.returncode == 2 and "--base: a base is of a model's adapters" in done.stderr


@pytest.fixture
def moved(home, run, tmp_path, request):
    """Moves the weights that adapters are for to `moved`, in a folder with the run and peft's."""
    if not (home / "peft").exists():
        assert mtcli("shard", "run", "peft", "--to", "peft", folder=home).returncode == 0
    for name in ("run", "peft"):
        shutil.copytree(home / name, tmp_path / name)
    shutil.copy(home / "my.jsonl", tmp_path)
    config = tmp_path / "peft" / "adapter_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"base_model_name_or_path": "meta/llama"}))
    shutil.move(home / "llama", tmp_path / "moved")
    request.addfinalizer(lambda: shutil.move(tmp_path / "moved", home / "llama"))
    return tmp_path


def test_a_step_of_adapters_is_explained_without_their_base(home, run, moved):
    words = ("data", "explain", "run", "--step", "1", "--json", "-")
    done = in_process(*words, folder=moved)
    assert done.returncode == 0, done.stderr
    shutil.move(moved / "moved", home / "llama")
    here = in_process(*words, folder=home)
    shutil.move(home / "llama", moved / "moved")
    documents = json.loads(done.stdout)["documents"]
    assert documents and documents == json.loads(here.stdout)["documents"]


SHORT = ["--set", "data.train=my.jsonl", "--set", "batch.seq_len=128", "--set", "train.steps=1"]
SHORT += ["--set", "batch.global_batch_size=4"]
STARTING = {  # what starts from adapters, by the words before them
    "full": ["train", *SHORT, "--set", "train.output=new", "--init"],
    "adapters": ["train", *SHORT, "--set", "lora.rank=4", "--set", "lora.alpha=8", "--init"],
    "array": ["sweep", "--output", "array", "--vary", "optimizer.lr=1e-3,2e-3", *SHORT, "--init"],
    "plan": ["plan", *SHORT],
    "profile": ["profile", "--steps", "1", "--warmup", "1", *SHORT],
}


@pytest.mark.parametrize(  # to plan and profile a run's folder is a run, and not its weights
    ("name", "kind"),
    [*((n, "peft") for n in STARTING), *((n, "run") for n in STARTING if n[0] != "p")],
)
def test_what_starts_from_adapters_takes_their_base_where_it_has_moved(moved, name, kind):
    words = [*STARTING[name], kind]
    done = in_process(*words, folder=moved)
    assert done.returncode == 2 and "--base FOLDER" in done.stderr, done.stderr
    done = in_process(*words, "--base", "nowhere", folder=moved)
    assert done.returncode == 2 and "there is no folder nowhere" in done.stderr, done.stderr
    done = in_process(*words, "--base", "moved", folder=moved)
    assert done.returncode == 0, done.stderr
    done = in_process(*STARTING[name], "moved", "--base", "moved", folder=moved)
    assert done.returncode == 2 and "--base: moved holds no adapters" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["train", "sweep", "plan", "profile"])
def test_a_base_without_adapters_that_a_run_starts_from_is_refused(home, name, tmp_path):
    write_run(tmp_path)
    words = ["--output", "out", "--vary", "optimizer.lr=1,2"] if name == "sweep" else []
    done = in_process(name, "run.toml", *words, "--base", "x", folder=tmp_path)
    assert done.returncode == 2 and "--base: a base is of adapters" in done.stderr, done.stderr
    write_run(tmp_path, train={"init": str(home / "llama")})
    done = in_process(name, "run.toml", *words, "--base", "x", folder=tmp_path)
    assert done.returncode == 2 and "llama holds no adapters" in done.stderr, done.stderr


def test_what_was_trained_from_adapters_of_a_moved_base_is_opened_and_resumed(moved):
    words = [*STARTING["adapters"], "peft", "--set", "train.output=new", "--base", "moved"]
    done = in_process(*words, folder=moved)
    assert done.returncode == 0, done.stderr
    more = ["--resume", "--set", "train.steps=2"]
    for line in (["shard", "inspect", "new"], ["train", "new", *more], ["profile", "new"]):
        done = in_process(*line, folder=moved)
        assert done.returncode == 0, done.stderr
    shutil.copytree(moved / "moved", moved / "again")
    shutil.move(moved / "moved", moved / "away")
    more = ["train", "new", "--resume", "--set", "train.steps=3"]
    done = in_process(*more, folder=moved)
    further = in_process(*more, "--base", "again", folder=moved)
    shutil.move(moved / "away", moved / "moved")
    assert done.returncode == 2 and "--base: there is no folder moved" in done.stderr, done.stderr
    assert further.returncode == 0, further.stderr
    assert metrics(moved / "new")[-1]["step"] == 3


@pytest.mark.parametrize("name", ["train", "sweep"])
def test_the_hint_of_a_moved_base_resumes_adapters(home, name, tmp_path):
    shutil.copytree(home / "llama", tmp_path / "llama")
    write_dataset(tmp_path / "data", documents(), "uint16")
    words = ["--set", "data.train=data", "--set", "batch.global_batch_size=4"]
    words += ["--set", "batch.seq_len=8", "--set", "lora.rank=2", "--set", "train.steps=1"]
    if name == "sweep":
        words += ["--output", "runs", "--vary", "optimizer.lr=1e-3,2e-3"]
    done = in_process(name, "llama", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "llama").rename(tmp_path / "moved")
    (run, *_) = sorted((tmp_path / "runs").glob("*/config.toml"))
    words = [name, str(run.parent), *words, "--resume"]
    if name == "sweep":
        done = in_process(*words, folder=tmp_path)
        assert done.returncode == 0, "all have ended" + done.stderr
    words[words.index("train.steps=1")] = "train.steps=2"
    done = in_process(*words, folder=tmp_path)
    flag = re.search(r"hint: name the folder that it has moved to: (--\w+) FOLDER", done.stderr)
    assert done.returncode == 2 and flag, done.stderr
    done = in_process(*words, flag[1], "moved", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@slow("two runs and seven conversions, 3 s")
def test_verify_compares_two_runs_adapters_and_their_optimizer_state(home, run):
    lora = {"lora.rank": 4, "lora.alpha": 8, "train.epochs": 2}
    for name, seed in (("twin", 1234), ("other", 7)):
        done = train(home, "llama", **lora, **{"train.output": name, "seed": seed})
        assert done.returncode == 0, done.stderr

    def verified(*words):
        done = mtcli("shard", "verify", *words, "--json", "-", folder=home)
        return done, json.loads(done.stdout)

    own = open_checkpoint(home / "twin").adapters.own
    kinds = sorted({name.partition("/")[0] for name in own.names() if name.startswith("optimizer")})
    done, same = verified("twin", "twin", "--verify")
    assert done.returncode == 0, done.stderr
    assert len(kinds) > 1 and same["optimizer"] == "the same"
    weights = open_checkpoint(home / "llama").names()
    assert same["tensors_equal"] == len(own.names()) + len(weights)
    tensors = {name: own.read(name) for name in own.names()}
    next(tensors[name] for name in tensors if name.startswith(f"{kinds[0]}/")).view(-1)[0] += 1.0
    write_again(own, tensors, home / "changed")
    done, told = verified("twin", "changed")
    (problem,) = told["problems"]
    assert done.returncode == 1 and f": {kinds[0]}/" in problem["message"], problem
    assert "differs in 1 of" in problem["message"]
    done, told = verified("twin", "other")
    assert done.returncode == 1
    merged = mtcli("shard", "twin", "twin-merged", "--to", "mtcli", "--merge-lora", folder=home)
    assert f"leaving out {', '.join(kinds)}, since it belongs to the adapters" in merged.stderr
    done, told = verified("twin", "twin-merged")
    only = f"not compared: only {own.folder.relative_to(home)} has {', '.join(kinds)}"
    assert told["optimizer"] == only
    source = open_checkpoint(home / "twin-merged")
    tensors = {name: source.read(name) for name in source.names()}
    state = {"optimizer.exp_avg/final_norm.weight": torch.zeros(4)}
    write_again(source, tensors | state, home / "of-weights")
    done, told = verified("twin", "of-weights")
    assert told["optimizer"] == f"not compared: in {own.folder.relative_to(home)} it is of adapters"
    assert mtcli("shard", "twin", "twin-peft", "--to", "peft", folder=home).returncode == 0
    done, told = verified("twin", "twin-peft")
    assert (done.returncode, told["optimizer"]) == (0, only)
    inspected = json.loads(mtcli("shard", "inspect", "twin", "--json", "-", folder=home).stdout)
    assert inspected["optimizer"] == kinds
    assert inspected["tensors"].keys() == set(own.names()), "what its folder holds"
    assert list(inspected["files"]) == ["rank-00000.safetensors"]
    adapters, sizes = inspected["adapters"], [t["shape"] for t in inspected["tensors"].values()]
    assert adapters["rank"] == 4 and Path(adapters["base"]).parts[0] == "llama"
    assert 3 * adapters["parameters"] == sum(map(prod, sizes)), "each with two moments"


def write_again(source, tensors, folder):
    """Writes a checkpoint like `source`, with these tensors, as one rank's."""
    folder.mkdir()
    shards = [Shard(n, t, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors.items()]
    written = dump_written(write_shards(folder, 0, shards))
    about = {"step": source.step, "world": 1, "extra": source.extra}
    commit(folder, written, about, (source.folder / "config.toml").read_text(), {})


def test_the_plan_knows_that_frozen_weights_have_no_gradients(home):
    plans = []
    for rank in (0, 4):
        words = ("plan", "llama", "--set", f"lora.rank={rank}", "--json", "-")
        plans.append(json.loads(mtcli(*words, folder=home).stdout)["memory_bytes"])
    full, lora = plans
    assert lora["gradients"] < full["gradients"] / 4
    assert full["weights"] < lora["weights"] < 1.5 * full["weights"]


def biases(folder):
    checkpoint = open_checkpoint(folder)
    return {n: checkpoint.read(n).tolist() for n in checkpoint.names() if n.endswith("router.bias")}


def test_a_mixture_s_router_biases_come_with_its_weights_and_stay_as_they_are(tmp_path):
    model = {"aux_loss_coeff": 0.0, "router_bias_update_rate": 0.01}
    write_run(tmp_path, model=MOE | model, train={"steps": 2})
    assert in_process("train", "run.toml", folder=tmp_path).returncode == 0
    before = biases(tmp_path / "run")
    assert len(before) == 2 and any(before["blocks.0.mlp.router.bias"])
    data = ["--set", f"data.train={tmp_path}/data", "--set", "train.steps=2"]
    data += ["--set", "batch.seq_len=8", "--set", "batch.global_batch_size=4"]
    still = ["--set", "model.router_bias_update_rate=0"]
    (tmp_path / "own").mkdir()
    write_run(tmp_path / "own", model=MOE, train={"steps": 2})
    for name, words in {
        "lora": ["--init", "run", "--set", "lora.rank=2", *data],
        "full": ["--init", "run", *still, *data],
        "own config": ["own/run.toml", "--init", "run"],
    }.items():
        done = in_process("train", *words, "--set", f"train.output={name}", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        kept = tmp_path / name
        if name == "lora":
            line = ["shard", "lora", "merged", "--merge-lora", "--layout", "tp=2"]
            assert in_process(*line, folder=tmp_path).returncode == 0
            kept = tmp_path / "merged"
        assert biases(kept) == before, name
        more = ["--resume", "--set", "train.steps=3"]
        done = in_process("train", name, *more, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    write_run(tmp_path / "own", model=MOE, train={"steps": 2, "init": str(tmp_path / "run")})
    done = in_process("train", "own/run.toml", folder=tmp_path)
    assert done.returncode == 2 and "hint: model.router_biases = true" in done.stderr
    words = ["own/run.toml", "--set", "model.router_biases=true", "--set", "train.output=told"]
    assert in_process("train", *words, folder=tmp_path).returncode == 0
    assert biases(tmp_path / "told") == before
    array = ["sweep", "--init", "run", "--output", "array", "--vary", "optimizer.lr=1e-3,3e-3"]
    done = in_process(*array, *still, *data, folder=tmp_path)
    assert done.returncode == 2 and "biases of routers are one model's" in done.stderr
    done = in_process(*array, "--set", "lora.rank=2", *data, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trial = next(path for path in (tmp_path / "array").iterdir() if "0.003" in path.name)
    alone = ["--set", "lora.rank=2", "--set", "optimizer.lr=3e-3", "--set", "train.output=alone"]
    assert in_process("train", "--init", "run", *alone, *data, folder=tmp_path).returncode == 0
    losses = [[row["loss"] for row in metrics(folder)] for folder in (trial, tmp_path / "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
