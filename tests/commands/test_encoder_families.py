"""Encoders of Hugging Face from the command line: in with their tokenizers, trained on masked
tokens of their own text, and out as folders that transformers loads."""

import json

import pytest
from command_line import mtcli
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = ("The cat sat on the mat.", "A dog saw it run away.", "They ate and slept at home.")
TEXT = "\n\n".join(" ".join(SENTENCES[at % 3 :] + SENTENCES[: at % 2]) for at in range(60)) + "\n"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
ROLES = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
NAMES = {"roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>")}  # ids 0, 1, 2, 3 and the last
NAMES["modernbert"] = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
MORE = {
    "roberta": {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    "modernbert": {"max_position_embeddings": 64, "local_attention": 8, "pad_token_id": 1},
}


def run(home, *words, code=0, **settings):
    sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    done = mtcli(*words, *sets, folder=home)
    assert done.returncode == code, done.stderr
    return done


def write_tokenizer(folder, names):
    """Writes a byte-level BPE with special tokens of these names; returns its number of ids."""
    *first, mask = names
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([mask])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(zip(ROLES, names, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


@pytest.fixture(params=NAMES)
def home(request, tmp_path):
    """A folder with text, and a family's random model with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM

    (tmp_path / "theirs").mkdir()
    size = write_tokenizer(tmp_path / "theirs", NAMES[request.param])
    torch.manual_seed(3)
    config = AutoConfig.for_model(request.param, **SIZES, **MORE[request.param], vocab_size=size)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def assert_adapters(home):
    """peft has the logits of adapters whose modules are the family's; others are merged alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForMaskedLM

    run(home, "shard", "adapted", "merged", "--to", "hf", "--merge-lora", "--verify")
    base, merged = (AutoModelForMaskedLM.from_pretrained(home / x) for x in ("theirs", "merged"))
    if base.config.model_type == "roberta":
        done = run(home, "shard", "adapted", "peft", "--to", "peft", code=2)
        assert "roberta has 3 modules for c_attn, whose adapters are one" in done.stderr
        assert "hint: --merge-lora" in done.stderr
        return
    run(home, "shard", "adapted", "peft", "--to", "peft")
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        expected, before = merged.eval()(ids).logits, base.eval()(ids).logits
        found = PeftModel.from_pretrained(base, home / "peft").eval()(ids).logits
    assert (expected - before).abs().max() > 1e-3
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_folder_comes_in_is_trained_on_masked_tokens_and_goes_out_complete(home):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    run(home, "shard", "theirs", "ours", "--verify", "--layout", "tp=2")
    words = ("text.txt", "--split-on", "blank", "--sentences", "--tokenizer", "theirs")
    run(home, "preprocess", *words, "--output", "text")
    settings = {"data.train": "text", "data.split": "1,0,0", "train.steps": 12, "parallel.tp": 2}
    settings |= {"batch.seq_len": 64, "batch.micro_batch_size": 2, "batch.global_batch_size": 4}
    settings |= {"optimizer.lr": 1e-2, "optimizer.warmup_steps": 1, "train.precision": "fp32"}
    settings |= {"model.dropout": 0.0, "model.attention_dropout": 0.0, "train.output": "run"}
    run(home, "train", "--init", "ours", "--nproc", 2, **settings)
    rows = map(json.loads, (home / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 1.0
    adapted = settings | {"lora.rank": 2, "train.steps": 3, "train.output": "adapted"}
    run(home, "train", "--init", "ours", "--nproc", 2, **adapted)
    assert_adapters(home)
    run(home, "shard", "run", "again", "--layout", "tp=4,pp=2", "--verify")
    run(home, "shard", "again", "back", "--to", "hf", "--verify")
    model, told = AutoModelForMaskedLM.from_pretrained(home / "back", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(home / "back")
    ids = tokenizer("The cat sat on the mat.", return_tensors="pt", add_special_tokens=False)
    assert model.eval()(ids["input_ids"]).logits.isfinite().all()
    found = [
        json.loads(run(home, "eval", one, "--task", "mlm=text", "--json", "-").stdout)["tasks"]
        for one in ("run", "back")
    ]
    assert found[0] == found[1] and found[0]["mlm"]["masked"] > 0


def test_positions_behind_another_padding_id_are_refused(tmp_path):
    (tmp_path / "names").mkdir()
    size = write_tokenizer(tmp_path / "names", NAMES["roberta"])
    (tmp_path / "text.txt").write_text(TEXT)
    run(tmp_path, "preprocess", "text.txt", "--tokenizer", "names", "--output", "text")
    settings = {"model.hidden_size": 32, "model.num_heads": 4, "model.num_layers": 1}
    settings |= {"model.vocab_size": size, "train.steps": 1, "data.train": "text"}
    settings |= {"train.precision": "fp32", "batch.global_batch_size": 16, "data.split": "1,0,0"}
    done = run(
        tmp_path, "train", "roberta-base", code=2, **settings, **{"model.position_offset": 1}
    )
    assert "position_offset=1 with a tokenizer whose padding is id 1" in done.stderr
    assert "hint: model.position_offset = 2" in done.stderr
