"""The whole pipeline: what comes out is a function of the input set and the configuration."""

import gzip
import json
import math
import os
import random
import resource
import shutil
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import read_zst, refusal, removed, shards, tree, write_jsonl

from mtcli.core.curate import documents as documents_module
from mtcli.core.curate import engine as engine_module
from mtcli.core.curate import passes
from mtcli.core.curate.config import load_config
from mtcli.core.runtime.work_folder import WorkFolder

FUZZY = ["fuzzy"]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few documents, so that a small corpus has many parts."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # ten of a part


def changed(text, source, count):
    words = text.split()
    for _ in range(count):
        words[source.randrange(len(words))] = f"w{source.randrange(10**6)}"
    return " ".join(words)


def corpus_of(prose, source):
    """Texts by id: bases, near copies of many degrees, copies of copies, exact copies."""
    texts = {f"b{i}": prose(source.choice([20, 60, 120])) for i in range(25)}
    for number in range(60):
        text = texts[source.choice(list(texts))]
        texts[f"n{number}"] = changed(text, source, source.randrange(0, 5))
    return texts


def jaccard(one, other, size=12):
    sets = [
        {text[i : i + size] for i in range(max(1, len(text) - size + 1))} for text in (one, other)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def components(texts, threshold):
    """The oracle: exact Jaccard of all pairs, joined; {id: smallest id of its component}."""
    roots = {name: name for name in texts}
    for one, other in combinations(sorted(texts), 2):
        if jaccard(texts[one], texts[other]) >= threshold:
            low, high = sorted((roots[one], roots[other]))
            roots = {name: low if root == high else root for name, root in roots.items()}
    return roots


@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_near_duplicates_are_those_of_exact_all_pairs(
    threshold, prose, run, tmp_path, small_blocks
):
    texts = corpus_of(prose, random.Random(int(100 * threshold)))
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": n, "text": t} for n, t in texts.items()])
    out = run(path, stages=FUZZY, settings=[f"fuzzy.threshold={threshold}"])
    roots = components(texts, threshold)
    assert [record["id"] for record in shards(out)] == sorted(set(roots.values()))
    gone = removed(out)
    assert {line["id"]: line["kept_id"] for line in gone} == {
        name: root for name, root in roots.items() if name != root
    }
    for line in gone:
        similarity = jaccard(texts[line["id"]], texts[line["kept_id"]])
        assert line["jaccard"] == pytest.approx(similarity, abs=5.1e-7)  # of six digits
        assert line["cluster"] == roots[line["id"]] and line["stage"] == "fuzzy"


def table(source, rows=3000):
    return "\n".join(",".join(str(source.randrange(10)) for _ in range(8)) for _ in range(rows))


def test_by_default_copies_with_six_of_100_words_changed_go_and_tables_of_numbers_stay(
    prose, run, tmp_path
):
    source = random.Random(3)
    texts = {f"t{number}": table(source) for number in range(3)}
    for number in range(20):
        words = prose(300)
        texts |= {f"p{number:02}": words, f"q{number:02}": changed(words, source, 18)}
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": n, "text": t} for n, t in texts.items()])
    gone = removed(run(path, stages=FUZZY))
    assert [(line["id"], line["kept_id"]) for line in gone] == [
        (f"q{number:02}", f"p{number:02}") for number in range(20)
    ]


@pytest.mark.parametrize("against", [False, True])
def test_the_report_names_sources_of_which_one_cluster_has_most(prose, run, tmp_path, against):
    """By source: documents, and how many of them resemble each other."""
    sources = {"half": (10, 5), "most": (10, 6), "few": (9, 9), "two": (12, 12), "none": (30, 1)}
    if against:
        write_jsonl(tmp_path / "old.jsonl", [{"id": "a", "text": prose(), "source": "most"}])
        old = run(tmp_path / "old.jsonl", stages=["exact"], name="old")
    records, starts = [], {name: prose() for name in sources}
    starts["two"] = starts["half"]
    if against:
        (record,) = shards(old)
        starts["most"] = record["text"]
    for name, (count, alike) in sources.items():
        texts = [f"{starts[name]} {number}" for number in range(alike)]
        texts += [prose() for _ in range(count - alike)]
        records += [{"id": f"{name}{n:02}", "text": t, "source": name} for n, t in enumerate(texts)]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    out = run(path, stages=FUZZY, **({"against": (str(old),)} if against else {}))
    report = json.loads((out / "report.json").read_text())
    kept = "a" if against else "most00"
    assert report["clusters"]["fuzzy"]["large"] == [
        {"source": "most", "documents": 10, "clustered": 6, "kept_id": kept},
        {"source": "two", "documents": 12, "clustered": 12, "kept_id": "half00"},
    ]
    assert "6 of 10 documents of <code>most</code>" in (out / "report.html").read_text()


def test_a_corpus_has_more_parts_than_files_may_be_open(prose, run, tmp_path, small_blocks):
    texts = [prose(200) for _ in range(170)]
    texts += [f"{text} {number}" for number, text in enumerate(texts)] + [prose(200)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": n, "text": t} for n, t in enumerate(texts)])
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"text": text} for text in texts[:170]])
    settings = [f"decontaminate.tasks=['{tasks}']"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, limits[1]))
    try:
        out = run(path, stages=["exact", "fuzzy", "decontaminate"], settings=settings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    reasons = [line["reason"] for line in removed(out)]
    assert (
        len(shards(out)) == 1
        and sorted(reasons) == ["near duplicate"] * 170 + ["nothing left"] * 170
    )


def test_a_crowd_of_near_copies_leaves_one(prose, run, tmp_path):
    crowd, other = prose(), prose()
    texts = [f"{crowd} {number}" for number in range(90)] + [crowd] * 50 + [other]
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": n, "text": t} for n, t in enumerate(texts)])
    out = run(path, stages=FUZZY)
    assert [record["id"] for record in shards(out)] == [0, 140]
    assert {line["kept_id"] for line in removed(out)} == {0} and len(removed(out)) == 139


def test_no_workers_no_order_of_files_and_no_kill_change_a_byte(
    prose, run, tmp_path, small_blocks, monkeypatch
):
    texts = list(corpus_of(prose, random.Random(1)).items())
    records = [{"id": n, "text": t, "source": n[0], "more": [n]} for n, t in texts]
    records += [{"text": t, "url": "x"} for _, t in texts[:10]]  # without ids
    files = [write_jsonl(tmp_path / f"{number}.jsonl", records[number::3]) for number in range(3)]
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"text": texts[3][1][:200]}])
    settings = [f"decontaminate.tasks=['{tasks}']", "decontaminate.min_ngram=3"]
    stages = ["normalise", "exact", "fuzzy", "decontaminate", "rules"]
    settings += ["rules.min_stop_words=0", "rules.max_word_length=50", "fuzzy.priority=['n']"]

    def of(name, *inputs, **more):
        return run(*inputs, stages=stages, settings=settings, name=name, **more)

    first = tree(of("one", *files))
    again = (files[2], tmp_path / "*[01].jsonl", files[0])  # in another order, and one named twice
    assert tree(of("two", *again, workers=3)) == first

    calls, whole = [0], engine_module.run

    def dying(workers, work, items, total, what, unit="it"):
        def mortal(item, progress):
            calls[0] += 1
            if calls[0] == dies_at:
                raise KeyboardInterrupt
            return work(item, progress)

        return whole(workers, mortal, items, total, what, unit)

    monkeypatch.setattr(engine_module, "run", dying)
    for dies_at in (1, 5, 20, 50, 10**6):
        calls[0] = 0
        if dies_at == 10**6:
            resumed = of("killed", *files, resume=True)
        else:
            with pytest.raises(KeyboardInterrupt):
                of("killed", *files, resume=True)
    assert tree(resumed) == first
    assert not (resumed / ".curate").exists()


