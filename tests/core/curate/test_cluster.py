"""A cluster's engine: the same bytes as one machine's, whatever its tasks and groups."""

import os
import pickle
import random
from itertools import pairwise

import numpy as np
import pytest
from corpora import refusal, tree, write_jsonl

from mtcli.core.curate import documents as documents_module
from mtcli.core.curate.cluster import ClusterEngine
from mtcli.core.curate.components import both_ways, checksum, downwards, large_star, small_star


class Pickled:
    """A value as another machine would be sent it."""

    def __init__(self, value):
        self.data = pickle.dumps(value)

    def __call__(self):
        return pickle.loads(self.data)


class EagerCluster:
    """Tasks that run at once, in this process, on what was pickled."""

    def __init__(self, cores):
        self.cores = cores

    def run(self, function, items, what, returns=1):
        rows = []
        for item in items:
            function, item = pickle.loads(pickle.dumps((function, item)))
            rows.append(tuple(map(Pickled, function(item))))
            assert len(rows[-1]) == returns, what
        return rows


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 9000)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def copies_of(prose, source):
    """Bases, near copies, copies of copies, and a crowd that shares most of its words."""
    texts = [prose(source.choice([20, 60, 120])) for _ in range(20)]
    for _ in range(50):
        words = source.choice(texts).split()
        for _ in range(source.randrange(0, 4)):
            words[source.randrange(len(words))] = f"w{source.randrange(10**6)}"
        texts.append(" ".join(words))
    crowd = prose(60)
    return texts + [f"{crowd} {number}" for number in range(40)]


def test_a_cluster_of_any_size_writes_the_bytes_of_one_machine(prose, run, tmp_path, small_blocks):
    source = random.Random(3)
    texts = copies_of(prose, source)
    old = [{"id": f"o{n}", "text": text} for n, text in enumerate(texts[::7])]
    records = [{"id": f"n{n}", "text": t, "source": "ab"[n % 2]} for n, t in enumerate(texts)]
    records += [{"text": text, "url": "x"} for text in texts[:9]]
    source.shuffle(records)
    files = [write_jsonl(tmp_path / f"{n}.jsonl", records[n::3]) for n in range(3)]
    base = write_jsonl(tmp_path / "old.jsonl", old)
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"text": texts[3][:200]}, {"text": texts[8]}])
    settings = [f"decontaminate.tasks=['{tasks}']", "decontaminate.min_ngram=3", "shard_mb=1"]
    settings += ["rules.min_stop_words=0", "rules.max_word_length=50", "fuzzy.priority=['b']"]
    settings += ["blend={a = 1, b = 2}"]

    def of(name, **more):
        stages = ["normalise", "exact", "fuzzy", "decontaminate", "rules"]
        return tree(run(*files, stages=stages, settings=settings, name=name, **more))

    for against, sizes in (((), (3, 50)), ((str(base),), (1, 3))):
        one = of(f"one{len(against)}", against=against)
        for cores in sizes:
            engine = ClusterEngine(EagerCluster(cores))
            name = f"many{len(against)}-{cores}"
            assert of(name, against=against, engine=engine) == one, (cores, against)


def test_a_cluster_refuses_a_corpus_of_nothing_as_one_machine(run, tmp_path):
    for number, records in enumerate([[], [{"id": "a", "text": "x"}]]):
        path = write_jsonl(tmp_path / f"{number}.jsonl", records)
        for engine in (None, ClusterEngine(EagerCluster(2))):
            said = refusal(lambda e=engine, p=path: run(p, stages=["rules", "exact"], engine=e))
            assert f"0 documents are left of {number}" in said


def components_by_hand(edges):
    roots = {number: number for edge in edges for number in edge}
    for one, other in edges:
        low, high = sorted((roots[one], roots[other]))
        roots = {number: low if root == high else root for number, root in roots.items()}
    return {(number, root) for number, root in roots.items() if number != root}


@pytest.mark.parametrize("shape", ["chain", "random", "cliques", "star"])
def test_stars_are_the_components_after_few_rounds(shape):
    source = random.Random(shape)
    numbers = source.sample(range(10**6), 300)
    edges = {
        "chain": list(pairwise(numbers)),
        "random": [tuple(source.sample(numbers, 2)) for _ in range(200)],
        "cliques": [(a, b) for at in range(0, 300, 10) for a in numbers[at : at + 10]
                    for b in numbers[at : at + 10] if a != b],
        "star": [(numbers[0], other) for other in numbers[1:]],
    }[shape]  # fmt: skip
    found, before, rounds = np.array(edges), None, 0
    while checksum(found) != before:
        before, rounds = checksum(found), rounds + 1
        found = small_star(downwards(large_star(both_ways(found))))
    assert {tuple(edge) for edge in found.tolist()} == components_by_hand(edges)
    assert rounds <= 10  # log2(300) is 8.2
