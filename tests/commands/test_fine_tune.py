"""`mtcli train` on a Hugging Face folder and a JSONL, as a newcomer types it."""

import json

import pytest
from chats import REWRITING, fine_tune, save_model, sums, talks, tokenizer, write_lines
from command_line import mtcli
from marks import slow
from tiny import metrics

from mtcli.core.checkpoint.fine_tuning import weights_note
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import load_config

NESTED = "".join(f"{{% for i{n} in range(9) %}}" for n in range(25)) + "{% endfor %}" * 25


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fine-tune")
    save_model(folder / "llama")
    write_lines(folder / "my.jsonl", sums(40))
    write_lines(folder / "talks.jsonl", talks(12))
    return folder


@pytest.fixture(scope="module")
def run(home):
    data = {"data.train": "my.jsonl", "train.output": "run", "train.epochs": 3}
    done = fine_tune(home, "llama", **data, **{"optimizer.lr": 3e-3, "train.save_every": 3})
    assert done.returncode == 0, done.stderr
    return home / "run", done


def test_a_hugging_face_folder_is_a_config(run):
    folder, done = run
    assert "data   40 examples, " in done.stdout and "steps an epoch" in done.stdout
    config = load_config(str(folder))
    assert config.train.init == "llama" and config.data.format == "conversations"
    assert config.data.document_mask and config.data.document_positions
    steps = metrics(folder)
    assert len(steps) == config.train.steps and config.train.steps % 3 == 0
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


@slow("two ranks of a run, 2 s")
def test_init_without_config_is_the_same_run(home, run):
    words = ("--init", "llama", "--nproc", "2")
    data = {"data.train": '["my.jsonl"]', "train.output": "again", "train.epochs": 3}
    done = fine_tune(home, *words, **data, **{"optimizer.lr": 3e-3, "parallel.tp": 2})
    assert done.returncode == 0, done.stderr
    ours, theirs = metrics(home / "again"), metrics(run[0])
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_the_exported_folder_keeps_template_and_configs_and_transformers_has_learned(home, run):
    done = mtcli("shard", "run", "out", "--to", "hf", folder=home)
    assert done.returncode == 0, done.stderr
    for name in ("chat_template.jinja", "config.json", "generation_config.json"):
        assert (home / "out" / name).read_bytes() == (home / "llama" / name).read_bytes()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(home / "out")
    model = AutoModelForCausalLM.from_pretrained(home / "out")
    before = AutoModelForCausalLM.from_pretrained(home / "llama")
    line = next(sums(1))
    messages = [{"role": "user", "content": line["prompt"]}]
    messages.append({"role": "assistant", "content": line["completion"]})
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    after, first = (m(**ids, labels=ids["input_ids"]).loss.item() for m in (model, before))
    assert after < 0.9 * first


@slow("two more runs")
def test_a_run_goes_on_with_more_epochs(home, run):
    done = fine_tune(home, "run", "--resume", **{"train.epochs": 4, "train.output": "run"})
    assert done.returncode == 0, done.stderr
    before = load_config(str(home / "run")).train
    assert (before.epochs, before.steps % 4) == (4.0, 0)
    done = fine_tune(home, "run", "--resume", **{"train.steps": before.steps + 1})
    assert done.returncode == 0, done.stderr
    after = load_config(str(home / "run")).train
    assert (after.epochs, after.steps) == (0.0, before.steps + 1)


def test_weights_of_ours_are_trained_on_without_a_config(home, run):
    data = {"data.train": "talks.jsonl", "train.output": "more"}
    done = fine_tune(home, "--init", "run", **data)
    assert done.returncode == 0, done.stderr
    assert "run/checkpoints/step-" in done.stdout.split("from", 1)[1].splitlines()[0]
    assert (open_checkpoint(home / "more").tokenizer_folder / "chat_template.jinja").is_file()


def test_a_run_as_config_says_that_its_weights_are_left_out_unless_it_is_resumed(home, run):
    data = {"data.train": "talks.jsonl", "train.output": "anew", "data.tokenizer": "llama"}
    done = fine_tune(home, "run", "--dry-run", **data)
    assert done.returncode == 0 and "not its weights: the run begins from llama" in done.stderr
    table = (home / "run" / "config.toml").read_text().replace('init = "llama"', "")
    (home / "bare").mkdir()
    (home / "bare" / "config.toml").write_text(table)
    assert not weights_note(str(home / "bare"), None), "it has saved nothing"
    (home / "bare" / "checkpoints").symlink_to(home / "run" / "checkpoints")
    note = weights_note(str(home / "bare"), None)
    assert "the run begins with new weights" in note and f"`--init {home / 'bare'}`" in note
    assert "begins from llama" in weights_note(str(home / "bare"), "llama")
    assert not weights_note(str(home / "bare"), str(home / "bare"))
    assert not weights_note("tiny", None) and not weights_note(None, "llama")
    done = fine_tune(home, "bare", **data)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: CONFIG bare gives its config, not its weights: the run ") == 1
    done = fine_tune(home, "anew", "--resume", **{"train.epochs": 2})
    assert done.returncode == 0 and "note: CONFIG" not in done.stderr, done.stderr


