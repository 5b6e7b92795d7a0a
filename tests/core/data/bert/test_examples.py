"""Labelled examples: RACE as Megatron-LM lays it out, JSONL of texts, and what is refused."""

import json

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.data import bad_lines
from mtcli.core.data.bert.example_rows import ExampleRows
from mtcli.core.data.bert.examples import Room, race_limit, read_classes, read_race_examples
from mtcli.core.data.bert.special_tokens import special_tokens
from mtcli.core.data.tokenize import train_word_pieces

WORDS = "a cat sat on the mat and looked at dogs who did it _ . ?"
ARTICLE = {
    "article": "a cat sat on the mat . " * 40,
    "questions": ["who sat ?", "the cat looked at _ ."],
    "options": [["a cat", "dogs", "it", "who"], ["dogs", "it", "the mat", "a cat"]],
    "answers": ["A", "C"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_word_pieces([WORDS] * 50, 300)


def race(folder, **changes):
    for level in ("high", "middle"):
        (folder / "train" / level).mkdir(parents=True)
        text = json.dumps(ARTICLE | changes)
        (folder / "train" / level / "1.txt").write_text(text)
    return folder


def test_a_choice_is_question_and_choice_then_the_article_in_128_and_512(tmp_path, tokenizer):
    assert race_limit(512) == race_limit(2048) == 512 and race_limit(64) == 64
    read = read_race_examples(race(tmp_path), "train", tokenizer, Room(512, 2048), "data.train")
    found = read.examples
    assert [example.group for example in found] == ["high"] * 2 + ["middle"] * 2
    assert [example.label for example in found[:2]] == [0, 2]
    texts = [tokenizer.decode(s.first.tolist()) for s in found[0].sequences]
    assert texts == ["who sat?" + end for end in (" a cat", " dogs", " it", " who")]
    texts = [tokenizer.decode(s.first.tolist()) for s in found[1].sequences]
    assert texts[2] == "the cat looked at the mat."
    assert tokenizer.decode(found[0].sequences[0].second.tolist()).startswith("a cat sat on")
    assert read.ended == (0, 0) and not read.skipped


def test_what_a_context_has_no_room_for_ends_there_and_is_counted(tmp_path, tokenizer):
    race(tmp_path)
    short = read_race_examples(tmp_path, "train", tokenizer, Room(40, 160), "data.train")
    assert max(sequence.size for example in short.examples for sequence in example.sequences) == 40
    assert short.ended == (4, 0)
    questions = ["who " * 200, "who ?"]
    long = race(tmp_path / "long", questions=questions)
    found = read_race_examples(long, "train", tokenizer, Room(512, 2048), "data.train")
    first = found.examples[0].sequences[0]
    assert (len(first.first), first.size) == (128, 128 + 3 + 40 * 7)
    assert found.ended == (0, 2)
    rows = ExampleRows([("x", short), ("y", found)], 2048, special_tokens(tokenizer))
    assert rows.describe()["cut"] == "the article of 4 questions, and of 2 a choice"


def test_questions_that_no_row_has_room_for_are_named_with_bad_articles_or_skipped(
    tmp_path, tokenizer
):
    race(tmp_path)
    (tmp_path / "train" / "high" / "2.txt").write_text(json.dumps(ARTICLE | {"answers": ["A"]}))
    sizes = [sum(s.size for s in e.sequences) for e in race_of(tmp_path, tokenizer, True).examples]
    least = min(sizes)
    with pytest.raises(MtcliError) as caught:
        race_of(tmp_path, tokenizer, False, least)
    said = str(caught.value)
    assert "high/2.txt:1: 2 questions, 2 options, 1 answers" in said
    assert f"high/1.txt:1: question 2 and its choices have {max(sizes)} tokens, and" in said
    assert f"middle/1.txt:1: question 2 and its choices have {max(sizes)} tokens" in said
    assert f"batch.seq_len={least} is the context" in said and "--skip-bad" in said
    found = race_of(tmp_path, tokenizer, True, least)
    assert [example.label for example in found.examples] == [0, 0]
    rows = ExampleRows([("race", found)], least, special_tokens(tokenizer))
    bad = rows.describe()["bad"]
    assert bad.startswith(
        f"1 bad articles, {tmp_path}/train/high/2.txt:1; 2 longer than the context"
    )


def race_of(folder, tokenizer, skip_bad, row=2048):
    room = Room(512, row, skip_bad)
    return read_race_examples(folder, "train", tokenizer, room, "data.train")


def test_a_question_of_three_options_is_refused_by_its_file(tmp_path, tokenizer):
    race(tmp_path, options=[["a", "b", "c"], ["a", "b", "c", "d"]])
    with pytest.raises(
        MtcliError, match=r"high/1.txt:1: 3 options for a question, 4 are"
    ) as caught:
        race_of(tmp_path, tokenizer, False)
    assert "middle/1.txt:1: 3 options" in str(caught.value)


LINES = {
    '{"text": "a cat"}': ":2: it has no label",
    '{"text": "a cat", "label": 3}': ":2: label 3 of num_labels=3",
    '{"text": "a cat", "label": true}': ":2: label true of num_labels=3",
    '{"text": "a cat", "label": "1"}': ":2: label '1' of num_labels=3",
    '{"label": 1}': ":2: it has no text",
    '{"text": 5, "label": 1}': ":2: its text is 5, no text",
    '{"text": "a", "text_pair": [], "label": 1}': ":2: its text_pair is",
    "[1]": ":2: it is no JSON object",
    "{": ":2: it is not JSON",
    '{"text": "a a a a a a a a a a a a a a a", "label": 1}': ":2: it has 17 tokens, and 16 fit",
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_is_named_with_all_others_or_skipped_and_counted(tmp_path, tokenizer, line):
    path = tmp_path / "x.jsonl"
    good = '{"text": "a cat", "text_pair": "it sat", "label": 2}'
    path.write_text(f"{good}\n{line}\n\n{line}\n")
    with pytest.raises(MtcliError) as caught:
        read_classes(path, tokenizer, Room(16, 16), 3, "data.train")
    assert LINES[line] in str(caught.value) and ":4: " in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    found = read_classes(path, tokenizer, Room(16, 16, True), 3, "data.train")
    assert len(found.examples) == 1 and list(found.skipped.values()) == [[f"{path}:2", f"{path}:4"]]
    assert [len(part) for part in found.examples[0].sequences[0]] == [2, 2]


def test_a_line_longer_than_a_line_may_be_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(bad_lines, "MAX_LINE_BYTES", 60)
    path, good = tmp_path / "x.jsonl", '{"text": "a cat", "label": 2}'
    path.write_text(f'{{"text": "a cat", "label": 2, "more": "{"y" * 500}"}}\n{good}\n')
    with pytest.raises(MtcliError, match="x.jsonl:1: it is longer than 60 bytes"):
        read_classes(path, tokenizer, Room(16, 16), 3, "data.train")
    found = read_classes(path, tokenizer, Room(16, 16, True), 3, "data.train")
    assert len(found.examples) == 1 and found.skipped == {"too long a line": [f"{path}:1"]}


def test_every_epoch_has_each_example_once_and_none_is_split(tmp_path, tokenizer):
    path = tmp_path / "x.jsonl"
    lines = [{"text": "a cat " * (1 + i % 5), "label": i % 3} for i in range(50)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_classes(path, tokenizer, Room(16, 16), 3, "data.train")
    rows = ExampleRows([("x", found)], 24, special_tokens(tokenizer), seed=1, global_batch_size=4)
    size = 4 * rows.epochs.steps_per_epoch
    assert len(rows.epochs.rows) % 4, "an epoch is filled up"
    orders = []
    for epoch in (0, 1):
        read = rows.rows(epoch * size, size)
        assert len(read.classes) == len(read.firsts) == 50
        assert sorted(read.classes) == sorted(line["label"] for line in lines)
        assert (read.tokens.reshape(-1)[read.firsts] == 2).all()
        assert (read.tokens[-1] == 0).all() and not (read.firsts >= (size - 1) * 24).any()
        orders.append(read.tokens)
    assert not (orders[0] == orders[1]).all()
    assert (rows.rows(0, 3).tokens == 0).mean() < 0.5
    with pytest.raises(MtcliError, match="up to 12 tokens, and rows batch.seq_len=11"):
        ExampleRows([("x", found)], 11, special_tokens(tokenizer))
