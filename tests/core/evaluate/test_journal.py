"""A run that was ended goes on from its items, and two runs are compared by theirs."""

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from eval_data import make_data
from transformers import GPT2Config, GPT2LMHeadModel
from transformers_scorer import TransformersScorer, gpt2

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import config_of
from mtcli.core.data.tokenize import byte_tokenizer
from mtcli.core.evaluate.compared_rows import compared_rows
from mtcli.core.evaluate.comparison import compare_files
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.tasks.registry import Evaluation, parse_tasks, task_runs
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.inference.model import OpenModel


class Ended(Exception):
    pass


class Counting(TransformersScorer):
    """A scorer that counts what it scores, and ends after so many forward passes."""

    def __init__(self, passes=10**9):
        super().__init__(gpt2(vocab_size=257, n_positions=256, layers=1), 256)
        self.passes, self.scored = passes, 0

    def score(self, batch, after=None):
        if self.passes == 0:
            raise Ended
        self.passes -= 1
        self.scored += len(batch.rows)
        return super().score(batch, after)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    (folder / "wiki.test.tokens").write_text("one two three \n four five . " * 30)
    return folder


def evaluate(data, file, scorer=None, model="m", tasks=("piqa", "boolq")):
    scorer = scorer or Counting()
    journal = Journal(file, model)
    specs = [f"wikitext103={data}/wiki.test.tokens" if t == "wiki" else f"{t}={data}/{t}"
             for t in tasks]  # fmt: skip
    tokenizer = eval_tokenizer(byte_tokenizer())
    about = Evaluation(scorer, tokenizer, TaskOptions(256), 128, journal)
    runs = task_runs(parse_tasks(specs), about)
    reports = {run.name: run.run(lambda done: None) for run in runs}
    journal.finish(list(reports))
    return reports, scorer.scored, [run.summary for run in runs]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("tasks", [("piqa", "boolq"), ("wiki", "lambada")])
def test_a_run_that_was_ended_scores_the_rest_alone(tasks, data, tmp_path):
    whole, ended = tmp_path / "whole.jsonl", tmp_path / "ended.jsonl"
    expected, every, _ = evaluate(data, whole, tasks=tasks)
    partial = tmp_path / "ended.jsonl.partial"
    done = 0
    for _ in range(2):  # it may be ended twice
        scorer = Counting(passes=3)
        with pytest.raises(Ended):
            evaluate(data, ended, scorer, tasks=tasks)
        done += scorer.scored
        assert partial.exists() and not ended.exists()
        with partial.open("a") as file:
            file.write('{"task": "piqa", "hash": "half')
    reports, scored, summaries = evaluate(data, ended, tasks=tasks)
    assert 0 < scored <= every - done // 2 and "are kept from a run" in summaries[0]
    assert not partial.exists()
    for one, other in zip(lines(ended), lines(whole), strict=True):
        sums = other.pop("loglikelihoods")
        assert one.pop("loglikelihoods") == pytest.approx(sums, rel=1e-5)
        assert one == other
    for name, report in expected.items():
        numbers = {k: v for k, v in report.items() if isinstance(v, float)}
        assert reports[name] == report | {k: pytest.approx(v) for k, v in numbers.items()}


def test_items_of_another_model_are_not_taken(data, tmp_path):
    file = tmp_path / "items.jsonl"
    with pytest.raises(Ended):
        evaluate(data, file, Counting(passes=3))
    _, scored, summaries = evaluate(data, file, model="other")
    assert scored == evaluate(data, tmp_path / "fresh.jsonl")[1]
    assert "kept" not in summaries[0]


def test_every_item_has_its_line_in_order(data, tmp_path):
    file = tmp_path / "items.jsonl"
    reports, _, _ = evaluate(data, file)
    found = lines(file)
    assert [(one["task"], one["id"]) for one in found] == [
        (task, str(n)) for task in ("piqa", "boolq") for n in range(12)
    ]
    for task, report in reports.items():
        assert sum(one["correct"] for one in found if one["task"] == task) == report["correct"]
    first = found[0]
    assert first["pick"] == first["loglikelihoods"].index(max(first["loglikelihoods"]))
    assert len({one["hash"] for one in found}) == 24


