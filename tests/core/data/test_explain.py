"""What `mtcli data explain` says of a step is what the step was made of."""

import json

import numpy as np
import pytest
from chats import REWRITING, talks, tokenizer, write_lines

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.data.best_fit import open_conversations
from mtcli.core.data.explain import explain_step
from mtcli.core.data.loader import Batches
from mtcli.core.data.preprocess import PreprocessRequest, preprocess

SHAPE = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=257"]
SHAPE += ["model.max_seq_len=16", "batch.seq_len=16", "batch.global_batch_size=6"]
SHAPE += ["batch.micro_batch_size=1"]


@pytest.fixture
def texts(tmp_path):
    """Two datasets with ids and without, one of whose documents is empty; {(data, id): text}."""
    made = {("a", f"id{n}"): f"{n}: " + "x" * n * 3 for n in range(1, 9)}
    lines = [json.dumps({"id": n, "text": t, "source": "s"}) for (_, n), t in made.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(['{"id": "empty", "text": ""}', *lines]))
    more = {("b", f"b.jsonl:{n}"): f"text {n} " * n for n in range(1, 7)}
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in more.values()))
    for name in "ab":
        inputs = (str(tmp_path / f"{name}.jsonl"),)
        request = PreprocessRequest(inputs, tmp_path / name, "bytes", append_eod=True)
        preprocess(request, lambda _: None)
    return made | more


def config_of(tmp_path, *settings):
    words = json.dumps(["0.6", str(tmp_path / "a"), "0.4", str(tmp_path / "b")])
    return load_config("tiny", [*SHAPE, f"data.train={words}", "train.steps=4", *settings])


@pytest.mark.parametrize("step", [1, 4])
def test_the_documents_of_a_step_spell_its_samples(step, texts, tmp_path):
    config = config_of(tmp_path)
    rows = Batches(config.data.train, config.data.split, "train", 24, 16, config.seed).batch(
        (step - 1) * 6, 6
    )
    spelt = {}
    for row in explain_step(config, step):
        name = row["data"].rpartition("/")[2]
        assert row["source"] == ("s" if name == "a" else "b")
        whole = [*texts[name, row["id"]].encode(), 256]
        spelt.setdefault(row["sample"], []).extend(whole[row["offset"] :][: row["tokens"]])
    assert list(spelt) == list(range((step - 1) * 6, step * 6))
    assert np.array_equal(list(spelt.values()), rows)


def test_a_step_that_is_not_there_and_data_of_no_documents_are_refused(texts, tmp_path):
    with pytest.raises(MtcliError, match="step 5 of a run of 4 steps"):
        explain_step(config_of(tmp_path), 5)
    with pytest.raises(MtcliError, match="documents of steps are known"):
        explain_step(config_of(tmp_path, "data.format=race", "model.head=multiple_choice"), 1)


def test_documents_are_numbered_where_their_text_is_gone(texts, tmp_path):
    (tmp_path / "a.jsonl").unlink()
    found = explain_step(config_of(tmp_path), 1)
    assert {row["id"] for row in found if row["data"].endswith("a")} == {None}
    assert None not in {row["id"] for row in found if row["data"].endswith("b")}


def test_the_examples_of_a_step_are_lines_and_the_turn_that_each_trains(tmp_path):
    tokenizer(REWRITING["Phi-3"]).save_pretrained(tmp_path / "tokenizer")
    file = write_lines(tmp_path / "talks.jsonl", talks(12))
    sets = ["model.vocab_size=300", "model.max_seq_len=192", "batch.seq_len=192"]
    sets += [f"data.train={file}", f"data.tokenizer={tmp_path / 'tokenizer'}", "train.epochs=1"]
    sets += ["optimizer.warmup_steps=0", "data.format=conversations"]
    config = load_config("tiny", [*SHAPE, *sets])
    data = open_conversations(config, None)
    steps = data.epochs.steps_per_epoch
    assert steps > 1 and len(data.rows) % 6, "the case needs padding at its end"
    found = [row for step in range(1, steps + 1) for row in explain_step(config, step)]
    theirs, turns = tokenizer(REWRITING["Phi-3"]), []
    for number, line in enumerate(talks(12), start=1):
        for turn, message in enumerate(line["messages"]):
            if message["role"] == "assistant":
                size = len(theirs.apply_chat_template(line["messages"][: turn + 1])["input_ids"])
                turns.append((number, turn, 0, size))
    spans = [tuple(row[key] for key in ("document", "turn", "offset", "tokens")) for row in found]
    assert sorted(spans) == turns
    for sample in {row["sample"] for row in found}:
        names = [row["id"] for row in found if row["sample"] == sample]
        assert names == [
            f"talks.jsonl:{line}" for line, _, _ in data.sample_ids(sample, 1)[0].spans
        ]
    with pytest.raises(MtcliError, match=f"step {steps + 1} of a run of {steps} steps"):
        explain_step(config, steps + 1)
