"""BERT from the command line: pre-trained, fine-tuned on RACE and evaluated, on any layout."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from chats import write_lines
from command_line import mtcli
from marks import slow, slow_cases

VOCAB, CONTEXT = 600, 96
MODEL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": VOCAB}
MODEL |= {"max_seq_len": CONTEXT, "dropout": 0.0, "attention_dropout": 0.0}
SETTINGS = {f"model.{name}": value for name, value in MODEL.items()}
SETTINGS |= {"batch.seq_len": CONTEXT, "batch.micro_batch_size": 2, "batch.global_batch_size": 8}
SETTINGS |= {"train.steps": 5, "train.precision": "fp32", "data.train": "text", "data.split": "1,0"}
SETTINGS |= {"optimizer.lr": 1e-3, "optimizer.warmup_steps": 1, "parallel.recompute": "none"}
ARTICLES = 5  # of each level


def run(home, *words, code=0, fault=None, **settings):
    sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    done = mtcli(*words, *sets, folder=home, fault=fault)
    assert done.returncode == code, done.stderr
    return done


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with some of RACE's articles, their sentences, an encoder of those, and labels."""
    if "MTCLI_TEST_DATA" not in os.environ:
        pytest.skip("MTCLI_TEST_DATA names no folder with wikitext-103, lambada, race, gpt2-bpe")
    data, folder = Path(os.environ["MTCLI_TEST_DATA"]), tmp_path_factory.mktemp("bert")
    texts = []
    for level in ("high", "middle"):
        (folder / "race" / level).mkdir(parents=True)
        for file in sorted((data / "race" / "test" / level).glob("*.txt"))[:ARTICLES]:
            shutil.copy(file, folder / "race" / level)
            texts.append({"text": json.loads(file.read_text())["article"]})
    write_lines(folder / "text.jsonl", texts)
    words = ("preprocess", "text.jsonl", "--sentences", "--tokenizer", f"train:{VOCAB}")
    run(folder, *words, "--output", "text")
    lines = [{"text": text, "label": label} for text, label in (("a cat", 0), ("dogs", 1)) * 4]
    write_lines(folder / "labels.jsonl", lines)
    run(folder, "train", "bert-110m", **SETTINGS, **{"train.output": "one"})
    return folder


def test_four_processes_pre_train_with_the_losses_of_one(home):
    settings = SETTINGS | {"parallel.tp": 2, "train.output": "four"}
    done = run(home, "train", "bert-110m", "--nproc", 4, **settings)
    assert "layout 4 ranks: tp=2 pp=1 dp=2" in done.stdout
    alone = losses(home / "one")
    assert len(alone) == 5 and min(alone[1:]) < alone[0]
    assert losses(home / "four") == pytest.approx(alone, rel=1e-5)


def test_a_dry_run_counts_predicted_tokens_and_labelled_texts(home):
    words = ("train", "bert-110m", "--dry-run", "--json", "-")
    batch = json.loads(run(home, *words, **SETTINGS, **{"train.output": "new"}).stdout)["batch"]
    assert batch["sequences"] == 8 and batch["tokens"] + batch["padding"] == 8 * CONTEXT
    assert 0.1 < batch["labels"] / batch["tokens"] < 0.2  # 15 % of them
    assert batch["text"].startswith("[CLS]")
    settings = SETTINGS | {"data.format": "classification", "data.train": "labels.jsonl"}
    settings |= {"train.output": "new", "data.tokenizer": "text.tokenizer", "data.split": "1,0,0"}
    batch = json.loads(run(home, *words, **settings).stdout)["batch"]
    assert batch["labels"] == batch["documents"] == 8
    assert not (home / "new").exists()


