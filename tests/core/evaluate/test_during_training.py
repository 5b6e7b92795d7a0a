"""Tasks on the weights of a run: what `mtcli eval` has of its checkpoints, and no trace in it."""

import gc
import json
from pathlib import Path

import pytest
import torch
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import BIASED, DROPPING, GPT, LLAMA, documents, metrics, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import EvalConfig
from mtcli.core.data.indexed import token_dtype
from mtcli.core.data.tokenize import byte_tokenizer
from mtcli.core.evaluate.during_training import TrainingTasks
from mtcli.core.evaluate.request import EvalRequest
from mtcli.core.evaluate.run import evaluate
from mtcli.core.evaluate.tasks.registry import parse_tasks, require_training_tasks
from mtcli.core.training.loop import train
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

PASSAGES = ["The cat sat on the mat", "A dog ran. It hid and\n\n then it ate", "one two"]
WIKI = " = A title = \n \n Some words , and others ; and so on . \n = Next = \n More @-@ words \n"
LIMITS = {"lambada": 2, "wikitext103": 0}
SAVED = {"steps": 4, "save_every": 2, "keep": 0, "save_minutes": 0}


@pytest.fixture
def home(tmp_path):
    """A folder of training data with a tokenizer of bytes, and of two tasks."""
    write_dataset(tmp_path / "data", documents(vocab=257), token_dtype(257))
    byte_tokenizer().save(tmp_path / "data.tokenizer")
    lines = [json.dumps({"text": text}) for text in PASSAGES]
    (tmp_path / "lambada.jsonl").write_text("\n".join(lines))
    (tmp_path / "wiki.test.tokens").write_text(WIKI)
    return tmp_path


def tasks_in(home):
    files = {"lambada": "lambada.jsonl", "wikitext103": "wiki.test.tokens"}
    return {name: f"{name}={home / file}" for name, file in files.items()}


def config_for(home, name, model, tables=(), **sections):
    sections["train"] = SAVED | {"output": str(home / name)} | sections.get("train", {})
    model = model | DROPPING | {"vocab_size": 257}
    config = run_config(model, data={"train": [str(home / "data")]}, **sections)
    return config.model_copy(update={"eval": tuple(EvalConfig(**table) for table in tables)})


def run(runtime, config):
    return train(config, runtime, resume=False, open_tasks=TrainingTasks if config.eval else None)


def evaluated(runtime, checkpoint, home, overrides):
    """The reports of `mtcli eval` of a checkpoint, by task."""
    reports = {}
    for name, spec in tasks_in(home).items():
        request = EvalRequest(
            checkpoint=str(checkpoint),
            ensemble=(),
            tasks=tuple(parse_tasks([spec])),
            overrides=tuple(overrides),
            shots=0,
            shots_per="item",
            seed=1234,
            limit=LIMITS[name] or None,
            overlap=None,
            batch_tokens=None,
            tokenizer=None,
            contaminated=None,
            items=home / "items.jsonl",
            json_out=None,
        )
        result = evaluate(request, runtime, lambda line: None)
        reports |= result["tasks"] if result else {}
    return reports


