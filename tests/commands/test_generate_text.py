"""`mtcli generate` from the command line: transformers' greedy text, on any layout, as JSON."""

import json

import pytest
import torch
from command_line import mtcli

from mtcli.core.data.tokenize import Tokenizer, byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder of a GPT-2 of bytes, transformers' greedy continuation of "The cat")."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 257}
    made = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.4, eos_token_id=256)).eval()
    made.save_pretrained(folder)
    byte_tokenizer().save(folder)
    ids = torch.tensor([list(b"The cat")])
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 256}
    found = made.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    return folder, found.tolist()


def generate(folder, *flags):
    return mtcli("generate", folder, *flags)


@pytest.mark.parametrize("flags", [[], ["--nproc", "2", "--set", "parallel.tp=2"]], ids=str)
def test_greedy_text_is_transformers_on_any_layout_and_for_every_prompt(model, flags):
    folder, greedy = model
    prompts = ["--prompt", "The cat", "--prompt", "one", "--max-tokens", "9", "--json", "-"]
    done = generate(folder, *prompts, *flags)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert (table["ok"], table["problems"], table["checkpoint"]) == (True, [], str(folder))
    assert [one["prompt"] for one in table["generated"]] == ["The cat", "one"]
    expected = bytes(greedy).decode(errors="replace")
    first = {"prompt": "The cat", "text": expected, "num_tokens": 9}
    assert table["generated"][0] == {**first, "finish_reason": "max_tokens"}


@pytest.mark.parametrize("flags", [[], ["--nproc", "2", "--set", "parallel.tp=2"]], ids=str)
def test_every_text_ends_before_its_own_stop_string(model, flags):
    folder, greedy = model
    prompts = ["--prompt", "The cat", "--prompt", "one", "--prompt", "a", "--max-tokens", "9"]
    done = generate(folder, *prompts, "--stop", "iii", "--stop", 'O"', "--json", "-", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["generated"]
    text = bytes(greedy).decode(errors="replace")
    before = text[: text.index('O"')]
    assert found[0] == {
        "prompt": "The cat",
        "text": before,
        "num_tokens": greedy.index(ord("O")) + 2,
        "finish_reason": "stop",
    }
    assert found[1]["text"] and "i" not in found[1]["text"] and found[1]["finish_reason"] == "stop"
    assert (found[2]["text"], found[2]["num_tokens"]) == ("", 3)


def test_a_prompt_gets_the_template_s_first_token_and_text_ends_at_any_end(model, tmp_path):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM

    source, _ = model
    tokenizer = byte_tokenizer()
    special = [("<|endoftext|>", 256)]
    tokenizer.backend.post_processor = TemplateProcessing("<|endoftext|> $A", None, special)
    Tokenizer(tokenizer.backend).save(tmp_path)
    for name in ("config.json", "model.safetensors"):  # as links lead to a cache
        (tmp_path / name).symlink_to(source / name)
    ids = torch.tensor([[256, *b"The cat"]])
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 256}
    made = AutoModelForCausalLM.from_pretrained(source)
    greedy = made.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 8:].tolist()
    end = greedy[-1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, end]}))
    done = generate(tmp_path, "--prompt", "The cat", "--max-tokens", "9", "--json", "-")
    (found,) = json.loads(done.stdout)["generated"]
    kept = greedy[: greedy.index(end)]
    assert (found["num_tokens"], found["text"]) == (len(kept), bytes(kept).decode(errors="replace"))


def test_plain_output_is_the_prompt_and_its_text(model):
    folder, greedy = model
    done = generate(folder, "--prompt", "The cat", "--max-tokens", "9")
    expected = "The cat" + bytes(greedy).decode(errors="replace") + "\n"
    assert done.stdout == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a", "--top-p", "0"], "error: --top-p: top_p=0 keeps no token"),
        (["--prompt", "a", "--set", "parallel.tp=3"], "tp=3 does not divide num_kv_heads=2"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "caf\udce9"], "--prompt: 'caf\\udce9' is not text in this locale"),
        (["--prompt", "a", "--stop", "\udce9"], "--stop: '\\udce9' is not text in this locale"),
        (["--prompt", "a", "--stop", ""], "--stop: '' names nothing"),
    ],
    ids=["top-p", "layout", "temperature", "bytes", "stop", "no stop"],
)
def test_wrong_input_ends_with_2_and_says_what_is_right(model, flags, message):
    done = generate(model[0], *flags)
    errors = done.stderr
    assert done.returncode == 2 and done.stdout == ""
    assert message in errors and "hint: " in errors and "Traceback" not in errors


def test_a_folder_without_a_tokenizer_is_refused(model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model[0] / name)
    done = generate(tmp_path, "--prompt", "a")
    assert done.returncode == 2
    assert f"error: {tmp_path} holds no tokenizer" in done.stderr


def test_all_that_is_wrong_is_told_at_once_and_as_json(model):
    wrong = [
        "--temperature",
        "1",
        "--top-p",
        "0",
        "--set",
        "parallel.tp=3",
        "--set",
        "train.precision=fp7",
    ]
    done = generate(model[0], "--prompt", "a", "--json", "-", *wrong)
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (2, False)
    fields = ["--top-p", "train.precision", "parallel", "parallel.tp", "parallel.tp"]
    assert [problem["field"] for problem in told["problems"]] == fields
    assert all(problem["message"] in done.stderr for problem in told["problems"])


def test_ranks_that_fail_together_answer_once_in_json(model):
    flags = ["--nproc", "2", "--set", "parallel.tp=2", "--json", "-"]
    done = generate(model[0], "--prompt", "x" * 33, *flags)
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["message"] == "the prompt has 33 tokens and the model takes 1 to 32"