def test_the_lines_of_a_step_are_read_by_the_tokenizer_of_the_weights(home, run):
    told = mtcli("data", "explain", "run", "--step", "1", "--json", "-", folder=home)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)["documents"]
    lines, theirs = list(sums(40)), tokenizer()
    for row in found:
        line = lines[row["document"] - 1]
        messages = [{"role": "user", "content": line["prompt"]}]
        messages.append({"role": "assistant", "content": line["completion"]})
        ids = theirs.apply_chat_template(messages)["input_ids"]
        assert (row["turn"], row["tokens"]) == (1, len(ids))
    assert len({row["document"] for row in found}) == len(found) > 4


def test_talks_that_a_template_shows_otherwise_later_are_unrolled_and_explained(home, tmp_path):
    tokenizer(REWRITING["DeepSeek-R1"]).save_pretrained(tmp_path)
    data = {"data.train": "talks.jsonl", "data.tokenizer": tmp_path, "train.output": "unrolled"}
    done = fine_tune(home, "llama", **data)
    assert done.returncode == 0, done.stderr
    assert "data   18 examples of 12 conversations, " in done.stdout
    assert "turns  6 conversations are 12 examples, one a turn, as the chat" in done.stdout
    told = mtcli("data", "explain", "unrolled", "--step", "1", "--json", "-", folder=home)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)["documents"]
    lines = list(talks(12))
    for row in found:
        messages = lines[row["document"] - 1]["messages"]
        assert messages[row["turn"]]["role"] == "assistant"
    assert len({(row["document"], row["turn"]) for row in found}) == len(found) > 0
    table = mtcli("data", "explain", "unrolled", "--step", "1", folder=home).stdout
    assert table.split()[:7] == ["sample", "source", "document", "id", "turn", "offset", "tokens"]
    last = {"data.loss_on": "last", "train.output": "last"}
    done = fine_tune(home, "llama", **data | last)
    assert done.returncode == 0, done.stderr
    assert "data   12 examples, " in done.stdout and "turns " not in done.stdout


def test_a_preset_with_other_weights_is_told_the_command(home):
    done = fine_tune(home, "tiny", "--init", "llama", **{"data.train": "my.jsonl"})
    assert done.returncode == 2
    assert "error: model.hidden_size: hidden_size=256 and llama has 32" in done.stderr
    assert "mtcli train llama --set data.train=..." in done.stderr


def test_no_config_and_no_weights_are_told_what_to_give(home):
    done = mtcli("train", "--set", "data.train=my.jsonl", folder=home)
    assert done.returncode == 2
    assert "error: CONFIG: there is no config to train" in done.stderr


def test_weights_that_do_not_tell_their_model_need_a_config(home, tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    done = mtcli("train", "--init", tmp_path, "--set", "data.train=my.jsonl", folder=home)
    assert done.returncode == 2 and "does not tell its model" in done.stderr
    assert f"mtcli train CONFIG --init {tmp_path}" in done.stderr


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED, "chat_template.jinja: its chat template is no Jinja template: too many"),
        ("{{ '%2000000000d' % 1 }}", "my.jsonl:1: {}/chat_template.jinja takes over 512 MiB"),
    ],
)
def test_a_chat_template_that_would_never_end_is_refused_by_name(home, tmp_path, template, said):
    tokenizer(template).save_pretrained(tmp_path)
    data = {"data.train": "my.jsonl", "data.tokenizer": tmp_path, "train.output": "never"}
    done = fine_tune(home, "llama", **data)
    assert done.returncode == 2 and said.format(tmp_path) in done.stderr
    assert "\nhint: " in done.stderr and "Traceback" not in done.stderr


def test_bad_lines_are_told_at_once_or_left_out_and_counted(home):
    bad = [{"prompt": "a"}, next(sums(1)), {"messages": [{"role": "boss", "content": "b"}]}]
    bad.append({"prompt": "long " * 99, "completion": "x"})
    write_lines(home / "bad.jsonl", bad)
    data = {"data.train": "bad.jsonl", "train.output": "bad"}
    done = fine_tune(home, "llama", **data)
    assert done.returncode == 2 and not (home / "bad").exists()
    for said in (
        "bad.jsonl:1: it has no completion",
        "bad.jsonl:3: message 0 has the unknown role 'boss'",
        "bad.jsonl:4: it has ",
        "batch.seq_len=128 is the context",
    ):
        assert said in done.stderr
    done = fine_tune(home, "llama", "--skip-bad", **data)
    assert done.returncode == 0, done.stderr
    assert "1 longer than the context, bad.jsonl:4" in done.stdout
    assert "1 no completion, bad.jsonl:1; 1 unknown role, bad.jsonl:3" in done.stdout


def test_weights_of_a_blend_and_epochs_of_tokens_are_refused(home):
    blend = {"data.train": '["0.5", "my.jsonl"]'}
    done = fine_tune(home, "llama", **blend, **{"data.format": "tokens"})
    assert done.returncode == 2
    done = fine_tune(home, "llama", **blend, **{"data.format": "conversations"})
    assert "error: data.train: conversations have no weights" in done.stderr
    done = fine_tune(home, "llama", **{"data.train": "data", "train.epochs": 2})
    assert "epochs=2.0 with format='tokens'" in done.stderr
    done = fine_tune(home, "llama", **{"data.train": "data", "data.loss_on": "last"})
    assert "loss_on='last' with format='tokens', which has no chats" in done.stderr


def test_a_hugging_face_folder_can_be_planned(home):
    done = mtcli("plan", "llama", "--set", "data.train=my.jsonl", folder=home)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
