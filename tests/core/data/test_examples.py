"""Labelled examples: RACE as Megatron-LM lays it out, JSONL of texts, and what is refused."""

import json

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.example_rows import ExampleRows
from mtcli.core.data.examples import race_limit, read_classes, read_race_examples
from mtcli.core.data.special_tokens import special_tokens
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
    limit = race_limit(512, 2048)
    assert limit == 512 and race_limit(64, 2048) == 64 and race_limit(512, 1024) == 256
    found = read_race_examples(race(tmp_path), "train", tokenizer, limit, "data.train").found
    assert [example.group for example in found] == ["high"] * 2 + ["middle"] * 2
    assert [example.label for example in found[:2]] == [0, 2]
    texts = [tokenizer.decode(s.first.tolist()) for s in found[0].sequences]
    assert texts == ["who sat?" + end for end in (" a cat", " dogs", " it", " who")]
    texts = [tokenizer.decode(s.first.tolist()) for s in found[1].sequences]
    assert texts[2] == "the cat looked at the mat."
    assert tokenizer.decode(found[0].sequences[0].second.tolist()).startswith("a cat sat on")
    short = read_race_examples(tmp_path, "train", tokenizer, 40, "data.train").found
    assert all(sequence.size <= 40 for example in short for sequence in example.sequences)
    assert max(sequence.size for example in short for sequence in example.sequences) == 40
    long = race(tmp_path / "long", questions=["who " * 200, "who ?"])
    first = read_race_examples(long, "train", tokenizer, 512, "data.train").found[0].sequences[0]
    assert (len(first.first), first.size) == (128, 128 + 3 + 40 * 7)


def test_a_question_of_three_options_is_refused_by_its_file(tmp_path, tokenizer):
    race(tmp_path, options=[["a", "b", "c"], ["a", "b", "c", "d"]])
    with pytest.raises(MtcliError, match=r"high/1.txt, line 1: 3 options for a question, 4 are"):
        read_race_examples(tmp_path, "train", tokenizer, 512, "data.train")


LINES = {
    '{"text": "a cat"}': "line 2: it has no label",
    '{"text": "a cat", "label": 3}': "line 2: label 3 of num_labels=3",
    '{"text": "a cat", "label": true}': "line 2: label true of num_labels=3",
    '{"text": "a cat", "label": "1"}': "line 2: label '1' of num_labels=3",
    '{"label": 1}': "line 2: it has no text",
    '{"text": 5, "label": 1}': "line 2: its text is 5, no text",
    '{"text": "a", "text_pair": [], "label": 1}': "line 2: its text_pair is",
    "[1]": "line 2: it is no JSON object",
    "{": "line 2: it is not JSON",
    '{"text": "a a a a a a a a a a a a a a a", "label": 1}': "line 2: it has 17 tokens, and 16 fit",
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_is_named_with_all_others_or_skipped_and_counted(tmp_path, tokenizer, line):
    path = tmp_path / "x.jsonl"
    good = '{"text": "a cat", "text_pair": "it sat", "label": 2}'
    path.write_text(f"{good}\n{line}\n\n{line}\n")
    with pytest.raises(MtcliError) as caught:
        read_classes(path, tokenizer, 16, 3, False, "data.train")
    assert LINES[line] in str(caught.value) and "line 4" in str(caught.value)
    assert "data.skip_bad=true" in str(caught.value)
    found = read_classes(path, tokenizer, 16, 3, True, "data.train")
    assert len(found.found) == 1 and list(found.skipped.values()) == [2]
    assert [len(part) for part in found.found[0].sequences[0]] == [2, 2]


def test_every_epoch_has_each_example_once_and_none_is_split(tmp_path, tokenizer):
    path = tmp_path / "x.jsonl"
    lines = [{"text": "a cat " * (1 + i % 5), "label": i % 3} for i in range(50)]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_classes(path, tokenizer, 16, 3, False, "data.train")
    rows = ExampleRows([("x", found)], 999, 24, 1, special_tokens(tokenizer))
    for start in (0, rows.packed.rows_of_epoch(0)):
        count = rows.packed.rows_of_epoch(int(start > 0))
        read = rows.rows(start, count)
        assert len(read.classes) == len(read.firsts) == 50
        assert sorted(read.classes) == sorted(line["label"] for line in lines)
        assert (read.tokens.reshape(-1)[read.firsts] == 2).all()
    assert (rows.rows(0, 3).tokens == 0).mean() < 0.5
    with pytest.raises(MtcliError, match="up to 12 tokens, and rows batch.seq_len=11"):
        ExampleRows([("x", found)], 9, 11, 1, special_tokens(tokenizer))
