"""Task files: rows become items and shots, picks follow each normalisation, bad files are told."""

import json
import random

import pytest
from eval_data import make_data, path_of

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.contamination import read_ngrams
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.items import Renderer, ask, read_items
from mtcli.core.evaluate.tasks.registry import TASKS, parse_tasks
from mtcli.core.evaluate.tasks.rows import Row, Split
from mtcli.core.evaluate.tasks.shots import Draw, draw_shots, render_shot
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task, task_names
from mtcli.core.runtime import sandbox

TOKENIZER = EvalTokenizer(lambda text: list(text.encode()), prefix_id=256)
OWN = """
version = 1
description = "capitals"
prompt = "{{country}}: "
choices = "cities"
answer = "right"
delimiter = ""
separator = "\\n"
normalisations = ["token", "character", "byte", "unconditional"]
unconditional = "A city: "

[data]
test = ["test.jsonl"]
train = ["train.jsonl"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, 24)
    return folder


@pytest.fixture
def own(tmp_path):
    """A task file, and a folder with two rows and three to learn from."""
    rows = [("Peru", ["Lima", "Zürich"], 0), ("Chile", ["Oslo", "Santiago"], "Santiago")]
    more = [("Kenya", ["Nairobi", "Rome"], 0), ("Japan", ["Bonn", "Tokyo"], 1)]
    (tmp_path / "own.toml").write_text(OWN)
    for name, part in (("test", rows), ("train", [*more, rows[0]])):
        lines = [
            json.dumps(dict(zip(("country", "cities", "right"), r, strict=True))) for r in part
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def text_of(request):
    """A request's (context, continuation)."""
    at = len(request.tokens) - request.num_targets
    return tuple(bytes(ids.tolist()).decode() for ids in (request.tokens[:at], request.tokens[at:]))


def test_every_shipped_task_reads_its_data_sets_own_layout(data):
    for name in task_names():
        options = TaskOptions(2048, shots=2)
        prepared = prepare_task(load_task(name), path_of(data, name), TOKENIZER, options)
        scores = [Score(-1.0 - i % 3, False) for i in range(len(prepared.requests))]
        report = prepared.report(scores)
        assert report["total"] == prepared.num_items > 3, name
        assert 0 <= report["interval"][0] <= report["accuracy"] <= report["interval"][1] <= 1
        assert report["shots_mean"] == 2.0 and report["metric"] in report


def test_a_task_of_ones_own_is_one_file(own):
    (spec,) = parse_tasks([f"{own}/own.toml={own}"])
    task = load_task(spec[0])
    assert task.name == "own"
    prepared = prepare_task(task, spec[1], TOKENIZER, TaskOptions(512))
    assert [text_of(one) for one in prepared.requests[:4]] == [
        ("Peru:", " Lima"), ("Peru:", " Zürich"), ("A city:", " Lima"), ("A city:", " Zürich"),
    ]  # fmt: skip
    # Zürich is likelier, and Lima less surprising after the question than without it
    scores = [Score(x, False) for x in (-6.0, -5.0, -8.0, -6.0, -3.0, -4.0, -9.0, -9.0)]
    picks = prepared.record(0, scores[:4])["picks"]
    assert (picks["accuracy"], picks["accuracy_unconditional"]) == (1, 0)
    report = prepared.report(scores)
    assert (report["accuracy"], report["accuracy_unconditional"]) == (0.0, 0.5)


def test_lengths_are_of_tokens_characters_and_bytes(own):
    task = load_task(f"{own}/own.toml")
    prepared = prepare_task(task, own, TOKENIZER, TaskOptions(512))
    # Zürich has 8 tokens with its blank, 6 characters and 7 bytes; Lima 5, 4 and 4
    names = ("accuracy_per_token", "accuracy_per_character", "accuracy_per_byte")
    for lima, expected in (
        (-3.4, (1, 1, 1)),
        (-3.2, (1, 0, 1)),
        (-3.0, (0, 0, 1)),
        (-2.6, (0,) * 3),
    ):
        picks = prepared.record(0, [Score(x, False) for x in (lima, -4.96, 0.0, 0.0)])["picks"]
        assert tuple(picks[name] for name in names) == expected


def test_as_many_shots_as_fit_stand_before_an_item(data):
    task = load_task("piqa")
    items, pool = read_items(task, data / "piqa", None, with_pool=True)
    counts = set()
    for item, drawn in zip(items, draw_shots("item", Draw(pool, 8, 1), items), strict=True):
        shots = [render_shot(task, TOKENIZER, shot) for shot in drawn]
        texts = [shot.text for shot in shots]
        longest = max(map(len, item.choices)) + len(item.prompts[0]) + 1
        for room in (longest - 1, longest + len(texts[0]) - 1, 300, 5000):
            asked = ask(task, item, shots, TOKENIZER, room)
            fitting = [k for k in range(9) if longest + len("".join(texts[:k])) - 1 <= room]
            assert asked.num_shots == max(fitting), room
            assert asked.context == "".join(texts[: asked.num_shots])
            counts.add(asked.num_shots)
    assert {0, 1, 8} <= counts


