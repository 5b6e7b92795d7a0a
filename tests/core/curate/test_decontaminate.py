"""Decontamination against Megatron's own way: a scan of words from left to right."""

import gzip
import json
import random
import re

import pytest
import zstandard
from corpora import refusal, removed, shards, write_jsonl

from mtcli.core.curate.report import why
from mtcli.core.evaluate.contamination import read_ngrams

STAGE = ["decontaminate"]


def sentences(source, count):
    """Sentences of words that no other text has."""
    made = []
    for _ in range(count):
        words = [f"w{source.randrange(10**9)}" for _ in range(source.randrange(6, 14))]
        made.append(" ".join(words).capitalize() + source.choice(".!?"))
    return " ".join(made)


def cut_by_hand(text, grams):
    """Megatron-LM's filter of n-grams: (pieces of more than 200 characters, cuts)."""
    pieces, cuts = [], 0
    while True:
        words = [(m.group(), m.start(), m.end()) for m in re.finditer(r"\w+", text.lower())]
        places = (
            (words[i][1], words[i + n - 1][2])
            for i in range(len(words))
            for n in range(8, 14)
            if " ".join(w for w, _, _ in words[i : i + n]) in grams and i + n <= len(words)
        )
        found = next(places, None)
        if found is None:
            return [*pieces, text] if len(text) > 200 or not cuts else pieces, cuts
        cuts += 1
        start, stop = found[0] - 200, found[1] + 200
        while start > 0 and text[start] not in ".!?":
            start -= 1
        if start > 0 and start + 1 > 200:
            pieces.append(text[: start + 1])
        while stop < len(text) and text[stop] not in ".!?":
            stop += 1
        text = text[stop + 1 :]


@pytest.mark.parametrize("place", ["start", "middle", "end", "twice", "accents"])
def test_a_planted_n_gram_is_cut_out_with_what_stands_around_it(place, run, tmp_path):
    source = random.Random(place)
    task = "Of all the things that he had seen, this (one) was by far the STRANGEST: truly."
    gram = " ".join(re.findall(r"\w+", task.lower())[2:15])
    before, after = sentences(source, 30), sentences(source, 30)
    text = {
        "start": f"{task} {after}",
        "middle": f"{before} {task.upper()} {after}",
        "end": f"{before} {task}",
        "twice": f"{before} {task} {after} {task} {sentences(source, 30)}",
        "accents": f"Été à la plage — très bien. {before} {task} {after}",
    }[place]
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"text": task}])
    clean = sentences(source, 20)
    path = write_jsonl(
        tmp_path / "in.jsonl", [{"id": "x", "text": text, "k": 1}, {"id": "y", "text": clean}]
    )
    out = run(path, stages=STAGE, settings=[f"decontaminate.tasks=['{tasks}']"])
    words = re.findall(r"\w+", task.lower())
    grams = {" ".join(words[i : i + 13]) for i in range(len(words) - 12)}
    pieces, cuts = cut_by_hand(text, grams)
    *kept, untouched = shards(out)
    names = ["x"] if len(pieces) == 1 else [f"x#{n + 1}" for n in range(len(pieces))]
    assert kept == [
        {"id": name, "text": piece.strip(), "source": "in", "k": 1}
        for name, piece in zip(names, pieces, strict=True)
    ]
    assert untouched["text"] == clean
    report = json.loads((out / "report.json").read_text())
    assert report["documents"] == report["stages"][0]["documents_out"] == len(pieces) + 1
    stage = report["stages"][0]
    assert (stage["documents_dropped"], stage["documents_cut"]) == (0, 1)
    assert stage["pieces"] == len(pieces)
    words = f"1 cut into {len(pieces)} piece{'s' * (len(pieces) > 1)} around texts of tasks"
    assert why(stage) == words and words in (out / "report.html").read_text()
    assert report["stages"][0]["bytes_out"] == sum(
        len(one["text"].encode()) for one in (*kept, untouched)
    )
    assert all(gram not in " ".join(re.findall(r"\w+", p.lower())) for p in pieces)
    (told,) = report["contamination"][str(tasks)]["shown"]
    assert (told["id"], told["cuts"], told["dropped"]) == ("x", cuts, False)
    assert set(told["ngrams"]) <= grams == set(report["contamination"][str(tasks)]["ngrams"])


def test_random_texts_are_cut_as_by_hand(run, tmp_path):
    source = random.Random(4)
    questions = [" ".join(f"q{source.randrange(40)}" for _ in range(n)) for n in (8, 9, 12, 13, 30)]
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"question": q} for q in questions])
    grams = set()
    for question in questions:
        words = question.split()
        size = min(13, len(words))
        grams |= {" ".join(words[i : i + size]) for i in range(len(words) - size + 1)}
    texts = {}
    for number in range(40):
        parts = [sentences(source, source.randrange(1, 25)) for _ in range(source.randrange(1, 5))]
        joints = [source.choice([*questions, "nothing"]) for _ in parts]
        texts[f"d{number:02d}"] = " ".join(
            word for pair in zip(parts, joints, strict=True) for word in pair
        )
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": n, "text": t} for n, t in texts.items()])
    settings = [f"decontaminate.tasks=['{tasks}']", "decontaminate.common=100000"]
    out = run(path, stages=STAGE, settings=settings)
    kept = {}
    for record in shards(out):
        kept.setdefault(record["id"].partition("#")[0], []).append(record["text"])
    for name, text in texts.items():
        pieces, cuts = cut_by_hand(text, grams)
        want = [text] if not cuts else [piece.strip() for piece in pieces]
        assert kept.get(name, []) == want, name