def result(folder, name, right, task="piqa", **more):
    """A result whose items are right or not."""
    items = [
        {"task": task, "hash": f"h{n}", "id": str(n), "loglikelihoods": [-1.0, -2.0], "answer": 0,
         "pick": int(not one), "correct": one, **more}
        for n, one in enumerate(right)
    ]  # fmt: skip
    (folder / f"{name}.items.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    about = {"checkpoint": name, "items": f"{name}.items.jsonl", "tasks": {task: {}}}
    (folder / f"{name}.json").write_text(json.dumps(about))
    return str(folder / f"{name}.json")


def test_who_is_better_is_said_where_it_is_known(tmp_path):
    a = result(tmp_path, "a", [True] * 30 + [False] * 20)
    b = result(tmp_path, "b", [True] * 42 + [False] * 8)
    c = result(tmp_path, "c", [True] * 29 + [False] * 2 + [True] * 3 + [False] * 16)
    found = compare_files(a, b)["tasks"]["piqa"]
    assert (found["a"], found["b"], found["only_a"], found["only_b"]) == (0.6, 0.84, 0, 12)
    assert found["p_value"] == found["adjusted_p_value"] == pytest.approx(2 / 2**12)
    assert found["verdict"] == "b" and compare_files(b, a)["tasks"]["piqa"]["verdict"] == "a"
    close = compare_files(a, c)["tasks"]["piqa"]
    assert close["verdict"] == "tied" and close["p_value"] == 0.625
    assert (close["total"], close["other_prompts"]) == (50, 0)


def test_log_likelihoods_of_windows_are_compared_in_pairs(data, tmp_path):
    items = []
    for name, shift in (("a", 0.0), ("b", 0.1)):
        lines = [
            {"task": "wikitext103", "hash": "h", "id": f"window {n}", "num_tokens": 10,
             "loglikelihoods": [-30.0 - n % 7 + shift * (1 + n % 3)]}
            for n in range(60)
        ]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in lines))
        about = {"items": f"{name}.jsonl", "tasks": {"wikitext103": {}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(about))
        items.append(str(tmp_path / f"{name}.json"))
    found = compare_files(*items)["tasks"]["wikitext103"]
    assert (found["metric"], found["verdict"]) == ("loss", "b")
    assert found["difference"] == pytest.approx(-0.02)


def cloze(folder, name, right, losses):
    """A result of a cloze: the log-likelihood of each target, and whether it was the argmax."""
    path = result(folder, name, right, task="lambada")
    found = lines(folder / f"{name}.items.jsonl")
    for item, loss in zip(found, losses, strict=True):
        del item["answer"], item["pick"]
        item |= {"loglikelihoods": [-loss], "is_greedy": item["correct"]}
    text = "".join(json.dumps(item) + "\n" for item in found)
    (folder / f"{name}.items.jsonl").write_text(text)
    return path


def test_a_cloze_none_is_right_of_is_compared_by_its_losses(tmp_path):
    wrong, losses = [False] * 40, [8.0 + n % 5 for n in range(40)]
    a = cloze(tmp_path, "a", wrong, losses)
    b = cloze(tmp_path, "b", wrong, [x - 0.5 - n % 3 / 10 for n, x in enumerate(losses)])
    found = compare_files(a, b)["tasks"]["lambada"]
    assert (found["a"], found["b"], found["verdict"]) == (0.0, 0.0, "tied")
    assert found["minimum_detectable"] is None and found["reason"] == "no item differs"
    loss = found["loss"]
    steps = [-0.5 - n % 3 / 10 for n in range(40)]
    assert (loss["metric"], loss["verdict"], loss["total"]) == ("loss", "b", 40)
    assert loss["a"] == pytest.approx(10.0)
    assert loss["difference"] == pytest.approx(np.mean(steps))
    error = np.std(steps) / math.sqrt(40)
    assert loss["minimum_detectable"] == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    rows = compared_rows(compare_files(a, b))
    assert [row[1] for row in rows] == ["accuracy", "loss"]
    assert [row[-2:] for row in rows][0] == ["-", "tied: no item differs"]


def test_losses_of_one_passage_count_as_one(tmp_path):
    paths = [cloze(tmp_path, name, [False] * 6, [shift, 1.0] * 3)
             for name, shift in (("a", 2.0), ("b", 5.0))]  # fmt: skip
    for path in paths:
        file = tmp_path / path.replace(".json", ".items.jsonl")
        found = [item | {"cluster": "pq"[n % 2]} for n, item in enumerate(lines(file))]
        file.write_text("".join(json.dumps(item) + "\n" for item in found))
    loss = compare_files(*paths)["tasks"]["lambada"]["loss"]
    assert loss["interval"] == [0.0, 3.0]  # of six items it would be 0.5 to 2.5
    error = math.sqrt(2 * 4.5**2) / 6  # each passage's three items are 1.5 from the mean, alike
    assert loss["minimum_detectable"] == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)


def test_a_target_of_probability_0_is_a_broken_model(tmp_path):
    a, b = (cloze(tmp_path, name, [False], [x]) for name, x in (("a", 1.0), ("b", math.inf)))
    with pytest.raises(MtcliError, match="line 1: a log-likelihood is -inf"):
        compare_files(a, b)


