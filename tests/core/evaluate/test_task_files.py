"""Published tasks as data: lm-eval's own figures on the same model, items and shots."""

import json
from functools import cache
from pathlib import Path

import lm_eval
import pytest
from eval_data import make_data, path_of
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from mtcli.core.data.tokenize import END_OF_DOCUMENT, byte_tokenizer
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task

pytestmark = pytest.mark.usefixtures("quiet_lm_eval")
ROOMY = 2048
SHOTS = 2
THEIRS = Path(lm_eval.__file__).parent / "tasks"
CHARACTERS = "accuracy_per_character"
# Of each task: the YAML file of lm-eval's, its files here, and a row as the hub has it
REFERENCES = {
    "piqa": ("piqa/piqa.yaml", "{part}.jsonl", {}),
    "boolq": ("super_glue/boolq/default.yaml", "{part}.jsonl", {"label": int}),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag_{part}.jsonl", {}),
    "winogrande": ("winogrande/default.yaml", "{part}.jsonl", {}),
    "anli_r2": ("anli/anli_r2.yaml", "R2/{part}.jsonl", {"label": "enc".index}),
    "wic": ("super_glue/wic/default.yaml", "{part}.jsonl", {"label": int}),
    "lambada_cloze": ("lambada_cloze/lambada_standard_cloze.yaml", "lambada_{part}.jsonl", {}),
    "race": ("race/race.yaml", "", {}),
}
PARTS = {
    "piqa": ("valid", "train"), "winogrande": ("dev", "train_xl"), "anli_r2": ("dev", "train"),
    "lambada_cloze": ("test", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def model():
    """A random model of bytes with room for shots."""
    from transformers_scorer import TransformersScorer, gpt2

    return TransformersScorer(gpt2(vocab_size=257, n_positions=ROOMY, layers=1), ROOMY)


@pytest.fixture(scope="module")
def backend(model):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend, eos_token=END_OF_DOCUMENT
    )
    return HFLM(pretrained=model.model, tokenizer=theirs, max_length=ROOMY, batch_size=4)


@cache
def reference(task):
    return load_yaml(THEIRS / REFERENCES[task][0])


def rows_of(data, task, part):
    """A part's rows as lm-eval's data set on the hub has them."""
    if task == "race":
        return list(map(json.dumps, race_rows(data / "race/test/high")))
    file = path_of(data, task) / REFERENCES[task][1].format(part=part)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    labels = file.with_name(f"{part}-labels.lst")
    for number, row in enumerate(rows):
        if task == "piqa":
            row["label"] = int(labels.read_text().split()[number])
        if task == "anli_r2":
            row["premise"] = row["context"]
        for key, convert in REFERENCES[task][2].items():
            row[key] = convert(row[key])
    return list(map(json.dumps, rows))


def race_rows(folder):
    for file in sorted(folder.iterdir(), key=lambda file: int(file.stem)):
        row = json.loads(file.read_text())
        found = zip(row["questions"], row["options"], row["answers"], strict=True)
        problems = [{"question": q, "options": o, "answer": a} for q, o, a in found]
        yield {"article": row["article"], "problems": str(problems)}


def theirs(task, rows, pool, folder, backend):
    """lm-eval's metrics, and log-likelihoods by item, of its task on local rows; its own sampler
    draws SHOTS of the pool where there is one."""
    config = dict(reference(task)) | {"dataset_path": "json", "dataset_name": None, "tag": None}
    items_split = "test_split" if config.get("test_split") else "validation_split"
    config |= dict.fromkeys(("test_split", "validation_split", "training_split"))
    config |= {items_split: "items"} | ({"training_split": "pool"} if pool else {})
    config |= {"num_fewshot": SHOTS} if pool else {}
    files = {}
    for name, lines in {"items": rows, "pool": pool}.items():
        if lines:
            files[name] = str(folder / f"{name}.jsonl")
            Path(files[name]).write_text("\n".join(lines))
    config |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(backend, tasks=[config], task_manager=manager, bootstrap_iters=0)
    samples = sorted(found["samples"][config["task"]], key=lambda sample: sample["doc_id"])
    sums = [[answer[0] for answer in sample["filtered_resps"]] for sample in samples]
    return found["results"][config["task"]], sums


def ours(task, path, model, num_shots):
    tokenizer = eval_tokenizer(byte_tokenizer())
    options = TaskOptions(ROOMY, shots=num_shots, shots_per="lm-eval")
    prepared = prepare_task(load_task(task), path, tokenizer, options)
    scores = run(model, plan(model, prepared.requests, 4096))
    spans = zip([0, *prepared.ends[:-1]], prepared.ends, strict=True)
    records = [prepared.record(n, scores[a:b]) for n, (a, b) in enumerate(spans)]
    return prepared.report(scores), records


# lm-eval draws the shots of race and of lambada from the items themselves.
SHOTS_OF = dict.fromkeys(REFERENCES, SHOTS) | {"race": 0, "lambada_cloze": 0}


@pytest.mark.parametrize(("task", "num_shots"), [("piqa", 0), *SHOTS_OF.items()])
def test_figures_are_lm_evals_own(task, num_shots, data, model, backend, tmp_path):
    part, train = PARTS.get(task, ("val", "train"))
    pool = rows_of(data, task, train) if num_shots else []
    report, records = ours(task, path_of(data, task), model, num_shots)
    expected, sums = theirs(task, rows_of(data, task, part), pool, tmp_path, backend)
    records = [one for one in records if task != "race" or one["group"] == "high"]
    assert len(records) == len(sums)
    for record, found in zip(records, sums, strict=True):
        assert record["loglikelihoods"] == pytest.approx(found, rel=1e-5)
    assert report["high" if task == "race" else "accuracy"] == expected["acc,none"]
    if "acc_norm,none" in expected:
        assert report[CHARACTERS] == expected["acc_norm,none"]
    if "perplexity,none" in expected:
        assert report["perplexity"] == pytest.approx(expected["perplexity,none"], rel=1e-4)
