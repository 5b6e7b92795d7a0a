"""Tasks on the weights of a run: what `mtcli eval` has of its checkpoints, and no trace in it."""

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import BIASED, DROPPING, GPT, LLAMA, documents, metrics, run_config

from mtcli.core.checkpoint.opening import open_checkpoint
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


# Steps 1 and 2 of 4 x 8 tokens, 3 and 4 of 8 x 8, and 5 to 8 of 8 x 16.
PHASES = [
    *("phase.0.from_tokens=64", "phase.0.batch.global_batch_size=8"),
    *("phase.1.from_tokens=192", "phase.1.batch.seq_len=16", "phase.1.model.rope_theta=500.0"),
]
EVALUATED = {"steps": 8, "save_every": 1, "eval_every": 2, "eval_batches": 2, "keep_best": 2}


def phased(home, name, overrides=(), **fields):
    """A run of three phases with two validation sets and two tasks."""
    write_dataset(home / "other", documents(vocab=257, seed=3), token_dtype(257))
    specs, model = tasks_in(home), LLAMA | {"vocab_size": 257}
    tables = [
        {"task": specs[name], "every": every, "limit": LIMITS[name]}
        for name, every in (("lambada", 3), ("wikitext103", 2))
    ]
    valid = {"same": str(home / "data"), "other": str(home / "other")}
    data = {"train": [str(home / "data")], "valid": valid}
    train = SAVED | EVALUATED | {"output": str(home / name)} | fields
    config = run_config(model, overrides, data=data, train=train)
    return config.model_copy(update={"eval": tuple(EvalConfig(**table) for table in tables)})


def resumed(runtime, config):
    return train(config, runtime, resume=True, open_tasks=TrainingTasks)


def recorded(folder):
    rows = metrics(folder)
    return [
        {k: v for k, v in r.items() if "loss" in k or "valid" in k or "eval" in k} for r in rows
    ]


def test_phases_have_tasks_validation_sets_and_best_checkpoints_across_their_boundaries(home):
    config = phased(home, "run", PHASES)
    assert run_ranks(1, run, config) == [True]
    rows = recorded(home / "run")
    saved = home / "run" / "checkpoints"
    for step, task in ((3, "lambada"), (4, "wikitext103"), (6, "lambada"), (8, "wikitext103")):
        (reports, *_) = run_ranks(1, evaluated, saved / f"step-{step:08d}", home, [])
        figures = {k: v for k, v in rows[step - 1].items() if f"eval/{task}/" in k}
        of_task = {f"eval/{task}/{k}": v for k, v in reports[task].items() if isinstance(v, float)}
        assert figures == of_task and figures
    still = [
        "optimizer.lr=0.0",
        "optimizer.weight_decay=0.0",
        "train.steps=1",
        "train.eval_every=1",
    ]
    later = ["batch.global_batch_size=8", "batch.seq_len=16", "model.rope_theta=500.0"]
    for step, settings in ((2, []), (4, later[:1]), (6, later)):
        init = f'train.init="{saved}/step-{step:08d}"'
        again = phased(home, f"again-{step}", [*still, *settings, init])
        run_ranks(1, run, again)
        (row,) = recorded(home / f"again-{step}")
        for name in ("valid_loss", "valid_loss/same", "valid_loss/other"):
            assert row[name] == rows[step - 1][name], (step, name)
    by_loss = sorted((rows[step - 1]["valid_loss"], step) for step in (2, 4, 6, 8))
    assert (saved / "best").readlink().name == f"step-{by_loss[0][1]:08d}"
    for step in (2, 3, 4, 6):
        stopped = home / f"stopped-{step}"
        shutil.copytree(home / "run", stopped, symlinks=True)
        for folder in (stopped / "checkpoints").glob("step-*"):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
        assert run_ranks(1, resumed, phased(home, stopped.name, PHASES)) == [True]
        assert recorded(stopped) == rows
        ends = [open_checkpoint(folder) for folder in (home / "run", stopped)]
        assert ends[0].extra == ends[1].extra and ends[0].extra["validation"]["best"]
        for name in ends[0].names():
            assert torch.equal(ends[0].read(name), ends[1].read(name)), name


def test_a_run_that_does_not_improve_begins_no_other_phase(home):
    still = ["optimizer.lr=0.0", "optimizer.weight_decay=0.0", "train.patience=1"]
    config = phased(home, "run", [*PHASES, *still], eval_every=1)
    assert run_ranks(1, run, config) == [True]
    assert [row["phase"] for row in metrics(home / "run")] == [0, 0]
    lines = (home / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "stopped_early"
    assert run_ranks(1, resumed, config) == [True] and len(metrics(home / "run")) == 2
