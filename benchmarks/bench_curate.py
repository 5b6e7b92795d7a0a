"""Measures `mtcli curate`: each stage per core, recall and F1 of duplicates, beside its peers.

    python benchmarks/bench_curate.py [--mb 20] [--repeats 3] [--only NAME...] [--json FILE] \
        [--plot docs/images/curate-memory.png]

Rates are megabytes of text per second of processor time, of one process with one thread: the best
of --repeats, the contenders taking turns in this process, so that ratios hold on a busy machine
too. `scaling` is by the clock, and needs two idle cores. The text is made of the sentences of this
project's documentation and of Python's own, in random order. datatrove (with spacy and xxhash<4) is
measured where it is installed; it reads no language, as its model would be downloaded. datasketch,
rensa's own LSH and jusText come with the test extra.
"""

import importlib
import json
import os
import pydoc
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

from arguments import Arguments, write_rows

from mtcli.core.curate import passes
from mtcli.core.curate.batch import BATCH_BYTES, Batch
from mtcli.core.curate.config import FuzzyConfig, load_config
from mtcli.core.curate.document_stages import make_stage
from mtcli.core.curate.documents import Document
from mtcli.core.curate.engine import LocalEngine
from mtcli.core.curate.hashing import jaccard
from mtcli.core.curate.minhash import make_signatures
from mtcli.core.curate.passes import curate
from mtcli.core.curate.request import CurateRequest
from mtcli.core.curate.shingles import shingle_set
from mtcli.core.curate.warc import make_extract

ROOT = Path(__file__).parent.parent
MODULES = ["argparse", "csv", "heapq", "shutil", "textwrap", "tarfile", "zipfile", "pathlib"]
MODULES += ["logging", "random"]
SHINGLE, THRESHOLD, HASHES = (
    FuzzyConfig.model_fields[name].default for name in ("shingle", "threshold", "hashes")
)
PLANTED = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
# Tells its own peak: what the system says of a child counts its parent's memory before the exec.
PEAK = """
import atexit, re
atexit.register(lambda: print(*re.findall(r"VmHWM.*", open("/proc/self/status").read())))
from mtcli.__main__ import main
main()
"""
ALL = ["normalise", "language", "rules", "exact", "fuzzy"]


def sentences():
    pages = [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]
    pages += [pydoc.plain(pydoc.render_doc(importlib.import_module(name))) for name in MODULES]
    text = re.sub(r"[|`#>*_]+", " ", "\n".join(pages))
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.:;])\s", text)]
    return [part for part in found if 30 < len(part) < 400]


def texts_of(megabytes, source):
    parts, made, size = sentences(), [], 0
    while size < megabytes * 1e6:
        text = " ".join(source.choice(parts) for _ in range(source.randrange(8, 32)))
        text = text.replace("'", "\u2019") if source.random() < 0.3 else text
        made.append(text)
        size += len(text.encode())
    return made


def batches_of(texts):
    held, size = [], 0
    for number, text in enumerate(texts):
        held.append(Document(b"1%d" % number, "s", text, len(text.encode())))
        size += held[-1].size
        if size >= BATCH_BYTES:
            yield Batch(held)
            held, size = [], 0
    yield Batch(held)


def best(contenders, repeats):
    """The least processor seconds of each, the contenders taking turns."""
    least = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, work in contenders.items():
            began = time.process_time()
            work()
            least[name] = min(least[name], time.process_time() - began)
    return least


def stage_rates(texts, repeats):
    size = sum(len(text.encode()) for text in texts) / 1e6
    config = load_config(None)
    stages = {name: make_stage(name, config) for name in ("normalise", "language", "rules")}
    signatures = make_signatures(config.fuzzy)

    def over(stage):
        def work():
            for batch in batches_of(texts):
                stage(batch)

        return work

    contenders = {name: over(stage) for name, stage in stages.items()}
    contenders["signatures"] = over(lambda batch: signatures(batch.documents, batch))
    return {name: size / seconds for name, seconds in best(contenders, repeats).items()}


def extraction_rates(repeats):
    pages = [
        pydoc.HTMLDoc().page(name, pydoc.HTMLDoc().document(importlib.import_module(name))).encode()
        for name in MODULES
    ]
    size = sum(map(len, pages)) / 1e6

    def over(engine):
        extract = make_extract(load_config(None, [f"extract.engine={engine}"]).extract)

        def work():
            documents = [Document(b"1", "s", "", 0, {}, page) for page in pages]
            extract(Batch(documents))

        return work

    contenders = {engine: over(engine) for engine in ("resiliparse", "justext")}
    return {name: size / seconds for name, seconds in best(contenders, repeats).items()}


