"""train.new_tokens against transformers' add_tokens and resized embeddings, and on every layout."""

import numpy as np
import pytest
import torch
from chats import save_model, talks, write_lines
from ranks import run_ranks
from torch.nn.functional import cross_entropy

from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer
from mtcli.core.config.loading import load_config
from mtcli.core.data.vocabulary import with_vocabulary
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import open_loader
from mtcli.core.training.state import load_weights, starting_point
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
NEW = ["<|call|>", "<|end call|>", "result"]
FIRST = 259  # ids of the tokenizer
UNTIED = {"tie_word_embeddings": False}
MODELS = {  # kind, and sizes; transformers' GPT-2 computes all in float64, its Llama not
    "grown": ("gpt2", {"vocab_size": 259} | UNTIED),
    "spare": ("gpt2", {"vocab_size": 300} | UNTIED),
    "partly": ("gpt2", {"vocab_size": 260}),
    "tied": ("gpt2", {"vocab_size": 259}),
    "llama": ("llama", {"vocab_size": 259}),
}
NAMES = ("transformer.wte.weight", "lm_head.weight")


def lines():
    for number, line in enumerate(talks(24)):
        turn = line["messages"][-1]
        turn["content"] = f"<|call|>{turn['content']}<|end call|>" + "result" * (number % 2)
        yield line


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new")
    for name, (kind, sizes) in MODELS.items():
        save_model(folder / name, kind, **sizes)
    write_lines(folder / "talks.jsonl", lines())
    return folder


def config(home, name, *more, **parallel):
    settings = [f"data.train={home / 'talks.jsonl'}", "batch.seq_len=128", "train.steps=3"]
    settings += ["batch.global_batch_size=4", "optimizer.lr=0.02", "train.device=cpu"]
    settings += [
        "train.precision=fp64",
        "train.matmul=strict",
        "batch.micro_batch_size=2",
        f"train.new_tokens={NEW}",
    ]
    settings += [f"parallel.{key}={value}" for key, value in parallel.items()]
    source, settings = source_of(str(home / name)), [*settings, *more]
    return load_config(source, with_vocabulary(source, settings, starting_tokenizer))


def started(run, runtime=ALONE):
    trainer = Trainer(run, runtime)
    load_weights(trainer, starting_point(run, trainer.groups.world).checkpoint)
    return trainer, open_loader(run, trainer.groups)


def losses_of(runtime, run):
    trainer, loader = started(run, runtime)
    losses = [trainer.train_step(loader).loss for _ in range(run.train.steps)]
    loader.close()
    return gather_values(losses, trainer.groups.world)[0]


def resized(folder):
    """transformers' model and tokenizer with the new tokens, in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert tokenizer.add_tokens(NEW) == 3 and len(tokenizer) == FIRST + 3
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[FIRST : FIRST + 3] = table[:FIRST].mean(0).float().double()
    return model, tokenizer


def loss_of(model, batches):
    """The mean loss of a global batch of packed rows, of its examples one by one."""
    total, count = 0.0, 0.0
    rows, weights = batches.batch(0, 4), batches.loss_weights(0, 4)
    for row, parts, counts in zip(rows, batches.documents(0, 4), weights, strict=True):
        for part in range(parts.max() + 1):
            at = np.flatnonzero(parts == part)
            labels = torch.from_numpy(row[at])[None].clone()
            labels[0, 1:][counts[at[1:] - 1] == 0] = -100
            labels[0, 0] = -100
            if number := int((labels != -100).sum()):
                logits = model(torch.from_numpy(row[at])[None]).logits[0, :-1]
                total = total + cross_entropy(logits, labels[0, 1:], reduction="sum")
                count += number
    return total / count


@pytest.mark.parametrize("name", ["grown", "spare", "partly", "tied"])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_step_has_the_loss_and_the_rows_of_transformers_resized_model(home, name, rule):
    steps = ["optimizer.clip=0", "optimizer.schedule=constant", f"optimizer.name={rule}"]
    steps += ["optimizer.momentum=0"] * (rule == "sgd")
    run = config(home, name, *steps)
    model, tokenizer = resized(home / name)
    trainer, loader = started(run)
    batches = loader.batches
    assert {*range(FIRST, FIRST + 3)} <= {*batches.batch(0, 4).flatten()}
    ids = tokenizer.apply_chat_template(next(lines())["messages"])["input_ids"]
    rows, parts = batches.batch(0, 8)[:, :-1], batches.documents(0, 8)[:, :-1]
    examples = [row[of == n].tolist() for row, of in zip(rows, parts, strict=True) for n in {*of}]
    assert ids in examples and {FIRST, FIRST + 1} <= {*ids}
    loss = loss_of(model, batches)
    loss.backward()
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[rule]
    more = {"weight_decay": 0.0} | ({"betas": run.optimizer.betas} if rule == "adamw" else {})
    make(model.parameters(), lr=0.02, **more).step()
    step = trainer.train_step(loader)
    loader.close()
    assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    ours = dict(trainer.stages[0].named_parameters())
    for mine, theirs in (("embedding.weight", NAMES[0]), ("head.weight", NAMES[1]))[: len(tables)]:
        table = model.get_parameter(theirs)
        torch.testing.assert_close(ours[mine][: len(table)], table, rtol=1e-9, atol=1e-11)
    assert run.model.vocab_size == max(FIRST + 3, MODELS[name][1]["vocab_size"])


LAYOUTS = [
    {"tp": 4},
    {"tp": 4, "tp_mode": "2d"},
    {"tp": 2, "cp": 2, "zero": 1},
    {"cp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "zero_bubble", "zero": 1},
    {"pp": 2, "zero": 3, "schedule": "1f1b"},
]
LORA = ["lora.rank=4", "lora.modules_to_save=['embed_tokens','lm_head']"]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_every_layout_has_the_losses_of_one_rank(home, name, parallel):
    alone = losses_of(ALONE, config(home, name))
    assert alone[-1] < 0.9 * alone[0]
    for losses in run_ranks(4, losses_of, config(home, name, **parallel)):
        assert losses == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("parallel", [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2, "zero": 1}], ids=str)
def test_adapters_beside_tables_that_are_trained_whole_have_the_losses_of_one_rank(home, parallel):
    alone = losses_of(ALONE, config(home, "llama", *LORA))
    assert alone[-1] < 0.9 * alone[0]
    for losses in run_ranks(4, losses_of, config(home, "llama", *LORA, **parallel)):
        assert losses == pytest.approx(alone, rel=1e-10)
