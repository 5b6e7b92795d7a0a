"""`train.new_tokens` as a user types it: train, resume, export, generate, plan and adapters."""

import json

import pytest
from chats import fine_tune, save_model, talks, write_lines
from command_line import mtcli

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import load_config

NEW = ["<|call|>", "<|end call|>"]
FIRST = 259


def spoken():
    for line in talks(12):
        line["messages"][-1]["content"] += "<|call|>sum<|end call|>"
        yield line


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    save_model(folder / "llama", vocab_size=260)
    write_lines(folder / "talks.jsonl", spoken())
    (folder / "new.txt").write_text("<|call|>\n<|end call|>\n\n")
    return folder


def tune(home, *words, output="run", **more):
    data = {"data.train": "talks.jsonl", "train.epochs": 2, "train.output": output}
    return fine_tune(home, *words, **data | {"train.new_tokens": "new.txt"} | more)


@pytest.fixture(scope="module")
def run(home):
    done = tune(home, "llama", "--nproc", "2", **{"parallel.tp": 2, "optimizer.lr": 1e-2})
    assert done.returncode == 0, done.stderr
    return done


def test_a_run_says_the_ids_and_its_config_has_the_texts_and_the_grown_table(home, run):
    note = "note: 2 new tokens have the ids 259 to 260; their rows, of 261, begin as the mean"
    assert f"{note} of the 259 before\n" in run.stderr
    config = load_config(str(home / "run"))
    assert config.train.new_tokens == (*NEW,) and config.model.vocab_size == 261
    told = mtcli("data", "explain", "run", "--step", "1", "--json", "-", folder=home)
    assert told.returncode == 0, told.stderr


def test_the_exported_folder_has_the_tokens_and_the_logits_of_the_run(home, run):
    done = mtcli("shard", "run", "out", "--to", "hf", "--verify", folder=home)
    assert done.returncode == 0, done.stderr
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import mtcli as library

    tokenizer = AutoTokenizer.from_pretrained(home / "out")
    assert len(tokenizer) == 261 and tokenizer.convert_tokens_to_ids(NEW) == [FIRST, FIRST + 1]
    before = AutoTokenizer.from_pretrained(home / "llama")
    assert tokenizer.chat_template == before.chat_template
    model = AutoModelForCausalLM.from_pretrained(home / "out")
    assert model.config.vocab_size == 261
    messages = next(spoken())["messages"]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt")["input_ids"]
    assert {FIRST, FIRST + 1} <= {*ids[0].tolist()}
    with torch.no_grad():
        theirs = model(ids).logits
    ours = library.open(str(home / "run")).logits(ids.tolist())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(ids[0], skip_special_tokens=True).count("<|call|>") == 1