def test_records_keep_all_their_keys_and_get_an_id_of_file_and_line(run, tmp_path):
    (tmp_path / "sub").mkdir()
    write_jsonl(
        tmp_path / "wiki.jsonl", [{"text": "one", "meta": {"a": [1]}}, {"text": "two", "id": 7}]
    )
    write_jsonl(tmp_path / "sub" / "x.jsonl", [{"text": "three", "source": "s", "id": "b"}] * 1)
    (tmp_path / "sub" / "plain.txt").write_text("four")
    out = run(tmp_path / "wiki.jsonl", tmp_path / "sub")
    assert shards(out) == [
        {"id": 7, "text": "two", "source": "wiki"},
        {"id": "b", "text": "three", "source": "s"},
        {"id": "sub/plain.txt:1", "text": "four", "source": "plain"},
        {"id": "wiki.jsonl:1", "text": "one", "source": "wiki", "meta": {"a": [1]}},
    ]


def test_made_ids_sort_by_line_and_do_not_depend_on_blocks(run, tmp_path, small_blocks):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{n} " + "x" * 500} for n in range(40)])
    out = run(path)
    assert [record["id"] for record in shards(out)] == [f"a.jsonl:{n + 1}" for n in range(40)]
    assert [int(record["text"].split()[0]) for record in shards(out)] == list(range(40))