def run_curate(path, output, stages, *settings):
    config = load_config(None, [f"stages={stages}", "rules.min_words=1", *settings])
    request = CurateRequest((str(path),), Path(output), config, force=True)
    return curate(request, LocalEngine(1), lambda _: None)


def whole_rates(texts, repeats, folder):
    """End to end, from JSON lines to shards, on one worker; and peers' duplicates."""
    path, size = write_corpus(texts, folder / "corpus")
    contenders = {
        "fuzzy": lambda: run_curate(path, folder / "fuzzy", ["fuzzy"]),
        "pipeline": lambda: run_curate(path, folder / "all", ALL),
    }
    rates = {name: size / seconds for name, seconds in best(contenders, repeats).items()}
    few = texts[: max(50, len(texts) // 40)]  # datasketch is slow: a fortieth of the text
    small = sum(len(text.encode()) for text in few) / 1e6
    seconds = best({"datasketch": lambda: datasketch_pairs(few, THRESHOLD)}, repeats)
    return rates | {name: small / least for name, least in seconds.items()}


def datatrove_rates(texts, folder):
    """A quarter of the text, once: enough that starting its steps is little of the time."""
    path, size = write_corpus(texts[: len(texts) // 4], folder / "few")
    contenders = {
        "fuzzy": lambda: datatrove_fuzzy(path.parent),
        "pipeline": lambda: datatrove_pipeline(path.parent),
    }
    return {name: size / seconds for name, seconds in best(contenders, 1).items()}


def write_corpus(texts, folder):
    """Writes JSON lines into a folder; returns the file, and megabytes of text."""
    folder.mkdir(exist_ok=True)
    path = folder / "corpus.jsonl"
    records = [{"id": f"d{n:07d}", "text": text} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, sum(len(text.encode()) for text in texts) / 1e6


def ray_share(texts, repeats, folder):
    """The rate of `--engine ray` on two cores over that of two local workers, by the clock."""
    from mtcli.core.curate.cluster import ClusterEngine
    from mtcli.core.curate.ray_cluster import ray_cluster

    path, _ = write_corpus(texts, folder / "corpus")
    config, least = load_config(None, [f"stages={ALL}"]), {}
    request = CurateRequest((str(path),), folder / "r", config, 2, force=True)
    with ray_cluster(None, 2) as cluster:
        for _ in range(repeats):
            for name, engine in (("local", LocalEngine(2)), ("ray", ClusterEngine(cluster))):
                began = time.perf_counter()
                curate(request, engine, lambda _: None)
                seconds = time.perf_counter() - began
                least[name] = min(least.get(name, seconds), seconds)
    return least["local"] / least["ray"]


def head(texts, folder):
    """Processor seconds of one process for a million removed documents: the report, and
    removed.jsonl.zst."""
    path, _ = write_corpus([text[:200] for text in [*texts, *texts]], folder / "twice")
    spent, names = [], ("build_report", "removed_lines")
    whole = {name: getattr(passes, name) for name in names}

    def timed(name):
        def work(*arguments):
            began = time.process_time()
            found = whole[name](*arguments)
            found = found if name == "build_report" else list(found)
            spent.append(time.process_time() - began)
            return found

        return work

    for name in names:
        setattr(passes, name, timed(name))
    report = run_curate(path, folder / "twice-out", ["exact"])
    for name in names:
        setattr(passes, name, whole[name])
    (stage,) = report["stages"]
    return sum(spent) / (stage["documents_in"] - stage["documents_out"]) * 1e6


def memory(source, folder, sizes=(20, 40, 80, 160, 320, 640, 1280)):
    """The most resident megabytes of a run on one worker, by megabytes of text."""
    found = {}
    for megabytes in sizes:
        path, _ = write_corpus(texts_of(megabytes, source), folder / "memory")
        words = ["curate", path, "--output", folder / "m", "--workers", "1", "--force"]
        words += ["--set", f"stages={json.dumps(ALL)}"]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, words)], check=True, capture_output=True
        )
        found[megabytes] = round(int(done.stdout.split()[-2]) * 1024 / 1e6)
    return found


def draw_memory(found, path):
    """The most memory of a run over the text it has read."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 3.4), layout="constrained")).subplots()
    axes.plot([int(size) for size in found], list(found.values()), "o-", color="#2f6fb0")
    axes.axhline(2048, color="#888", linestyle="--", label="2 GiB, the limit for 10 GB")
    axes.set(xscale="log", ylim=(0, 2300), xlabel="MB of text", ylabel="MB at the peak, one worker")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# Peers


def shingles(text, size=SHINGLE):
    return {text[i : i + size] for i in range(max(1, len(text) - size + 1))}


def datasketch_pairs(texts, threshold, hashes=HASHES):
    from datasketch import MinHash, MinHashLSH

    index, found = MinHashLSH(threshold=threshold, num_perm=hashes), set()
    for number, text in enumerate(texts):
        sketch = MinHash(num_perm=hashes)
        sketch.update_batch([part.encode() for part in shingles(text)])
        found |= {(other, number) for other in index.query(sketch)}
        index.insert(number, sketch)
    return found


def rensa_pairs(texts, threshold, hashes=HASHES):
    from rensa import RMinHash, RMinHashLSH

    index, found = RMinHashLSH(threshold=threshold, num_perm=hashes, num_bands=HASHES // 8), set()
    for number, text in enumerate(texts):
        sketch = RMinHash(num_perm=hashes, seed=42)
        sketch.update(sorted(shingles(text)))
        found |= {(other, number) for other in index.query(sketch)}
        index.insert(number, sketch)
    return found


def datatrove_fuzzy(inputs):
    """datatrove's four steps of near duplicates, with its own settings, in this process."""
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    config = minhash.MinhashConfig()
    with tempfile.TemporaryDirectory() as name:
        sig, buckets, remove, out = (f"{name}/{step}" for step in "sbro")
        trove(1, JsonlReader(str(inputs)), minhash.MinhashDedupSignature(sig, config))
        trove(config.num_buckets, minhash.MinhashDedupBuckets(sig, buckets, config=config))
        trove(1, minhash.MinhashDedupCluster(buckets, remove, config=config))
        last = JsonlWriter(out, compression=None)
        trove(1, JsonlReader(str(inputs)), minhash.MinhashDedupFilter(remove), last)


def datatrove_pipeline(inputs):
    """ftfy and Gopher's rules, then near duplicates."""
    from datatrove.pipeline.filters import GopherQualityFilter
    from datatrove.pipeline.formatters import FTFYFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    with tempfile.TemporaryDirectory() as name:
        rules, last = GopherQualityFilter(min_doc_words=1), JsonlWriter(name, compression=None)
        trove(1, JsonlReader(str(inputs)), FTFYFormatter(), rules, last)
        datatrove_fuzzy(name)


def trove(tasks, *steps):
    from datatrove.executor import LocalPipelineExecutor
    from loguru import logger

    logger.remove()
    with tempfile.TemporaryDirectory() as logs:
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=1, logging_dir=logs).run()


def our_pairs(texts, folder, threshold):
    """Pairs within a cluster, as the peers' are: (kept, removed)."""
    path = folder / "labelled.jsonl"
    records = [{"id": number, "text": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = [f"fuzzy.threshold={threshold}"]
    report = run_curate(path, folder / "labelled", ["fuzzy"], *settings)
    found = set()
    for cluster in report["clusters"]["fuzzy"]["shown"]:
        members = [cluster["kept_id"], *(one["id"] for one in cluster["removed"])]
        found |= set(combinations(sorted(members), 2))
    return found


# Quality of the duplicates


def at_jaccard(text, wanted, source):
    """A copy whose shingles have the least Jaccard similarity, word by word, above the wanted."""
    words = text.split()
    while True:
        before = " ".join(words)
        words[source.randrange(len(words))] = f"{source.randrange(10**6):x}"
        if jaccard(shingle_set(text, SHINGLE), shingle_set(" ".join(words), SHINGLE)) < wanted:
            return before


def recall(folder, source, pairs=60):
    """By planted similarity: the share of pairs at the threshold and above that were found, and of
    pairs below it how many were removed."""
    texts, planted = texts_of(pairs * len(PLANTED) * 0.0035, source), []
    originals = list(dict.fromkeys(texts))[: pairs * len(PLANTED)]
    everything = list(originals)
    for number, text in enumerate(originals):
        everything.append(at_jaccard(text, PLANTED[number % len(PLANTED)], source))
        planted.append((number, len(everything) - 1, PLANTED[number % len(PLANTED)]))
    found = our_pairs(everything, folder, THRESHOLD)
    sets = [shingle_set(text, SHINGLE) for text in everything]
    exact = {
        pair
        for pair in combinations(range(len(sets)), 2)
        if jaccard(sets[pair[0]], sets[pair[1]]) >= THRESHOLD
    }
    by_level = defaultdict(lambda: [0, 0])
    for first, second, level in planted:
        by_level[level][0] += (first, second) in found
        by_level[level][1] += 1
    return {
        "pairs_at_threshold": len(exact),
        "recall": len(found & exact) / len(exact),
        "found_below_threshold": len(found - exact),
        "found_by_planted_jaccard": {str(level): by_level[level] for level in PLANTED},
    }


def labelled(source, bases=300):
    """Documents, and the pairs that are copies by rule: words dropped, neighbours swapped,
    boilerplate before and after, an end cut off. Two copies of one document are a pair too."""
    texts = list(dict.fromkeys(texts_of(bases * 0.0025, source)))[:bases]
    boilerplate = "Share this page with your friends. All rights reserved. Read our terms of use."
    groups = []
    everything = []
    for text in texts:
        group = [len(everything)]
        everything.append(text)
        for _ in range(source.choice([0, 0, 1, 2])):
            words, rule = text.split(), source.randrange(4)
            if rule == 0:
                rate = source.choice([0.01, 0.03, 0.05])
                words = [word for word in words if source.random() > rate]
            elif rule == 1:
                for _ in range(max(1, len(words) // source.choice([20, 40, 80]))):
                    at = source.randrange(len(words) - 1)
                    words[at], words[at + 1] = words[at + 1], words[at]
            elif rule == 2:
                words = [*boilerplate.split(), *words, *boilerplate.split()]
            else:
                words = words[: int(source.choice([0.65, 0.75, 0.9]) * len(words))]
            group.append(len(everything))
            everything.append(" ".join(words))
        groups.append(group)
    return everything, {pair for group in groups for pair in combinations(group, 2)}


def f1(found, truth):
    right = len(found & truth)
    precision, recall = right / max(1, len(found)), right / max(1, len(truth))
    score = 2 * precision * recall / max(1e-9, precision + recall)
    return {"precision": precision, "recall": recall, "f1": score}


def labelled_scores(folder, source, threshold=THRESHOLD):
    texts, truth = labelled(source)
    contenders = {
        "mtcli": lambda: our_pairs(texts, folder, threshold),
        "datasketch": lambda: datasketch_pairs(texts, threshold),
        "rensa": lambda: rensa_pairs(texts, threshold),
    }
    return {name: f1(work(), truth) for name, work in contenders.items()}


def scaling(source, repeats, folder, megabytes=480):
    """Seconds by the clock on one worker over those on two, the least of each: at an idle machine
    only. There are blocks and shards enough that both workers end together."""
    path, _ = write_corpus(texts_of(megabytes, source), folder / "scaling")
    config = load_config(None, [f"stages={ALL}"])
    least = {1: float("inf"), 2: float("inf")}
    for _ in range(repeats):
        for workers in least:
            request = CurateRequest((str(path),), folder / "w", config, workers, force=True)
            began = time.perf_counter()
            curate(request, LocalEngine(workers), lambda _: None)
            least[workers] = min(least[workers], time.perf_counter() - began)
    return least[1] / least[2]


def main():
    parser = Arguments(__doc__, mb=0.2, repeats=1, only=["stages_mb_per_s", "extract_mb_per_s"])
    parser.add_argument("--mb", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="of the figures' names")
    parser.add_argument("--plot", help="draw the growth of memory into this PNG")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    source = random.Random(0)
    texts = texts_of(options.mb, source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            "recall": lambda: recall(folder, source),
            "labelled": lambda: labelled_scores(folder, source),
            "stages_mb_per_s": lambda: stage_rates(texts, options.repeats),
            "extract_mb_per_s": lambda: extraction_rates(options.repeats),
            "whole_mb_per_s": lambda: whole_rates(texts, options.repeats, folder),
            "datatrove_mb_per_s": lambda: datatrove_rates(texts, folder),
            "scaling": lambda: scaling(source, options.repeats, folder),
            "ray_share": lambda: ray_share(texts, options.repeats, folder),
            "head_s_per_million": lambda: head(texts, folder),
            "memory_mb_by_mb": lambda: memory(source, folder),
        }
        needs = {"ray_share": "ray", "datatrove_mb_per_s": "datatrove"}
        there = [name for name in figures if name not in needs or find_spec(needs[name])]
        wanted = options.only or there
        found = {name: figures[name]() for name in wanted}
    print(json.dumps(found, indent=2))
    write_rows(options.json, found)
    if options.plot:
        draw_memory(found["memory_mb_by_mb"], options.plot)


if __name__ == "__main__":
    main()
