"""race: lm-eval's prompt, lm-eval's choice, on both levels of the real files."""

import json
from functools import partial

import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.race import preprocess_race
from marks import slow

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.items import Renderer
from mtcli.core.evaluate.tasks.rows import read_test
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task

TASK = load_task("race")
prepare = partial(prepare_task, TASK)
TOKENIZER = EvalTokenizer(lambda text: [ord(c) % 97 for c in text], prefix_id=0)
ROW = {
    "article": "A cat sat.",
    "questions": ["The cat  _  .", "Who sat?", "Why?"],
    "options": [["ran.", "sat.", "hid.", "ate."], ["a", "b", "c", "d"], ["e", "f", "g", "h"]],
    "answers": ["B", "D", "C"],
}


def as_doc(row):
    """The row as the dataset of lm-eval's task holds it."""
    keys = ("questions", "options", "answers")
    problems = [
        {"question": q, "options": o, "answer": a}
        for q, o, a in zip(*(row[key] for key in keys), strict=True)
    ]
    return {"article": row["article"], "problems": str(problems)}


def write(folder, level, number, row):
    file = folder / level / f"{number}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(row if isinstance(row, str) else json.dumps(row))
    return file


class Instance:
    def __init__(self, *args):
        self.args = args


@slow("12 articles scored twice, 2.4 s")
def test_real_articles_have_the_choices_and_likelihoods_of_lm_eval(data, bpe, real_scorer):
    from transformers import PreTrainedTokenizerFast

    tokenizer = EvalTokenizer(lambda text: bpe.encode(text).ids, 50256, "<|endoftext|>")
    prepared = prepare(data / "race", tokenizer, TaskOptions(max_seq_len=128, limit=6))
    scores = run(real_scorer, plan(real_scorer, prepared.requests, 1024))
    backend = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    theirs = HFLM(pretrained=real_scorer.model, tokenizer=backend, max_length=128, batch_size=4)
    right, instances = {}, []
    for level in ("high", "middle"):
        files = sorted((data / "race/test" / level).iterdir(), key=lambda f: int(f.stem))[:6]
        docs = [as_doc(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        for doc in docs:
            choices = preprocess_race.doc_to_choice(doc)
            text = preprocess_race.doc_to_text(doc)
            instances += [Instance(text, " " + choice) for choice in choices]
        right[level] = [preprocess_race.doc_to_target(doc) for doc in docs]
    expected = theirs.loglikelihood(instances, disable_tqdm=True)
    for (logprob, is_greedy), score in zip(expected, scores, strict=True):
        assert score.logprob == pytest.approx(logprob, rel=1e-5)
        assert score.is_greedy == is_greedy
    picks = [
        max(range(4), key=lambda i, at=at: expected[at + i][0]) for at in range(0, len(expected), 4)
    ]
    report = prepared.report(scores)
    hits = [pick == a for pick, a in zip(picks, right["high"] + right["middle"], strict=True)]
    assert report["high"] == sum(hits[:6]) / 6 and report["middle"] == sum(hits[6:]) / 6
    assert report["accuracy"] == sum(hits) / 12 and report["total"] == 12


def test_every_real_article_has_lm_evals_prompt(data):
    prepared = prepare(data / "race/test", TOKENIZER, TaskOptions(max_seq_len=1024))
    files = [
        file
        for level in ("high", "middle")
        for file in sorted((data / "race/test" / level).iterdir(), key=lambda f: int(f.stem))
    ]
    assert prepared.num_items == len(files)
    for file, one in zip(files, prepared.requests[::4], strict=True):
        text = preprocess_race.doc_to_text(as_doc(json.loads(file.read_text(encoding="utf-8"))))
        context = one.tokens[: len(one.tokens) - one.num_targets]
        assert context.tolist() == TOKENIZER.encode(text.rstrip())


def test_earlier_questions_stand_in_the_prompt_with_their_answers(tmp_path):
    write(tmp_path, "high", 1, ROW)
    (item,) = Renderer(TASK).items(read_test(tmp_path, TASK.data))
    assert item.prompts == (preprocess_race.doc_to_text(as_doc(ROW)),)
    assert item.prompts == (
        "Article: A cat sat.\n\nThe cat sat.\nQuestion: Who sat?\nAnswer: d\nWhy?",
    )


def test_the_highest_sum_is_the_answer_and_levels_are_counted_apart(tmp_path):
    write(tmp_path, "high", 10, ROW)
    write(tmp_path, "high", 9, ROW | {"answers": ["A", "A", "A"]})
    write(tmp_path, "middle", 1, ROW)
    prepared = prepare(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    third = [Score(x, False) for x in (-3.0, -2.0, -1.0, -4.0)]
    report = prepared.report(third * 3)
    assert (report["high"], report["middle"], report["accuracy"]) == (0.5, 1.0, 2 / 3)
    assert (report["correct"], report["total"], report["high_total"]) == (2, 3, 2)
    first = [Score(x, False) for x in (-1.0, -2.0, -3.0, -4.0)]
    assert prepared.report(first + third + third)["high"] == 1.0, "9 comes before 10"


def test_a_level_that_is_not_there_is_none(tmp_path):
    write(tmp_path / "test", "middle", 1, ROW)
    prepared = prepare(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    report = prepared.report([Score(-1.0, False)] * 4)
    assert report["high"] is None and report["high_total"] == 0 and report["middle"] == 0.0


@pytest.mark.parametrize(
    "row, message",
    [
        ("{\n,", "line 2: not JSON: Expecting property name enclosed in double quotes"),
        ("[]", "line 1: it is not a RACE article"),
        ({k: v for k, v in ROW.items() if k != "answers"}, "line 1: no 'answers' in it"),
        (ROW | {"answers": ["B", "D", "E"]}, "line 1: it is not a RACE article"),
        (ROW | {"answers": ["B"]}, "line 1: 3 questions, 3 options, 1 answers"),
        (ROW | {"options": [["a"]] * 3}, "line 1: 1 options for a question, 4 are needed"),
        (
            ROW | {"questions": [], "options": [], "answers": []},
            "line 1: 0 questions, 0 options, 0 answers",
        ),
    ],
)
def test_a_bad_article_is_refused_with_its_file(tmp_path, row, message):
    write(tmp_path, "high", 1, ROW)
    file = write(tmp_path, "middle", 2, row)
    with pytest.raises(MtcliError) as caught:
        prepare(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    assert caught.value.problems[0].message == f"{file}, {message}"


def test_a_folder_without_articles_is_refused(tmp_path):
    (tmp_path / "high").mkdir()
    with pytest.raises(MtcliError) as caught:
        prepare(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    assert caught.value.problems[0].message == f"{tmp_path} holds 0 RACE articles"