def test_common_phrases_are_spared_and_documents_cut_too_often_are_dropped(run, tmp_path):
    source = random.Random(5)
    common = " ".join(f"c{i}" for i in range(13))  # of a longer text, the rest of which is rare
    rare = [" ".join(f"r{k}x{i}" for i in range(13)) for k in range(11)]
    tasks = write_jsonl(
        tmp_path / "t.jsonl", [{"text": f"{common} x y"}, *({"text": r} for r in rare)]
    )
    often = " ".join(f"{sentences(source, 30)} {gram}." for gram in rare)
    records = [{"id": f"c{i}", "text": f"{sentences(source, 30)} {common}."} for i in range(10)]
    records += [{"id": "often", "text": often}, {"id": "short", "text": f"{rare[0]} and so on."}]
    path = write_jsonl(tmp_path / "in.jsonl", records)

    def of(name, *settings):
        return run(
            path, stages=STAGE, name=name, settings=[f"decontaminate.tasks=['{tasks}']", *settings]
        )

    out = of("ten")
    assert [r["text"] for r in shards(out)] == [r["text"] for r in records[:10]]
    assert [(r["id"], r["reason"]) for r in removed(out)] == [
        ("often", "too many pieces"), ("short", "nothing left"),
    ]  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    counts = [
        report["stages"][0][name] for name in ("documents_dropped", "documents_cut", "pieces")
    ]
    assert counts == [2, 0, 0] and why(report["stages"][0]) == "nothing left 1, too many pieces 1"
    (told,) = report["contamination"].values()
    assert told["common"] == [{"item": f"{common} x y", "ngrams": [common]}]
    assert common in told["ngrams"] and set(rare) < set(told["ngrams"])
    assert (common,) not in read_ngrams(str(out / "report.json"))
    assert tuple(common.split()) in read_ngrams(str(out / "report.json"))
    assert all(common not in r["text"] for r in shards(of("eleven", "decontaminate.common=11")))
    assert "often#11" in [r["id"] for r in shards(of("more", "decontaminate.max_pieces=11"))]


def test_a_text_that_leaks_as_a_whole_is_no_common_phrase(run, tmp_path):
    source = random.Random(6)
    question = " ".join(f"q{i}" for i in range(15))
    tasks = write_jsonl(tmp_path / "t.jsonl", [{"text": question}])
    texts = [f"{sentences(source, 60)} {question}. {sentences(source, 60)}" for _ in range(12)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": i, "text": t} for i, t in enumerate(texts)])
    out = run(path, stages=STAGE, settings=[f"decontaminate.tasks=['{tasks}']"])
    assert all("q5 q6" not in record["text"] for record in shards(out))
    (told,) = json.loads((out / "report.json").read_text())["contamination"].values()
    assert told["documents"] == 12 and len(told["ngrams"]) == 3 and told["common"] == []


def test_pieces_of_a_document_are_documents_of_the_stages_after(run, tmp_path):
    source = random.Random(8)
    gram, long = " ".join(f"q{i}" for i in range(13)), sentences(source, 60)
    tasks = write_jsonl(tmp_path / "t.jsonl", [{"text": gram}])
    text = f"{long} {gram}. {sentences(source, 60)}"
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": 7, "text": text}, {"id": 8, "text": "z"}])
    settings = [f"decontaminate.tasks=['{tasks}']"]
    one, two = (
        shards(run(path, stages=stages, settings=settings, name=str(number)))
        for number, stages in enumerate([STAGE, [*STAGE, "exact"]])
    )
    assert [record["id"] for record in one] == ["7#1", "7#2", 8]
    assert sorted(map(str, two)) == sorted(map(str, one))


def test_task_files_are_lines_text_or_race_and_what_is_none_is_refused(run, tmp_path):
    question = "who was it that the two of them had met on the old road that day"
    folder = tmp_path / "race" / "high"
    folder.mkdir(parents=True)
    row = {"article": "An article.", "questions": [question], "options": [["a", "b", "c", "d"]]}
    (folder / "1.txt").write_text(json.dumps(row | {"answers": ["A"]}))
    (tmp_path / "plain.txt").write_text(f"short\n\n{question}\n")
    text = f"{sentences(random.Random(1), 30)} {question}. {sentences(random.Random(2), 30)}"
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": "x", "text": text}])
    for ending, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        (tmp_path / f"row.jsonl{ending}").write_bytes(
            compress(json.dumps({"text": question}).encode())
        )
    (tmp_path / "rows.txt").write_text(json.dumps({"text": question}) + "\n")
    tasks = ("race", "plain.txt", "rows.txt", "row.jsonl.gz", "row.jsonl.zst")
    for number, task in enumerate(tasks):
        settings = [f"decontaminate.tasks=['{tmp_path / task}']"]
        left = shards(run(path, stages=STAGE, name=f"out{number}", settings=settings))
        assert [record["id"] for record in left] == ["x#1", "x#2"]
        assert all(question not in r["text"] and len(r["text"]) > 500 for r in left)
    for content, said in (
        ('{"a": 1}\n', "no text in any of"),
        ("{\n", "line 1: not JSON"),
        ("", "empty"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        settings = [f"decontaminate.tasks=['{tmp_path / 'bad.jsonl'}']"]
        assert said in refusal(lambda s=settings: run(path, stages=STAGE, name="bad", settings=s))
