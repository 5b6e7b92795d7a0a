"""lm-eval's own evaluator gives the same results through our model as through its backend."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import lm_eval
import pytest
import torch
from chats import save_model
from chats import tokenizer as tokenizer_of_chats
from huggingface_hub import get_session
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.harness import HarnessModel, evaluate_harness
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.tasks.registry import Evaluation, parse_tasks, task_runs
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.inference.chat import ChatPrompts
from mtcli.core.inference.model import open_model
from mtcli.core.runtime.launch import Runtime

pytestmark = pytest.mark.usefixtures("quiet_lm_eval")
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
"""
CHOICE = "doc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]"
ROLLING = "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"
KINDS = {"multiple_choice": ("answer", CHOICE), "loglikelihood_rolling": ('"{{long}}"', ROLLING)}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer of 257 ids as ours and as transformers'."""
    from transformers import PreTrainedTokenizerFast

    from mtcli.core.data.tokenize import END_OF_DOCUMENT, byte_tokenizer

    ours = byte_tokenizer()
    return ours, PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token=END_OF_DOCUMENT)


def runs(tasks, scorer, tokenizer, **options):
    """The tasks, bound to a scorer of 48 positions."""
    about = TaskOptions(48, **options), 64, Journal(None, "")
    return task_runs(parse_tasks(tasks), Evaluation(scorer, eval_tokenizer(tokenizer), *about))


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No hub, and a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def task_file(tmp_path, offline):
    rows = [
        {
            "question": f"Which of the {i} is it?",
            "choices": [f"the {'abcd'[k]}{'xyz' * (k + i % 3)}" for k in range(4)],
            "answer": i % 4,
            "long": f"Some text number {i} " * (1 + i * 2),
        }
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))

    def write(kind):
        target, more = KINDS[kind]
        file = tmp_path / "tasks" / f"{kind}.yaml"
        file.parent.mkdir(exist_ok=True)
        text = TASK.format(name=f"tiny_{kind}", file=data, kind=kind, target=target, more=more)
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("kind", ["multiple_choice", "loglikelihood_rolling"])
def test_lm_eval_gets_the_same_metrics_from_us_and_from_its_own_backend(
    kind, task_file, byte_scorer, tokenizer
):
    file = task_file(kind)
    ours, theirs = tokenizer
    (job,) = runs([f"lm_eval:{file}"], byte_scorer, ours, limit=6)
    done = []
    report = job.run(done.append)
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    backend = HFLM(pretrained=byte_scorer.model, tokenizer=theirs, max_length=48, batch_size=2)
    expected = simple_evaluate(
        backend, tasks=[f"tiny_{kind}"], task_manager=manager, limit=6, log_samples=False
    )["results"][f"tiny_{kind}"]
    metrics = {k.removesuffix(",none"): v for k, v in expected.items() if isinstance(v, float)}
    assert metrics and set(report) == {*metrics, "total"}
    for name, value in metrics.items():
        assert report[name] == pytest.approx(value, rel=1e-5), name
    assert report["total"] == 6 and sum(done) >= 6


def test_generated_texts_are_those_of_lm_evals_own_backend(tmp_path, offline, tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=257, n_positions=96, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    tokenizer[0].save(tmp_path / "model")
    opened = open_model(str(tmp_path / "model"), [], Runtime(0, 1, 0, 1, torch.device("cpu")))
    backend = HFLM(pretrained=theirs, tokenizer=tokenizer[1], max_length=96, batch_size=1)
    texts = ["Which is it?", "a", "long " * 30]
    plain = {"until": [], "max_gen_toks": 24, "do_sample": False}
    instances = [Instance(text, plain) for text in texts]
    whole = backend.generate_until(instances, disable_tqdm=True)
    stop = whole[0][5:7]
    stopped = {"until": [stop, "never said"], "max_gen_toks": 24, "do_sample": False}
    instances += [Instance(texts[0], stopped)]
    expected = [*whole, *backend.generate_until(instances[3:], disable_tqdm=True)]
    done = []
    of_eval = eval_tokenizer(tokenizer[0])
    model = HarnessModel(opened.scorer, of_eval, 64, done.append, opened.end_ids())
    assert model.generate_until(instances) == expected
    assert len(expected[3]) < len(expected[0]) and stop not in expected[3]
    assert sum(done) == 4


CHATTY = """task: chatty
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}, train: {file}}}
training_split: train
fewshot_split: train
test_split: test
output_type: {kind}
description: "Answer.\\n"
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
"""
GENERATED = (
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}\n'
    "metric_list: [{metric: exact_match}]"
)