def test_the_limit_takes_the_first_items_of_each_group(data):
    prepared = prepare_task(load_task("hans"), data / "hans", TOKENIZER, TaskOptions(512, limit=2))
    report = prepared.report([Score(-1.0, False)] * len(prepared.requests))
    assert report["lexical_overlap_total"] == report["constituent_total"] == 2


def test_labels_may_be_in_the_rows_or_beside_them(data, tmp_path):
    task, folder = load_task("winogrande"), data / "winogrande"
    rows = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    expected = [item.answer for item in read_items(task, folder, None)[0]]
    for row in rows:
        del row["answer"]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "dev-labels.lst").write_text((folder / "dev-labels.lst").read_text())
    assert [item.answer for item in read_items(task, tmp_path, None)[0]] == expected
    assert expected == [int(line) - 1 for line in (folder / "dev-labels.lst").read_text().split()]


def spoilt(name, folder, data, rng):
    """A data set of piqa with one thing wrong, and what is said of it."""
    rows = (data / "piqa/valid.jsonl").read_text().splitlines()
    labels = (data / "piqa/valid-labels.lst").read_text().split()
    file = folder / "valid.jsonl"
    if name == "few labels":
        labels = labels[:-1]
        said = f"{folder}/valid-labels.lst has 23 labels, and valid.jsonl has 24 rows"
    elif name == "label":
        labels[3] = "2"
        said = f"{file}, line 4: the answer 2 is none of 2 choices"
    elif name == "word":
        labels[3] = "x"
        said = f"{file}, line 4: the answer -1 is none of 2 choices"
    elif name == "field":
        rows[5] = json.dumps({"goal": "g", "sol1": "a"})
        said = f"{file}, line 6: 'sol2' is undefined"
    elif name == "blank":
        rows[5] = json.dumps({"goal": "g", "sol1": "a", "sol2": " "})
        said = f"{file}, line 6: one of 2 choices is empty"
    elif name == "no labels":
        labels = None
        said = f"{file}, line 1: 'label' is undefined, and there is no valid-labels.lst"
    else:
        (folder / "test.jsonl").write_text(rows[0])
        return f"{folder} holds none of valid.jsonl"
    file.write_text("\n".join(rows))
    if labels is not None:
        (folder / "valid-labels.lst").write_text("\n".join(labels))
    return said


@pytest.mark.parametrize(
    "name", ["few labels", "label", "word", "field", "blank", "no labels", "no file"]
)
def test_a_bad_data_set_is_refused_with_file_and_line(name, tmp_path, data):
    said = spoilt(name, tmp_path, data, random.Random(0))
    with pytest.raises(MtcliError) as caught:
        prepare_task(load_task("piqa"), tmp_path, TOKENIZER, TaskOptions(512))
    assert caught.value.problems[0].message == said
    assert caught.value.problems[0].hint