def test_a_better_source_keeps_its_copy_and_else_the_smallest_id(run, tmp_path, prose):
    text, other = prose(), prose()
    records = [
        {"id": "a", "text": text, "source": "crawl"},
        {"id": "b", "text": text, "source": "wiki"},
        {"id": "c", "text": text + " more", "source": "books"},
        {"id": "d", "text": other, "source": "x"},
        {"id": "e", "text": other, "source": "y"},
    ]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    settings = ["fuzzy.priority=['books', 'wiki']"]
    out = run(path, stages=["exact", "fuzzy"], settings=settings)
    assert [record["id"] for record in shards(out)] == ["c", "d"]
    assert [(line["id"], line["stage"], line["kept_id"]) for line in removed(out)] == [
        ("a", "exact", "b"), ("e", "exact", "d"), ("b", "fuzzy", "c"),
    ]  # fmt: skip


def test_against_cleans_the_new_corpus_and_keeps_the_old_as_it_is(run, tmp_path, prose):
    text, other, third = prose(), prose(), prose()
    old = write_jsonl(
        tmp_path / "old.jsonl", [{"id": "o1", "text": text}, {"id": "o2", "text": text}]
    )
    base = run(old, name="old")
    before = tree(base)
    new = [
        {"id": "n1", "text": text},
        {"id": "n2", "text": text + " z"},
        {"id": "n3", "text": other},
        {"id": "n4", "text": other},
        {"id": "n5", "text": third},
    ]
    path = write_jsonl(tmp_path / "new.jsonl", new)
    out = run(path, stages=["exact", "fuzzy"], against=(str(base),))
    assert [record["id"] for record in shards(out)] == ["n3", "n5"]
    assert {line["id"]: line["kept_id"] for line in removed(out)} == {
        "n1": "o1", "n2": "o1", "n4": "n3",
    }  # fmt: skip
    assert tree(base) == before
    assert json.loads((out / "report.json").read_text())["stages"][0]["documents_in"] == 5