@pytest.mark.parametrize(
    ("kind", "target", "more"),
    [("multiple_choice", "answer", CHOICE), ("generate_until", '"{{long}}"', GENERATED)],
)
def test_chats_have_solved_examples_as_turns_as_in_lm_eval(tmp_path, offline, kind, target, more):
    theirs = save_model(tmp_path / "model", max_position_embeddings=1024)
    theirs.generation_config.eos_token_id = tokenizer_of_chats().eos_token_id
    theirs.save_pretrained(tmp_path / "model")
    rows = [
        {"question": f"What is {i}?", "choices": ["a", "bc"], "answer": i % 2, "long": "xy"}
        for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "chatty.yaml"
    text = CHATTY.format(file=tmp_path / "rows.jsonl", kind=kind, target=target, more=more)
    file.write_text(text)
    opened = open_model(str(tmp_path / "model"), [], Runtime(0, 1, 0, 1, torch.device("cpu")))
    made = opened.require_tokenizer()
    chat = ChatPrompts(made, tmp_path / "model")
    of_eval = replace(eval_tokenizer(made), encode=chat.encode)
    ours = HarnessModel(opened.scorer, of_eval, 512, ends=opened.end_ids(), chat=chat)
    backend = HFLM(pretrained=theirs, tokenizer=tokenizer_of_chats(), max_length=1024)
    prompts, seen = {}, {}
    for name, model in (("ours", ours), ("theirs", backend)):
        model.apply_chat_template = noting(model.apply_chat_template, prompts.setdefault(name, []))
        model.generate_until = noting(model.generate_until, seen.setdefault(name, []))
    report = evaluate_harness(str(file), ours, limit=4, shots=2)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    expected = simple_evaluate(
        backend, tasks=["chatty"], task_manager=manager, limit=4, num_fewshot=2,
        apply_chat_template=True, fewshot_as_multiturn=True, log_samples=False,
    )["results"]["chatty"]  # fmt: skip
    assert prompts["ours"] == prompts["theirs"] and len(prompts["ours"][0].split("What is")) == 4
    assert seen["ours"] == seen["theirs"] and len(seen["ours"]) == (kind == "generate_until")
    metrics = {k.removesuffix(",none"): v for k, v in expected.items() if isinstance(v, float)}
    assert metrics
    for name, value in metrics.items():
        assert report[name] == pytest.approx(value, rel=1e-5), name


def noting(function, results):
    """The function, whose results are appended to a list."""

    def noted(*arguments, **options):
        results.append(function(*arguments, **options))
        return results[-1]

    return noted


class Instance:
    def __init__(self, *args):
        self.args = args


def test_an_unknown_name_a_missing_file_and_a_nameless_one_are_refused(
    tmp_path, byte_scorer, tokenizer, monkeypatch
):
    few = {"include_path": str(Path(lm_eval.__file__).parent / "tasks/hellaswag")}
    few |= {"include_defaults": False}  # all of lm-eval's task files take it 9 s
    manager = lambda **options: TaskManager(**(options or few))  # noqa: E731
    monkeypatch.setattr("mtcli.core.evaluate.harness.TaskManager", manager)
    model = HarnessModel(byte_scorer, eval_tokenizer(tokenizer[0]), 64)
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    for name, message, hint in (
        ("hellaswagg", "none is called 'hellaswagg'", "did you mean 'hellaswag'?"),
        (f"{tmp_path}/no.yaml", f"{tmp_path}/no.yaml does not exist", "YAML"),
        (f"{tmp_path}/nameless.yaml", f"{tmp_path}/nameless.yaml names 0 tasks", "task: NAME"),
    ):
        with pytest.raises(MtcliError) as caught:
            evaluate_harness(name, model, limit=None)
        assert message in caught.value.problems[0].message
        assert hint in caught.value.problems[0].hint


def test_a_task_whose_data_is_not_there_fails(task_file, byte_scorer, tokenizer, tmp_path):
    file = task_file("multiple_choice")
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(MtcliError) as caught:
        evaluate_harness(
            str(file), HarnessModel(byte_scorer, eval_tokenizer(tokenizer[0]), 64), limit=2
        )
    assert "lm-eval cannot run the task tiny_multiple_choice: " in caught.value.problems[0].message
    assert caught.value.code == 1


def test_a_hub_that_does_not_answer_is_no_unexpected_error(
    task_file, byte_scorer, tokenizer, monkeypatch
):
    client = sys.modules[type(get_session()).__module__.split(".")[0]]

    def refused(*_, **__):
        raise client.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr("datasets.load_dataset", refused)
    model = HarnessModel(byte_scorer, eval_tokenizer(tokenizer[0]), 64)
    with pytest.raises(MtcliError, match="Name or service not known") as caught:
        evaluate_harness(str(task_file("multiple_choice")), model, limit=2)
    assert caught.value.code == 1
    assert "check the network" in caught.value.problems[0].hint


def test_without_lm_eval_the_hint_names_the_extra(monkeypatch, byte_scorer, tokenizer):
    monkeypatch.setattr("mtcli.core.evaluate.tasks.registry.find_spec", lambda name: None)
    with pytest.raises(MtcliError) as caught:
        runs(["lm_eval:x"], byte_scorer, tokenizer[0])
    assert caught.value.problems[0].message == (
        "lm_eval:x needs lm-evaluation-harness, which is not installed"
    )
    assert caught.value.problems[0].hint == "pip install 'mtcli[eval]'"


def test_a_job_says_what_it_will_do_and_does_it(tmp_path, byte_scorer, tokenizer):
    file = tmp_path / "passages.jsonl"
    file.write_text('{"text": "a passage that ends here"}\n{"text": "and another one there"}\n')
    (job,) = runs([f"lambada={file}"], byte_scorer, tokenizer[0])
    done = []
    report = job.run(done.append)
    assert job.num_requests == sum(done) == report["total"] == 2
    # 23 and 20 bytes are read: one row each, padded to the longer
    assert job.summary == (
        "2 items, 2 requests, 46 tokens in 1 forward passes (43 without sharing)"
    )
