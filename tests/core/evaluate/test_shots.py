"""Shots: which examples stand before which item, by the way in which they are drawn."""

import json
from random import Random

import pytest
from eval_data import make_data

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.items import read_items
from mtcli.core.evaluate.tasks.shots import Draw, draw_shots
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task

TOKENIZER = EvalTokenizer(lambda text: list(text.encode()), prefix_id=256)
WAYS = ("item", "task", "lm-eval")
OWN = """
version = 1
description = "sums"
prompt = "{{sum}} ="
choices = "results"
answer = "right"
separator = "\\n"
[data]
test = ["test.jsonl"]
train = ["train.jsonl"]
"""


def sums(low, high):
    return [{"sum": f"{n}+{n}", "results": [f"{2 * n}", "x"], "right": 0} for n in range(low, high)]


@pytest.fixture
def folder(tmp_path):
    """A task of sums: 6 items, and 30 examples of which the first is an item, too."""
    (tmp_path / "own.toml").write_text(OWN)
    write(tmp_path / "test.jsonl", sums(0, 6))
    write(tmp_path / "train.jsonl", sums(5, 35))
    return tmp_path


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def contexts(folder, number=3, **options):
    """The lines of shots before each item, by the item's prompt."""
    task = load_task(f"{folder}/own.toml")
    prepared = prepare_task(task, folder, TOKENIZER, TaskOptions(512, shots=number, **options))
    texts = [bytes(request.tokens.tolist()).decode() for request in prepared.requests]
    return {lines[-1].split(" =")[0]: lines[:-1] for lines in map(str.splitlines, texts)}


def by_hand(random, pool, item, number):
    drawn = [n for n in random.sample(pool, number) if n != item]
    return [f"{n}+{n} = {2 * n}" for n in drawn[:3]]


def test_each_item_has_a_draw_of_its_own(folder):
    pool = sorted(range(5, 35), key=lambda n: f"{n}+{n} =")
    expected = {
        f"{n}+{n}": by_hand(Random(f"1234\0{n}+{n} =\0{2 * n}\0x"), pool, n, 3 + 8)
        for n in range(6)
    }
    assert contexts(folder) == expected
    assert len({tuple(lines) for lines in expected.values()}) == 6
    assert contexts(folder, seed=7) != expected


def test_neither_limit_nor_order_changes_an_items_shots(folder):
    expected = contexts(folder)
    assert contexts(folder, limit=2) == {key: expected[key] for key in ("0+0", "1+1")}
    for name in ("test", "train"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(reversed(lines)))
    assert contexts(folder) == expected


def test_one_draw_serves_a_task_and_another_stands_in_for_the_item(folder):
    random = Random(1234).sample(range(5, 35), 3 + 8)
    found = contexts(folder, shots_per="task")
    for item in range(6):
        drawn = [n for n in random if n != item][:3]
        assert found[f"{item}+{item}"] == [f"{n}+{n} = {2 * n}" for n in drawn]


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("copies", [0, 3])
def test_one_generator_draws_for_item_after_item_as_lm_evals(spare, copies, folder):
    from lm_eval.api.samplers import ContextSampler

    if spare:
        (folder / "own.toml").write_text("spare_shot = true\n" + OWN)
    pool = sums(5, 35) + sums(5, 6) * copies
    write(folder / "train.jsonl", pool)
    sampler = ContextSampler(pool, rnd=1234)
    expected = {
        row["sum"]: [
            f"{shot['sum']} = {shot['results'][0]}"
            for shot in sampler.sample(29, eval_doc=row if spare else None)
        ]
        for row in sums(0, 6)
    }
    assert contexts(folder, 29, shots_per="lm-eval") == expected
    assert ("5+5 = 10" in expected["5+5"]) is not spare


@pytest.mark.parametrize("per", WAYS)
def test_items_that_are_drawn_from_never_are_their_own_shots(per, folder):
    (folder / "train.jsonl").unlink()
    for seed in range(4):
        for item, lines in contexts(folder, 5, shots_per=per, seed=seed).items():
            assert len(set(lines)) == 5 and not any(line.startswith(f"{item} ") for line in lines)


def test_an_item_has_its_shots_where_most_examples_are_of_its_passage(folder):
    (folder / "own.toml").write_text('cluster = "results[1]"\n' + OWN)
    others = [row | {"results": [row["results"][0], "y"]} for row in sums(100, 103)]
    write(folder / "train.jsonl", sums(10, 60) + others)
    for lines in contexts(folder).values():
        assert sorted(lines) == ["100+100 = 200", "101+101 = 202", "102+102 = 204"]


def test_passages_are_kept_apart_with_many_examples(tmp_path):
    make_data(tmp_path, 24)
    (tmp_path / "boolq/train.jsonl").unlink()
    items, pool = read_items(load_task("boolq"), tmp_path / "boolq", None, with_pool=True)
    for per in ("item", "task"):
        for item, shots in zip(items, draw_shots(per, Draw(pool, 6, 1), items), strict=True):
            assert len(shots) == 6 and item.cluster not in {shot.cluster for shot in shots}


@pytest.mark.parametrize(
    ("per", "covers"),
    [("item", "items and shots"), ("task", "items, given these shots")],
)
def test_a_report_says_how_shots_were_drawn_and_what_its_interval_covers(per, covers, folder):
    task, options = load_task(f"{folder}/own.toml"), TaskOptions(512, shots=2, shots_per=per)
    prepared = prepare_task(task, folder, TOKENIZER, options)
    report = prepared.report([Score(-1.0, False)] * 12)
    expected = {"shots": 2, "shots_per": per, "interval_covers": covers, "shots_mean": 2.0}
    expected |= {"shots_min": 2, "shots_from": f"{folder}/train.jsonl"}
    assert expected.items() <= report.items()
    bare = prepare_task(task, folder, TOKENIZER, TaskOptions(512, shots_per=per))
    assert not {"shots_per", "interval_covers"} & bare.report([Score(-1.0, False)] * 12).keys()


def test_an_ended_run_goes_on_with_shots_drawn_alike_alone(folder):
    task = load_task(f"{folder}/own.toml")
    hashes = {
        per: prepare_task(task, folder, TOKENIZER, TaskOptions(512, shots=3, shots_per=per)).hashes
        for per in WAYS
    }
    again = prepare_task(task, folder, TOKENIZER, TaskOptions(512, shots=3))
    assert again.hashes == hashes["item"]
    assert not set(hashes["item"]) & set(hashes["task"]) | set(hashes["item"]) & set(
        hashes["lm-eval"]
    )


def test_a_file_of_one_example_has_none_for_itself(folder):
    (folder / "train.jsonl").unlink()
    write(folder / "test.jsonl", sums(3, 4))
    with pytest.raises(MtcliError, match="1 example, itself the item"):
        contexts(folder)
