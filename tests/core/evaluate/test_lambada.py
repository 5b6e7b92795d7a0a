"""lambada: strict last words, against transformers on real passages."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from marks import slow

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.items import Renderer, read_items
from mtcli.core.evaluate.tasks.rows import Row, Split
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task

TASK = load_task("lambada")
prepare = partial(prepare_task, TASK)
TOKENIZER = EvalTokenizer(lambda text: [ord(c) % 97 for c in text], prefix_id=0)


def test_real_passages_have_the_numbers_of_transformers(data, bpe, real_scorer, alone):
    file = data / "lambada" / "lambada_test.jsonl"
    tokenizer = EvalTokenizer(lambda text: bpe.encode(text).ids, 50256, "<|endoftext|>")
    prepared = prepare(file, tokenizer, TaskOptions(max_seq_len=128, limit=40))
    scores = run(real_scorer, plan(real_scorer, prepared.requests, 1024))
    report, nll, correct = prepared.report(scores), 0.0, 0
    for line in file.read_text(encoding="utf-8").splitlines()[:40]:
        text = json.loads(line)["text"]
        word = text.split()[-1]
        prefix = bpe.encode(text[: text.rfind(word)].strip()).ids
        target = bpe.encode(" " + word).ids
        logprob, is_greedy = alone(real_scorer.model, (prefix + target)[-129:], len(target))
        nll, correct = nll - logprob, correct + is_greedy
    assert report["total"] == prepared.num_items == 40
    assert report["correct"] == correct and report["accuracy"] == correct / 40
    assert report["perplexity"] == pytest.approx(math.exp(nll / 40), rel=1e-4)


@slow("5,153 passages, 2.6 s")
def test_every_real_passage_is_read_and_split_in_tokens_as_words(data, bpe):
    tokenizer = EvalTokenizer(lambda text: bpe.encode(text).ids, 50256, "<|endoftext|>")
    prepared = prepare(data / "lambada", tokenizer, TaskOptions(max_seq_len=1024))
    assert prepared.num_items == len(prepared.requests) == 5153
    lines = (data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    for line, request in zip(lines, prepared.requests, strict=True):
        target = bpe.encode(" " + json.loads(line)["text"].split()[-1]).ids
        assert request.tokens[-request.num_targets :].tolist() == target


@pytest.mark.parametrize(
    "text, context, word",
    [
        ('He said "do it," and\n did.\n', 'He said "do it," and', "did."),
        ("go and go", "go and", "go"),
        ("alone", "", "alone"),
    ],
)
def test_the_last_word_is_the_last_between_spaces(text, context, word):
    (item,) = Renderer(TASK).items(Split([Row({"text": text}, Path("x"), 1)], Path("x")))
    assert (item.prompts, item.choices, item.answer) == ((context,), (word,), None)


def test_accuracy_and_perplexity_are_of_whole_words(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a b"}\n\n{"text": "c d", "more": 1}\n')
    prepared = prepare(tmp_path, TOKENIZER, TaskOptions(max_seq_len=9))
    report = prepared.report([Score(-1.0, True), Score(-3.0, False)])
    assert report["perplexity"] == pytest.approx(math.exp(2.0))
    assert (report["accuracy"], report["correct"], report["total"]) == (0.5, 1, 2)


JSON_LINES = '{"text": "the cat sat"}\n{"text": "so did the dog"}\n'


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("t.json", JSON_LINES, ["sat", "dog"]),
        ("t.txt", "\n" + JSON_LINES, ["sat", "dog"]),
        ("t", JSON_LINES, ["sat", "dog"]),
        ("t.ndjson", JSON_LINES, ["sat", "dog"]),
        ("t", "the cat sat\nso did the dog\n", ["sat", "dog"]),
        ("t.txt", "[1] the cat sat\n{so} did the dog\n", ["sat", "dog"]),
        ("t.json", f"[{JSON_LINES.strip().replace(chr(10), ', ')}]", "is one JSON document"),
        ("t.txt", '{\n "text": "the cat sat"\n}\n', "is one JSON document"),
        ("t.jsonl", '[{"text": "the cat sat"}]', "is one JSON document"),
        ("t.json", "the cat sat\n", "line 1: not JSON"),
        ("t.csv", "id,text\n1,the cat sat\n", "ends in .csv, and is no JSON lines"),
        ("t.py", "import this\n", "ends in .py, and is no JSON lines"),
    ],
)
def test_the_format_of_a_file_is_that_of_its_content_and_suffix(name, content, texts, tmp_path):
    file = tmp_path / name
    file.write_text(content)
    if isinstance(texts, list):
        items, *_ = read_items(TASK, file, None)
        assert [item.choices[0] for item in items] == texts
        return
    with pytest.raises(MtcliError) as caught:
        read_items(TASK, file, None)
    problem = caught.value.problems[0]
    assert texts in problem.message and problem.message.startswith(str(file)) and problem.hint


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "not a JSON object"),
        ('{"txt": "a b"}', "'text' is undefined"),
        ('{"text": " "}', "No last item, sequence was empty."),
        ('{"text": 3}', "'int object' has no attribute 'split'"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, line, message):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a b"}\n' + line + "\n")
    with pytest.raises(MtcliError) as caught:
        prepare(file, TOKENIZER, TaskOptions(max_seq_len=9))
    assert caught.value.problems[0].message == f"{file}, line 2: {message}"
    assert "docs/reference/eval.md" in caught.value.problems[0].hint