@slow("15 s")
def test_a_head_for_race_learns_its_questions_and_answers_alike_on_any_layout(home):
    settings = {"data.format": "race", "data.train": "race", "train.epochs": 30}
    settings |= {"batch.micro_batch_size": 1, "batch.global_batch_size": 4, "parallel.tp": 2}
    settings |= {"train.output": "race-run"}
    words = ("train", "bert-110m", "--init", "one", "--nproc", 4)
    model = {name: value for name, value in SETTINGS.items() if name.startswith(("model", "opt"))}
    done = run(home, *words, **model, **settings, **{"parallel.recompute": "none"})
    assert "head.classifier" in done.stderr and "embedding" not in done.stderr
    assert f"data   {2 * ARTICLES} examples, " in done.stdout
    assert f"packed in {2 * ARTICLES} rows of {4 * CONTEXT}, " in done.stdout
    assert "cut    the article of " in done.stdout
    assert len(losses(home / "race-run")) == 30 * 3, "three global batches hold the ten rows"
    words = ("eval", "race-run", "--task", "race=race", "--json", "-")
    done = run(home, *words, "--items", "race.jsonl")
    assert "; cut: the article of " in done.stderr
    alone = json.loads(done.stdout)["tasks"]
    assert alone["race"]["total"] == 2 * ARTICLES
    items = [json.loads(line) for line in (home / "race.jsonl").open()]
    assert sum(item["correct"] for item in items) == alone["race"]["correct"]
    assert [item["id"].split("/")[0] for item in items] == ["high"] * 5 + ["middle"] * 5
    for item in items:
        chances = [math.exp(value) for value in item["loglikelihoods"]]
        assert sum(chances) == pytest.approx(1) and item["pick"] == chances.index(max(chances))
    done = run(home, *words, "--shots", 2, "--overlap", 8, code=2)
    for flag in ("--shots", "--overlap"):
        assert f"error: {flag}: race with head='multiple_choice' has no use for it" in done.stderr
    limited = json.loads(run(home, *words, "--limit", 1).stdout)["tasks"]["race"]
    levels = sum(name.endswith("_total") for name in limited)
    assert limited["total"] == levels > 0
    # by chance 2.5; 7 or more come up once in 300 times
    assert alone["race"]["correct"] >= 7
    grid = {"parallel.tp": 4, "parallel.tp_mode": "2d", "batch.micro_batch_size": 2}
    for layout in ({"parallel.tp": 2}, grid):
        assert json.loads(run(home, *words, "--nproc", 4, **layout).stdout)["tasks"] == alone


def test_masked_tokens_are_evaluated_on_a_grid_as_on_one_rank(home):
    words = ("eval", "one", "--task", "mlm=text", "--json", "-")
    alone = json.loads(run(home, *words).stdout)["tasks"]["mlm"]
    grid = {"parallel.tp": 2, "parallel.tp_mode": "2d", "parallel.tp_rows": 2}
    found = json.loads(run(home, *words, "--nproc", 2, **grid).stdout)["tasks"]["mlm"]
    assert found == pytest.approx(alone, rel=1e-6)


