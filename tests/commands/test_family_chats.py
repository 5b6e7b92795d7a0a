"""From a family's folder with its kind of tokenizer and chat template to a run, generated text and
an evaluation; transformers' losses, text and probabilities are the oracle."""

import json
import math

import pytest
import torch
from command_line import mtcli
from family_tokenizers import KINDS, TEXT, make
from marks import slow_cases
from tiny import metrics

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3,
}  # fmt: skip
TALK = [
    {"role": "user", "content": "  What is 1 + 1? 日本"},
    {"role": "assistant", "content": " It's 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes, 🙂 I am.", "thinking": "so", "reasoning_content": "so"},
]
PROMPT = "The capital of  France is"
SLOW = [kind for kind in KINDS if kind not in ("gemma", "mistral v0.3")]


def save(folder, kind):
    """(model, tokenizer) of transformers, in a folder."""
    import transformers as t

    made = make(folder, kind)
    kinds = {"gemma": t.Gemma3TextConfig, "qwen": t.Qwen3Config, "gpt-oss": t.GptOssConfig}
    ids = {"eos_token_id": made.eos_token_id, "bos_token_id": made.bos_token_id, "pad_token_id": 0}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "gpt-oss" else {}
    config = kinds.get(kind, t.MistralConfig)(**SIZES, **ids, **more, vocab_size=len(made))
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return model, made


@torch.no_grad()
def losses(model, ids):
    """The loss of each token but the first [len(ids) - 1]."""
    logits = model(torch.tensor([ids[:-1]])).logits[0].double()
    return -logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def first_loss(model, tokenizer):
    """The mean loss of the assistant's tokens of TALK, each turn as its prompt's model writes
    it."""
    total, count = 0.0, 0
    for turn in (1, 3):
        prompt = tokenizer.apply_chat_template(
            TALK[:turn], add_generation_prompt=True, tokenize=False
        )
        text = tokenizer.apply_chat_template(TALK[: turn + 1], tokenize=False)
        assert text.startswith(prompt)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        counted = [end > len(prompt) for _, end in encoded.offset_mapping[1:]]
        found = losses(model, encoded.input_ids)[torch.tensor(counted)]
        total, count = total + float(found.sum()), count + len(found)
    return total / count


@pytest.mark.parametrize(
    "kind", ["gemma", "mistral v0.3", *slow_cases("four commands each, 3 s", *SLOW)]
)
def test_a_family_s_tokenizer_goes_through_train_generate_and_eval(tmp_path, kind):
    model, tokenizer = save(tmp_path / "m", kind)
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    settings = {"data.train": "c.jsonl", "batch.seq_len": 512, "batch.global_batch_size": 1}
    settings |= {"train.steps": 1, "train.output": "run", "train.precision": "fp32"}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = mtcli("train", "m", *sets, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(
        first_loss(model, tokenizer), rel=1e-5
    )

    done = mtcli("generate", "m", "--prompt", PROMPT, "--max-tokens", 6, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.rstrip("\n")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=6, do_sample=False)[0]
    whole = whole[: -1 if whole[-1] == tokenizer.eos_token_id else None]
    added = tokenizer.decode(whole).removeprefix(tokenizer.decode(ids[0]))
    printed = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in PROMPT + added)
    assert shown == "".join(printed).rstrip("\n")

    context, last = TEXT.splitlines()[0].rsplit(" ", 1)
    (tmp_path / "l.jsonl").write_text(json.dumps({"text": f"{context} {last}"}) + "\n")
    task = ("--task", "lambada=l.jsonl", "--json", "out.json")
    done = mtcli("eval", "m", *task, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first = len(tokenizer(context).input_ids)
    loss = losses(model, tokenizer(f"{context} {last}").input_ids)[first - 1 :].sum()
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]["lambada"]["perplexity"]
    assert math.log(found) == pytest.approx(float(loss), rel=1e-5)