def test_generate_reads_and_prints_new_tokens(home, run):
    biased = ("--logit-bias", f"{FIRST}=100", "--max-tokens", "2")
    done = mtcli("generate", "run", "--prompt", "2<|call|>", *biased, folder=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("<|call|><|call|>")


def test_a_resumed_run_keeps_its_tokens_and_others_are_refused_with_both(home, run):
    done = fine_tune(home, "run", "--resume", **{"train.epochs": 3, "parallel.tp": 1})
    assert done.returncode == 0, done.stderr
    words = {"train.new_tokens": '["<|call|>"]', "train.epochs": 4}
    done = tune(home, "llama", "--resume", **words)
    assert done.returncode == 2
    assert f"it is ('<|call|>',), and the run was trained with {(*NEW,)}" in done.stderr


def test_tokens_that_are_there_a_small_vocabulary_and_no_file_are_refused(home):
    done = tune(home, "llama", output="no", **{"train.new_tokens": '["<|call|>", "<|im_end|>"]'})
    assert done.returncode == 2
    said = "train.new_tokens: the tokenizer of 259 ids has '<|im_end|>' (id 257) already"
    assert done.stderr.count(said) == 1
    done = tune(home, "llama", output="no", **{"model.vocab_size": 260})
    assert done.returncode == 2
    said = "model.vocab_size: vocab_size=260, and the tokenizer has 261 ids with train.new_tokens"
    assert said in done.stderr and "leave model.vocab_size out, or 261 or more" in done.stderr
    done = tune(home, "llama", output="no", **{"train.new_tokens": "none.txt"})
    assert done.returncode == 2
    assert "train.new_tokens: 'none.txt' is no file of texts" in done.stderr
    assert not (home / "no").exists()


def test_a_dry_run_says_it_and_plan_counts_the_grown_table(home):
    done = tune(home, "llama", "--dry-run", output="dry")
    assert done.returncode == 0 and not (home / "dry").exists(), done.stderr
    assert "ids 259 to 260" in done.stderr
    counts = []
    for texts in ("[]", json.dumps(NEW)):
        planned = mtcli("plan", "llama", "--set", f"train.new_tokens={texts}", "--json", "-",
                        folder=home)  # fmt: skip
        assert planned.returncode == 0, planned.stderr
        counts.append(json.loads(planned.stdout)["parameters"]["total"])
    assert counts[1] - counts[0] == 32 * 2, "a row of the embedding, and one of the head"


def test_text_is_tokenized_with_the_new_tokens(home):
    (home / "calls.txt").write_text("One <|call|>sum<|end call|> and another.\n" * 40)
    made = mtcli("preprocess", "new.txt", "--output", "old", "--tokenizer", "llama", folder=home)
    assert made.returncode == 0, made.stderr
    blend = json.dumps(["0.1", "old", "0.9", "calls.txt"])
    words = {"data.train": blend, "train.epochs": 0, "train.steps": 2, "batch.seq_len": 32}
    done = tune(home, "llama", output="text", **words, **{"data.split": "1,0,0"})
    assert done.returncode == 0, done.stderr
    folder = open_checkpoint(home / "text").tokenizer_folder
    assert "<|end call|>" in (folder / "tokenizer.json").read_text()
    (facts,) = (path for path in (home / "calls.txt.tokenized").glob("*.json"))
    assert json.loads(facts.read_text())["max_token_id"] == FIRST + 1


LORA = {"lora.rank": 4, "optimizer.lr": 1e-2}
WHOLE = {"lora.modules_to_save": '["embed_tokens", "lm_head"]'}


def test_adapters_train_new_rows_in_tables_that_are_trained_whole(home):
    done = tune(home, "llama", output="lora", **LORA)
    assert done.returncode == 2
    said = "new_tokens with frozen embedding.weight, head.weight, which trains no row of them"
    assert said in done.stderr and "modules_to_save = ['embed_tokens', 'lm_head']" in done.stderr
    done = tune(home, "llama", "--nproc", "2", output="lora", **LORA, **WHOLE, **{"parallel.pp": 2})
    assert done.returncode == 0, done.stderr
    again = fine_tune(home, "lora", "--resume", **{"train.epochs": 3, "parallel.pp": 1})
    assert again.returncode == 0, again.stderr
    done = mtcli("shard", "lora", "merged", "--to", "hf", "--merge-lora", "--verify", folder=home)
    assert done.returncode == 0, done.stderr
    merged, own = open_checkpoint(home / "merged"), open_checkpoint(home / "lora").adapters.own
    for name in ("embedding.weight", "head.weight"):
        table = merged.read(name)
        assert (table == own.read(name)).all() and table.shape == (261, 32)
        assert (table[FIRST] != table[FIRST + 1]).any(), "they were trained"
    done = mtcli("shard", "lora", "peft", "--to", "peft", folder=home)
    assert done.returncode == 2 and "has 2 new tokens, whose rows its base lacks" in done.stderr
    words = {"train.new_tokens": '["<x>"]', **LORA, **WHOLE}
    done = tune(home, "lora", "--init", "lora", output="more", **words)
    assert done.returncode == 2
    assert "lora holds adapters, whose base has no rows for new tokens" in done.stderr


def test_a_run_s_weights_take_further_tokens(home, run):
    done = tune(home, "--init", "run", output="more", **{"train.new_tokens": '["<|third|>"]'})
    assert done.returncode == 0, done.stderr
    assert "the ids 261 to 261; their rows, of 262, begin as the mean of the 261 " in done.stderr
    assert open_checkpoint(home / "more").shape("head.weight") == (262, 32)