def test_a_table_with_a_short_line_is_refused(tmp_path, data):
    text = (data / "hans/heuristics_evaluation_set.txt").read_text().splitlines()
    text[2] = text[2].rsplit("\t", 1)[0]
    (tmp_path / "heuristics_evaluation_set.txt").write_text("\n".join(text))
    with pytest.raises(MtcliError) as caught:
        prepare_task(load_task("hans"), tmp_path, TOKENIZER, TaskOptions(512))
    assert "line 3: 5 columns, and the header has 6" in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "", "version: field required"),
        ("version = 1", "version = 1\nprompts = 3", "prompts: extra inputs are not permitted"),
        ('answer = "right"', "", "without an answer it is a cloze"),
        ('"{{country}}: "', '["a", "b"]', "2 prompts take 1 choice"),
        ('choices = "cities"', 'choices = ["x"]', "nothing to choose from"),
        ('"{{country}}: "', '"{{country"', "own.toml: unexpected end of template"),
        ('"right"', '"right +"', "own.toml: unexpected"),
        (
            "delimiter",
            'metric = "accuracy_by_luck"\ndelimiter',
            "is none of accuracy, accuracy_per",
        ),
        ("delimiter", 'base = "piqq"\ndelimiter', "there is no task 'piqq' to be its base"),
        ("version = 1", "version = ", "is not TOML"),
        ('"{{country}}: "', '"{{country.__class__.__mro__}}"', "unsafe"),
    ],
)
def test_a_bad_task_file_is_refused(own, old, new, message):
    (own / "own.toml").write_text(OWN.replace(old, new))
    with pytest.raises(MtcliError) as caught:
        prepare_task(load_task(f"{own}/own.toml"), own, TOKENIZER, TaskOptions(512))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("{{ (country * 40) | regex_replace('(e|r|.)+$!', '') }}", "takes over 0.5 s of processor"),
        ("{{ '%2000000000d' % 1 }}", "takes over 512 MiB of memory"),
    ],
)
def test_a_task_that_never_ends_is_ended_by_name(own, new, said, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    (own / "own.toml").write_text(OWN.replace("{{country}}", new))
    with pytest.raises(MtcliError) as caught:
        prepare_task(load_task(f"{own}/own.toml"), own, TOKENIZER, TaskOptions(512))
    (problem,) = caught.value.problems
    assert f"{own}/test.jsonl, line 1: {own}/own.toml {said}" in problem.message
    assert problem.hint and caught.value.code == 2


def test_a_task_of_too_many_loops_is_refused_by_name(own):
    loops = "".join(f"{{% for i{n} in range(9) %}}" for n in range(25)) + "{% endfor %}" * 25
    (own / "own.toml").write_text(OWN.replace("{{country}}", loops))
    with pytest.raises(MtcliError, match="own.toml: too many statically nested blocks") as caught:
        prepare_task(load_task(f"{own}/own.toml"), own, TOKENIZER, TaskOptions(512))
    assert caught.value.problems[0].hint


def test_rows_that_are_sent_ahead_keep_their_order_and_the_first_bad_one_is_named(own):
    renderer = Renderer(load_task(str(own / "own.toml")))
    good = {"country": "Peru" * 300, "cities": ["Lima", "Oslo"], "right": 0}
    rows = [Row(good | {"country": f"{number} Peru"}, own / "x", number) for number in range(400)]
    found = renderer.items(Split(rows, own))
    assert [item.prompts for item in found] == [(f"{row.line} Peru: ",) for row in rows]
    deep = []
    for _ in range(10**5):  # JSON cannot hold it
        deep = [deep]
    for fields, line in (({"country": "Chile"}, 250), ({**good, "more": deep}, 251)):
        rows[line] = Row(fields, own / "x", line)
    for line, said in ((250, "cities"), (251, "nested too deeply")):
        with pytest.raises(MtcliError, match=f"line {line}: .*{said}"):
            Renderer(load_task(str(own / "own.toml"))).items(Split(rows, own))
        rows[line] = rows[0]


def test_a_file_may_go_on_from_a_task_of_ours(own, data):
    (own / "own.toml").write_text('base = "piqa"\nversion = 9\nprompt = "{{goal}} ->"\n')
    task = load_task(f"{own}/own.toml")
    assert (task.name, task.version, task.data) == ("own", 9, load_task("piqa").data)
    prepared = prepare_task(task, data / "piqa", TOKENIZER, TaskOptions(512))
    assert text_of(prepared.requests[0])[0].endswith(" ->")


def test_names_of_tasks_are_those_of_their_files():
    assert set(task_names()) == set(TASKS) - {"wikitext103"}
    assert all(load_task(name).name == name for name in task_names())


def test_accuracies_of_clean_and_contaminated_items_are_told_apart(own, tmp_path):
    report = {"contamination": {"own": {"documents": 1, "shown": [{"ngrams": ["lima zürich"]}]}}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    rows = (tmp_path / "test.jsonl").read_text().replace('"Lima", ', '"The Lima, Z\u00fcrich", ')
    (tmp_path / "test.jsonl").write_text(rows)
    ngrams = read_ngrams(str(tmp_path / "report.json"))
    options = TaskOptions(512, contaminated=ngrams)
    prepared = prepare_task(load_task(f"{own}/own.toml"), own, TOKENIZER, options)
    scores = [Score(x, False) for x in (-1.0, -2.0, 0.0, 0.0, -1.0, -2.0, 0.0, 0.0)]
    found = prepared.report(scores)
    assert (found["contaminated"], found["contaminated_total"]) == (1.0, 1)
    assert (found["clean"], found["clean_total"]) == (0.0, 1)
    assert prepared.record(0, scores[:4])["contaminated"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "lists no contamination"),
        ('{"contamination": {"x": {"shown": [{"ngrams": [3]}]}}}', "one of 1 n-grams is no text"),
    ],
)
def test_a_file_that_is_no_report_is_refused(text, message, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(MtcliError) as caught:
        read_ngrams(str(tmp_path / "report.json"))
    assert message in str(caught.value)


def test_of_equal_sums_the_first_choice_is_picked(own):
    prepared = prepare_task(load_task(f"{own}/own.toml"), own, TOKENIZER, TaskOptions(512))
    record = prepared.record(0, [Score(-1.0, False)] * 4)
    assert record["pick"] == 0


def test_an_item_with_another_delimiter_has_another_hash(own):
    task = load_task(f"{own}/own.toml")
    other = task.model_copy(update={"delimiter": " "})
    both = (prepare_task(one, own, TOKENIZER, TaskOptions(512)).hashes for one in (task, other))
    assert all(a != b for a, b in zip(*both, strict=True))