def test_a_bad_line_is_named_and_left_out_where_that_is_asked_for(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n{"id": "b", "te\n[1]\n{"id": 1.5, "text": "x"}\n')
    assert "in.jsonl:2: not JSON" in refusal(lambda: run(path))
    report = json.loads((run(path, skip_bad=True) / "report.json").read_text())
    assert report["bad_lines"]["count"] == 3
    assert [line.split(": ")[0] for line in report["bad_lines"]["examples"]] == [
        "in.jsonl:2", "in.jsonl:3", "in.jsonl:4",
    ]  # fmt: skip


def damaged_files(folder, records):
    """Files that are damaged: a compressed one in the middle, and ones without bytes."""
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    (folder / "in").mkdir()
    (folder / "in" / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    for name in ("none.jsonl.gz", "none.parquet", "none.warc"):
        (folder / "in" / name).touch()
    write_jsonl(folder / "in" / "whole.jsonl", [{"id": "last", "text": "whole"}])
    return folder / "in"


def test_damaged_files_are_counted_and_left_out_whatever_the_workers(
    run, tmp_path, small_blocks, monkeypatch
):
    source = random.Random(3)
    records = [{"id": n, "text": f"{source.random()} " * 9} for n in range(300)]
    path, stages = damaged_files(tmp_path, records), ["extract"]
    assert "cut.jsonl.gz: the file is damaged: " in refusal(lambda: run(path, stages=stages))
    out = run(path, stages=stages, skip_bad=True, force=True)
    *before, last = shards(out)
    assert last["id"] == "last" and len(before) > 280
    assert [record["text"] for record in before] == [r["text"] for r in records[: len(before)]]
    bad = json.loads((out / "report.json").read_text())["bad_lines"]
    named = ["cut.jsonl.gz", "none.jsonl.gz", "none.parquet", "none.warc"]
    assert bad["count"] == 4 and [line.split(":")[0] for line in bad["examples"]] == named
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(passes, "build_report", killed)
        run(path, stages=stages, skip_bad=True, name="again", workers=3)
    assert tree(run(path, stages=stages, skip_bad=True, name="again", resume=True)) == tree(out)


def killed(*_):
    raise KeyboardInterrupt


def test_what_a_killed_worker_left_is_not_published(run, tmp_path, monkeypatch):
    path, build = write_jsonl(tmp_path / "in.jsonl", [{"text": "x"}]), passes.build_report

    def leaving(*arguments):
        (tmp_path / "out" / ".curate" / passes.MADE / ".shard-00000.7.zst").touch()
        return build(*arguments)

    monkeypatch.setattr(passes, "build_report", leaving)
    assert not [name for name in tree(run(path)) if name.startswith(".")]


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
def test_rows_of_parquet_with_numbers_that_json_cannot_write_are_bad(odd, run, tmp_path):
    rows = {"text": ["x", "y"], "score": [[odd], [1.0]], "n": [None, 2.0]}
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    said = refusal(lambda: run(tmp_path / "in.parquet"))
    assert "in.parquet:1: NaN or Infinity in 'score', which JSON cannot write" in said
    found = shards(run(tmp_path / "in.parquet", skip_bad=True))
    assert [(record["text"], record["score"], record["n"]) for record in found] == [("y", [1.0], 2)]


def test_the_report_adds_up_and_names_the_clusters(run, tmp_path, prose):
    texts = [prose() for _ in range(6)]
    records = [{"id": f"a{i}", "text": t} for i, t in enumerate(texts)]
    records += [{"id": "z1", "text": texts[0]}, {"id": "z2", "text": texts[1] + " q"}]
    records += [{"id": "s", "text": "the of"}]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    settings = ["rules.min_stop_words=0", "rules.max_word_length=50"]
    out = run(path, stages=["rules", "exact", "fuzzy"], settings=settings)
    report = json.loads((out / "report.json").read_text())
    counts = [(s["stage"], s["documents_in"], s["documents_out"]) for s in report["stages"]]
    assert counts == [("rules", 9, 8), ("exact", 8, 7), ("fuzzy", 7, 6)]
    assert [stage["documents_dropped"] for stage in report["stages"]] == [1, 1, 1]
    sizes = {record["id"]: len(record["text"].encode()) for record in records}
    assert report["stages"][0]["bytes_in"] == sum(sizes.values())
    assert report["stages"][0]["bytes_out"] == sum(sizes.values()) - sizes["s"]
    assert report["stages"][2]["bytes_out"] == sum(sizes[f"a{i}"] for i in range(6))
    assert report["stages"][0]["reasons"] == {"too few words": 1}
    assert report["stages"][0]["samples"]["too few words"][0]["id"] == "s"
    assert report["clusters"]["exact"]["shown"] == [
        {"cluster": "a0", "kept_id": "a0", "removed": [{"id": "z1", "jaccard": 1.0}]}
    ]
    (cluster,) = report["clusters"]["fuzzy"]["shown"]
    assert (cluster["kept_id"], cluster["removed"][0]["id"]) == ("a1", "z2")
    assert report["documents"] == 6 == len(shards(out))


def test_a_blend_gives_shards_by_source_and_epochs(run, tmp_path, prose):
    records = [{"id": i, "text": prose(), "source": "ab"[i % 2]} for i in range(8)]
    records += [{"id": 99, "text": prose(), "source": "c/d"}]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    out = run(path, settings=["blend={a = 3, b = 1, none = 2}"])
    names = sorted(p.name for p in out.glob("*.jsonl.zst"))
    assert names[:2] == ["a-00000.jsonl.zst", "b-00000.jsonl.zst"] and names[2].startswith("c_d-")
    assert {record["source"] for record in read_zst(out / "a-00000.jsonl.zst")} == {"a"}
    blend = json.loads((out / "report.json").read_text())["blend"]
    size = {s: sum(len(r["text"]) for r in records if r["source"] == s) for s in "ab"}
    assert blend["sources"]["a"]["weight"] == 0.75
    assert blend["sources"]["a"]["epochs"] == pytest.approx(
        0.75 * (size["a"] + size["b"]) / size["a"]
    )
    assert (blend["missing"], blend["unweighted"]) == (["none"], ["c/d"])


def test_shards_are_cut_by_size_and_read_in_order_of_ids(run, tmp_path, small_blocks):
    source = random.Random(2)
    ids = [f"{source.randrange(10**9)}" for _ in range(100)]
    records = [{"id": name, "text": "y" * 36000 + name} for name in ids]
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", records[n::2]) for n in range(2)]
    out = run(*paths, settings=["shard_mb=1"], workers=2)
    assert [record["id"] for record in shards(out)] == sorted(ids)
    sizes = [len(read_zst(path)) for path in sorted(out.glob("shard-*.jsonl.zst"))]
    assert len(sizes) in (4, 5) and max(sizes) <= 27  # a megabyte of lines, of 36 kB each


def test_outputs_in_the_way_and_other_inputs_than_a_run_began_with_are_refused(run, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "text": "x"}])
    out = run(path)
    before = tree(out)
    assert "an earlier run" in refusal(lambda: run(path))
    assert tree(run(path, resume=True)) == before  # complete: nothing to do
    write_jsonl(path, [{"id": "a", "text": "xyz"}])
    assert "other inputs" in refusal(lambda: run(path, resume=True))
    assert shards(run(path, force=True)) == [{"id": "a", "text": "xyz", "source": "in"}]
    shutil.rmtree(out)
    WorkFolder(out / ".curate", out).close()
    (out / ".curate" / "fingerprint").write_text("other")
    assert "begun with other inputs" in refusal(lambda: run(path, resume=True))


def test_a_configuration_is_refused_with_every_problem_and_the_nearest_names():
    settings = ["fuzzy.treshold=0.7", "stages=['exat']", "fuzzy.shingle=0", "blend.a='x'"]
    said = refusal(load_config, None, settings)
    for words in ("'threshold'", "'exact'", "at least 1", "a weight is a number"):
        assert words in said
    said = refusal(load_config, None, ["stages=['rules', 'extract', 'quality', 'decontaminate']"])
    for words in ("name extract first", "train-quality", "0 tasks"):
        assert words in said


def test_a_run_that_leaves_no_document_is_refused_and_keeps_what_was_there(run, tmp_path, prose):
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "text": prose()}])
    before = tree(run(path, stages=["exact"]))
    write_jsonl(path, [{"id": "a", "text": "x"}, {"id": "b", "text": "x"}])
    stages = ["exact", "rules", "fuzzy"]
    said = refusal(lambda: run(path, stages=stages, force=True))
    assert "0 documents are left of 2 in 1 file" in said
    assert "exact: 1 same text" in said and "rules: 1 too few words" in said
    assert "stages=['exact', 'fuzzy']" in said
    assert tree(tmp_path / "out") == before
    path.write_text("")
    assert "0 documents are left of 0 in 1 file" in refusal(lambda: run(path, name="empty"))