def test_items_of_one_passage_or_alike_have_no_detectable_difference(tmp_path):
    right = [True, False, True]
    a = result(tmp_path, "a", right, cluster="p")
    b = result(tmp_path, "b", [True] * 3, cluster="p")
    found = compare_files(a, b)["tasks"]["piqa"]
    assert found["difference"] == pytest.approx(1 / 3) and found["minimum_detectable"] is None
    assert found["reason"] == "the differences have no spread"
    a, b = result(tmp_path, "a", [False] * 9), result(tmp_path, "b", [True] * 9)
    assert compare_files(a, b)["tasks"]["piqa"]["minimum_detectable"] is None
    assert compared_rows(compare_files(a, b))[0][-1] == "B"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("correct", "no", "line 1: correct is 'no', and not true or false"),
        ("correct", 1, "line 1: correct is 1, and not true or false"),
        ("answer", True, "line 1: answer is true, and not a whole number"),
        ("answer", "0", "line 1: answer is '0', and not a whole number"),
        ("picks", {"accuracy": 0.0}, "line 1: picks is"),
        ("picks", [0], "line 1: picks is"),
        ("cluster", 3, "line 1: cluster is 3, and not a text"),
        ("num_tokens", -1, "line 1: num_tokens is -1, and not a whole number"),
        ("loglikelihoods", [-1.0, math.nan], "line 1: a log-likelihood is nan"),
        ("loglikelihoods", ["-1"], "line 1: it is no item"),
    ],
)
def test_an_item_of_other_types_or_of_nan_is_refused(field, value, message, tmp_path):
    a, b = result(tmp_path, "a", [True]), result(tmp_path, "b", [True], **{field: value})
    with pytest.raises(MtcliError) as caught:
        compare_files(a, b)
    assert message in str(caught.value)


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_losses_that_are_no_numbers_are_refused_and_not_tied(odd, tmp_path):
    names = []
    for name, last in (("a", -2.0), ("b", odd)):
        items = [{"task": "wikitext103", "hash": "h", "id": f"window {n}", "loglikelihoods": [x]}
                 for n, x in enumerate([-1.0, last])]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
        about = {"items": f"{name}.jsonl", "tasks": {"wikitext103": {}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(about))
        names.append(str(tmp_path / f"{name}.json"))
    with pytest.raises(MtcliError, match=f"line 2: a log-likelihood is {odd}"):
        compare_files(*names)


def test_metrics_that_are_no_names_or_have_no_picks_and_mixed_items_are_refused(tmp_path):
    a, b = result(tmp_path, "a", [True]), result(tmp_path, "b", [True])
    for metric, message in (
        (["accuracy"], "the metric of 'piqa' is ['accuracy'], and no name"),
        ("accuracy_per_token", "line 1: it has no pick of 'accuracy_per_token'"),
    ):
        about = {"items": "b.items.jsonl", "tasks": {"piqa": {"metric": metric}}}
        (tmp_path / "b.json").write_text(json.dumps(about))
        with pytest.raises(MtcliError) as caught:
            compare_files(a, b)
        assert message in str(caught.value)
    result(tmp_path, "b", [True])
    item = {"task": "piqa", "hash": "h", "id": "0", "loglikelihoods": [-1.0]}
    (tmp_path / "b.items.jsonl").write_text(json.dumps(item) + "\n")
    with pytest.raises(MtcliError, match="right or wrong in one result, and not in the other"):
        compare_files(a, b)


def test_items_of_one_id_are_paired_in_order_in_linear_time(tmp_path):
    def count(number):
        """The lines of Python that a comparison runs."""
        path = result(tmp_path, str(number), [n % 2 == 0 for n in range(number)], id="same")
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            report = compare_files(path, path)["tasks"]["piqa"]
        finally:
            sys.settrace(before)
        assert report["total"] == number and report["only_a"] == 0
        return lines

    count(10)
    assert count(2_000) < 11 * count(200)  # 100 times where quadratic


def test_weights_of_one_size_and_time_are_told_apart_by_their_bytes(tmp_path):
    folder = tmp_path / "model"
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 257, "n_positions": 8}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)

    def identity():
        checkpoint = open_checkpoint(folder)
        config = config_of({"model": checkpoint.model.model_dump()})
        scorer = SimpleNamespace(config=config, precision="fp32")
        return OpenModel(scorer, None, checkpoint).identity()

    before, file = identity(), folder / "model.safetensors"
    assert identity() == before
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity() != before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "b.items.jsonl").write_text("{"), "b.items.jsonl is not JSON lines"),
        (lambda f: (f / "b.items.jsonl").write_text("[1]\n"), "line 1: it is no item"),
        (lambda f: (f / "b.items.jsonl").unlink(), "cannot be read"),
        (lambda f: (f / "b.json").write_text("{}"), "is no result of mtcli eval"),
        (lambda f: result(f, "b", [True], task="boolq"), "share 0 items: 1 items of piqa and"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(spoil, message, tmp_path):
    a, b = result(tmp_path, "a", [True]), result(tmp_path, "b", [True])
    spoil(tmp_path)
    with pytest.raises(MtcliError) as caught:
        compare_files(a, b)
    assert message in str(caught.value)