LAYOUTS = {
    "one rank": (1, GPT, {}, []),
    "bf16": (1, LLAMA, {"train": {"precision": "bf16"}}, ["train.precision=bf16"]),
    "tp": (2, LLAMA, {"parallel": {"tp": 2}}, ["parallel.tp=2"]),
    "pp": (
        2,
        GPT,
        {"parallel": {"pp": 2, "vpp": 2, "schedule": "interleaved"}},
        ["parallel.pp=2", "parallel.vpp=2", "parallel.schedule=interleaved"],
    ),
    "cp": (2, LLAMA, {"parallel": {"cp": 2}}, []),
    "ep": (2, BIASED, {"parallel": {"ep": 2, "zero": 1}}, ["parallel.ep=2"]),
    "replicas that differ": (2, GPT, {"sync": {"method": "local", "period": 3}}, []),
    "grid": (
        4,
        LLAMA,
        {"parallel": {"tp": 4, "tp_mode": "2d"}, "batch": {"micro_batch_size": 2}},
        ["parallel.tp=4", "parallel.tp_mode=2d"],
    ),
    "zero 3 in bf16": (
        2,
        GPT,
        {"parallel": {"zero": 3}, "train": {"precision": "bf16"}},
        ["train.precision=bf16"],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tasks_have_the_results_of_the_checkpoint_and_leave_the_run_as_it_was(home, layout):
    world, model, sections, overrides = LAYOUTS[layout]
    tables = [
        {"task": spec, "every": 2, "limit": LIMITS[name]} for name, spec in tasks_in(home).items()
    ]
    config = config_for(home, "run", model, tables, **sections)
    assert run_ranks(world, run, config) == [True] * world
    rows = {row["step"]: row for row in metrics(home / "run")}
    figures = {s: {k: v for k, v in row.items() if "eval/" in k} for s, row in rows.items()}
    assert not figures[1] and not figures[3]
    for step in (2, 4):
        folder = home / "run" / "checkpoints" / f"step-{step:08d}"
        (reports, *_) = run_ranks(world, evaluated, folder, home, overrides)
        wanted = {
            f"eval/{task}/{metric}": value
            for task, report in reports.items()
            for metric, value in report.items()
            if isinstance(value, float)
        }
        assert "eval/lambada/accuracy" in wanted and "eval/wikitext103/nll_sum" in wanted
        assert figures[step] == wanted
    assert figures[2] != figures[4], "weights have moved"

    plain = config_for(home, "plain", model, **sections)
    run_ranks(world, run, plain)
    same = ("loss", "grad_norm", "sync_bytes")
    for row in metrics(home / "plain"):
        assert {key: row[key] for key in same} == {key: rows[row["step"]][key] for key in same}


def held_bytes():
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def memory(runtime, config, tokenizer):
    """Bytes of tensors (before tasks are opened, when they are, after they have run)."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    before = held_bytes()
    tasks = TrainingTasks(trainer, Path(tokenizer))
    opened = held_bytes()
    tasks(2)
    return before, opened, held_bytes()


@pytest.mark.parametrize("zero", [0, 3])
def test_tasks_hold_no_memory_between_evaluations(home, zero):
    tables = [{"task": spec, "every": 2} for spec in tasks_in(home).values()]
    config = config_for(home, "run", GPT, tables, parallel={"zero": zero})
    for before, opened, after in run_ranks(2, memory, config, str(home / "data.tokenizer")):
        assert before > 4 * 257 * 16 and before == opened == after


def test_every_wrong_task_is_told_before_the_run(home):
    good = tasks_in(home)["lambada"]
    specs = ["lambda=x", good, good, "race", f"piqa={home}/none"]
    with pytest.raises(MtcliError) as raised:
        require_training_tasks([EvalConfig(task=spec, every=5) for spec in specs])
    told = [(problem.field, problem.message) for problem in raised.value.problems]
    assert told == [
        ("eval.0.task", "there is no task 'lambda'"),
        ("eval.2.task", "lambada is the task of 2 tables"),
        ("eval.3.task", "race has no path"),
        ("eval.4.task", f"piqa: {home}/none does not exist"),
    ]


def refused(runtime, config):
    try:
        run(runtime, config)
    except MtcliError as error:
        return str(error)


def test_a_file_without_items_and_data_without_a_tokenizer_end_the_run_before_it_begins(home):
    (home / "lambada.jsonl").write_text("{\n")
    (home / "wiki.test.tokens").write_text("")
    tables = [{"task": spec, "every": 2} for spec in tasks_in(home).values()]
    config = config_for(home, "run", GPT, tables)
    (text,) = run_ranks(1, refused, config)
    assert "eval.0.task: " in text and "eval.1.task: " in text
    for file in (home / "data.tokenizer").iterdir():
        file.unlink()
    (text,) = run_ranks(1, refused, config)
    assert "name no tokenizer" in text and "data.tokenizer" in text