@pytest.mark.parametrize("half", ["\ud83d", "whole"])
def test_odd_values_of_other_keys_survive(half, run, tmp_path):
    odd = {"big": 10**40, "half": half, "none": None, "deep": {"a": [1.5, True, -(2**70)]}, "n": -1}
    path = write_jsonl(
        tmp_path / "in.jsonl", [{"id": "a", "text": "é x"} | odd, {"id": -5, "text": "y"}]
    )
    out = run(
        path,
        stages=["fuzzy", "rules"],
        settings=["rules.min_words=1", "rules.min_stop_words=0", "rules.min_word_length=0"],
    )
    assert shards(out) == [
        {"id": -5, "text": "y", "source": "in"},
        {"id": "a", "text": "é x", "source": "in"} | odd,
    ]


def test_force_replaces_what_an_earlier_run_wrote_and_nothing_else(run, tmp_path):
    path, other = (write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ab")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.jsonl.zst").write_text("the user's")
    run(path)
    names = {file.name for file in out.iterdir()}
    assert "shard-00000.jsonl.zst" in names
    assert "4 files of an earlier run" in refusal(lambda: run(other))
    run(other, force=True)
    assert {file.name for file in out.iterdir()} == names
    assert read_zst(out / "shard-00000.jsonl.zst")[0]["text"] == "b"
    assert (out / "mine.jsonl.zst").read_text() == "the user's"