class Ends:
    """A fault: the evaluation is interrupted when some calls of the encoder have been made."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, rank):
        from mtcli.core.evaluate import bert_tasks

        head_outputs = bert_tasks.head_outputs

        def counted(*arguments):
            if self.calls == 0:
                raise KeyboardInterrupt
            self.calls -= 1
            return head_outputs(*arguments)

        bert_tasks.head_outputs = counted


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def classifiers(home):
    """Two classifiers, `first` and `second`, of texts that all differ."""
    texts = [{"text": "a cat or dogs "[: n % 9 + 4] + "x" * n, "label": n % 2} for n in range(30)]
    write_lines(home / "texts.jsonl", texts)
    labels = {"data.format": "classification", "data.train": "texts.jsonl", "train.epochs": 2}
    for seed, name in enumerate(("first", "second")):
        run(home, "train", "one", "--init", "one", **labels, **{"train.output": name, "seed": seed})
    return home


ONE = ("first", "--task", "classification=texts.jsonl", "--batch-tokens", CONTEXT)
TASKS = {
    "classifier": ONE,
    "ensemble": (*ONE, "--ensemble", "second"),
    "masked": ("one", "--task", "mlm=text", "--batch-tokens", CONTEXT),
}


@pytest.mark.parametrize("name", ["classifier", *slow_cases("2 s", "ensemble", "masked")])
def test_an_encoder_s_evaluation_that_was_ended_goes_on_where_it_was(name, classifiers):
    home, words, whole = classifiers, ("eval", *TASKS[name], "--json", "-"), f"{name}.jsonl"
    done = run(home, *words, "--items", whole)
    expected, models = json.loads(done.stdout), 1 + (name == "ensemble")
    passes = int(re.search(r"in (\d+) forward passes", done.stderr)[1])
    ended = ("--items", f"{name}-ended.jsonl")
    run(home, *words, *ended, code=130, fault=Ends(3))
    partial = home / f"{name}-ended.jsonl.partial"
    assert partial.exists() and not (home / ended[1]).exists()
    kept = len(lines(partial)) - 1
    done = run(home, *words, *ended, fault=Ends((passes - 3 // models) * models))
    assert f"; {kept} items are kept from a run that was ended" in done.stderr and kept > 0
    assert json.loads(done.stdout)["tasks"] == expected["tasks"]
    assert lines(home / ended[1]) == lines(home / whole) and not partial.exists()


@slow("2 s")
def test_an_encoder_s_evaluation_goes_on_over_data_ranks(home):
    words = ("eval", *TASKS["masked"], "--json", "-", "--items", "ranks.jsonl")
    run(home, *words, code=130, fault=Ends(3))
    done = run(home, *words, "--nproc", 2)
    assert "; 3 items are kept from a run that was ended" in done.stderr
    found, resumed = json.loads(done.stdout)["tasks"]["mlm"], lines(home / "ranks.jsonl")
    alone = json.loads(run(home, *words).stdout)["tasks"]["mlm"]
    assert found == pytest.approx(alone, rel=1e-6)
    assert [item["hash"] for item in resumed] == [
        item["hash"] for item in lines(home / "ranks.jsonl")
    ]


@pytest.mark.parametrize(
    ("name", "spoilt"),
    [("ensemble", {"members": [0]}),
     *slow_cases("1 s", ("masked", {"num_tokens": "1"}), ("masked", {"loglikelihoods": []}),
                 ("classifier", {"loglikelihoods": [-1.0, "x"]}))],
)  # fmt: skip
def test_an_item_that_an_ended_run_left_damaged_is_computed_again(name, spoilt, classifiers):
    words = ("eval", *TASKS[name], "--json", "-", "--items")
    run(classifiers, *words, "sound.jsonl")
    run(classifiers, *words, "spoilt.jsonl", code=130, fault=Ends(4))
    partial = classifiers / "spoilt.jsonl.partial"
    head, *items = lines(partial)
    partial.write_text(
        "".join(json.dumps(one) + "\n" for one in (head, items[0] | spoilt, *items[1:]))
    )
    done = run(classifiers, *words, "spoilt.jsonl")
    kept = int(re.search(r"; (\d+) items are kept", done.stderr)[1])
    assert 0 < kept < len(items)
    assert lines(classifiers / "spoilt.jsonl") == lines(classifiers / "sound.jsonl")


def test_items_of_another_ensemble_are_not_taken(classifiers):
    words, items = ("eval", *TASKS["ensemble"], "--json", "-"), ("--items", "others.jsonl")
    run(classifiers, *words, *items, code=130, fault=Ends(3))
    done = run(classifiers, "eval", *ONE, "--json", "-", *items)
    assert "kept" not in done.stderr and "members" not in lines(classifiers / items[1])[0]


@slow("3 s")
def test_every_row_of_masked_tokens_is_an_item_and_two_encoders_are_compared_by_theirs(home):
    words = ("eval", "one", "--task", "mlm=text", "--json")
    found = json.loads(run(home, *words, "-", "--items", "rows.jsonl").stdout)["tasks"]["mlm"]
    items = lines(home / "rows.jsonl")
    assert [item["id"] for item in items] == [f"row {n}" for n in range(len(items))]
    assert len({item["hash"] for item in items}) == len(items) > 4
    assert sum(item["num_tokens"] for item in items) == found["masked"]
    loss = -sum(sum(item["loglikelihoods"]) for item in items) / found["masked"]
    assert loss == pytest.approx(found["loss"], rel=1e-12)
    for name in ("sop_correct", "sop_total"):
        assert sum(item[name] for item in items) == found[name] > 0
    grid = {"parallel.tp": 2, "parallel.tp_mode": "2d", "parallel.tp_rows": 2}
    for layout in (grid, {"parallel.tp": 2}):
        run(home, *words, "-", "--items", "shards.jsonl", "--nproc", 2, **layout)
        for ours, theirs in zip(items, lines(home / "shards.jsonl"), strict=True):
            sums = theirs.pop("loglikelihoods")
            assert ours | {"loglikelihoods": pytest.approx(sums, rel=1e-5)} == ours
            assert theirs.items() <= ours.items()
    run(home, *words, "a.json")
    run(home, *words, "b.json", **{"train.precision": "bf16"})
    done = run(home, "eval", "--compare", "a.json", "b.json", "--json", "-")
    compared = json.loads(done.stdout)["tasks"]["mlm"]
    assert (compared["metric"], compared["total"]) == ("loss", len(items))
    assert compared["a"] == pytest.approx(found["loss"]) and compared["other_prompts"] == 0


def test_documents_of_one_sentence_have_masked_tokens_and_no_order(home):
    (home / "short.txt").write_text("Cats sleep.\n\nDogs run.\n\nThey eat and sleep.\n")
    words = ("eval", "one", "--json", "-", "--task")
    found = json.loads(run(home, *words, "mlm=short.txt").stdout)["tasks"]["mlm"]
    assert found["masked"] > 0 and (found["sop_accuracy"], found["sop_total"]) == (None, 0)
    (home / "unknown.txt").write_text("\u4e00\n")
    done = run(home, *words, "mlm=unknown.txt", code=2)
    assert "unknown.txt may be masked: all are special ones" in done.stderr
    (home / "bad.jsonl").write_text("{\n")
    done = run(home, *words, "mlm=bad.jsonl", "--shots", 2, code=2)
    assert "--shots: mlm with head='mlm' has no use for it" in done.stderr
    done = run(home, *words, "mlm=bad.jsonl", code=2)
    assert "error: --task: bad.jsonl:1: not JSON" in done.stderr
    assert "flags are those of `mtcli preprocess --sentences`" in done.stderr


def test_a_head_that_the_weights_have_not_begins_from_the_seed_and_is_named(home):
    labels = {"data.format": "classification", "data.train": "labels.jsonl", "train.epochs": 1}
    done = run(home, "train", "one", "--init", "one", **labels, **{"train.output": "labels"})
    fresh = "head.classifier.bias, head.classifier.weight"
    assert done.stderr.count("begin from the seed") == 1 and f"note: {fresh}" in done.stderr
    words = ("--init", "labels", "--set", "data.train=labels.jsonl")
    done = run(home, "train", *words, **{"train.output": "again", "train.epochs": 1})
    assert "begin from the seed" not in done.stderr, "the head is there"


@slow("three heads are trained")
def test_an_ensemble_is_of_classifiers_of_one_kind(home):
    lines = [{"text": "a cat", "label": n % 3} for n in range(6)]
    write_lines(home / "three.jsonl", lines)
    shared = {"train.epochs": 1, "model.head": "classification"}
    two = shared | {"data.train": "labels.jsonl", "train.output": "two", "seed": 1}
    run(home, "train", "one", "--init", "one", **two)
    words = ("eval", "two", "--task", "classification=labels.jsonl", "--ensemble")
    done = run(home, *words, "one", code=2)
    assert "two has head='classification', num_labels=2; one has head='mlm', num_labels=0" in (
        done.stderr
    )
    done = run(home, *words, "nowhere", code=2)
    assert "there is no folder nowhere" in done.stderr
    three = shared | {"data.train": "three.jsonl", "train.output": "three", "model.num_labels": 3}
    run(home, "train", "one", "--init", "one", **three)
    done = run(home, *words, "three", code=2)
    assert "two has num_labels=2; three has num_labels=3" in done.stderr


@slow("4 s")
def test_seeds_of_a_head_are_swept_at_once_and_each_is_a_run_alone(home):
    settings = {"data.format": "race", "data.train": "race", "train.epochs": 2}
    settings |= {"batch.micro_batch_size": 1, "batch.global_batch_size": 4}
    model = {name: value for name, value in SETTINGS.items() if name.startswith(("model", "opt"))}
    settings |= model | {"parallel.recompute": "none"}
    words = ("bert-110m", "--init", "one", "--seeds", 3, "--output", "seeds", "--json", "-")
    done = run(home, "sweep", *words, **settings, **{"train.precision": "fp64"})
    assert done.stderr.count("begin from the seed") == 1
    found = json.loads(done.stdout)["trials"]
    assert [trial["steps"] for trial in found] == [6] * 3 and len({t["loss"] for t in found}) == 3
    for seed in (1234, 1236):
        own = {"seed": seed, "train.output": f"seed-{seed}", "train.precision": "fp64"}
        run(home, "train", "bert-110m", "--init", "one", **settings, **own)
        made = losses(home / "seeds" / f"seed={seed}")
        assert made == pytest.approx(losses(home / f"seed-{seed}"), rel=1e-10)
    done = run(home, "eval", "seeds/seed=1234", "--task", "race=race", "--json", "-")
    assert json.loads(done.stdout)["tasks"]["race"]["total"] == 2 * ARTICLES