def test_inputs_in_the_output_folder_are_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    inside = write_jsonl(tmp_path / "out" / "in.jsonl", [{"text": "x"}])
    assert "in.jsonl is in --output" in refusal(lambda: run(inside, force=True))
    assert inside.exists()


def test_half_of_a_surrogate_pair_as_a_source_is_a_bad_record(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "x", "source": "\ud800"}) + "\n" + '{"text": "y"}\n')
    assert 'in.jsonl:1: "source" is no text' in refusal(lambda: run(path))
    assert [record["text"] for record in shards(run(path, skip_bad=True))] == ["y"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_cannot_keep_makes_a_bad_line(number, run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"text": "x", "y": [{number}]}}\n{{"text": "z", "y": [1e300]}}\n')
    assert "in.jsonl:1: not JSON" in refusal(lambda: run(path))
    found = shards(run(path, skip_bad=True))
    assert [(record["text"], record["y"]) for record in found] == [("z", [1e300])]


def test_a_long_source_has_a_short_file(run, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "x", "source": "\u00e9" * 200}])
    out = run(path, settings=["blend.other=1.0"])
    assert [record["text"] for record in shards(out)] == ["x"]


NEEDED = (("decontaminate.tasks", "nope.jsonl"), ("quality.model", "nope.bin"))


def test_a_run_killed_as_it_published_leaves_nothing_behind(run, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": i, "text": "x" * 600_000} for i in range(3)])
    replace, moved = Path.replace, []

    def killed(self, target):
        moved.extend([target] if target.parent == tmp_path / "out" else [])
        if len(moved) > 4:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        run(path, settings=["shard_mb=1"])
    assert (tmp_path / "out" / "shard-00001.jsonl.zst").exists()
    out = run(write_jsonl(path, [{"id": 1, "text": "y"}]))
    assert [record["text"] for record in shards(out)] == ["y"]


def test_all_that_is_not_there_is_told_at_once(run, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "x"}])
    settings = [
        f"{field}={[name] if field.endswith('tasks') else name!r}" for field, name in NEEDED
    ]
    stages = ["quality", "decontaminate"]
    said = refusal(
        lambda: run(path, "gone.jsonl", against=("gone",), stages=stages, settings=settings)
    )
    inputs = ("file or folder gone.jsonl\n", "file or folder gone\n")
    files = (f"{field}: {name} cannot be read" for field, name in NEEDED)
    assert all(words in said for words in (*inputs, *files))


def test_names_of_languages_and_of_stop_words_are_refused_with_what_is_right(run, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "x"}])
    keep = ["language.keep=['english']"]
    said = refusal(lambda: run(path, stages=["language"], settings=keep))
    assert "'english' is no code of a language" in said and "'en'" in said
    words = ["extract.engine='justext'", "extract.stop_words='Englisch'"]
    said = refusal(lambda: run(path, stages=["extract"], settings=words))
    assert "no stop words of 'Englisch'" in said and "'English'" in said
