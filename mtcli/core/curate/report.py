"""Builds the report: documents into and out of every stage, reasons, and samples with their ids.

The report holds no time, path or number of workers: it is a function of the input and the
configuration.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from mtcli.core.config.counts import counted
from mtcli.core.config.errors import Problem
from mtcli.core.config.untrusted import listed, parse_json
from mtcli.core.curate.blend import blend_of
from mtcli.core.curate.config import Stage, as_dict
from mtcli.core.curate.corpus import CORPUS_REASONS, Corpus, PassResult, Removals
from mtcli.core.curate.document_stages import BAD_TOLD, BINS, SAMPLE_CHARACTERS, SAMPLES, StageCount
from mtcli.core.curate.documents import CorpusFiles, id_of
from mtcli.core.curate.large_clusters import large_clusters
from mtcli.core.curate.parts import json_line
from mtcli.core.curate.request import Corpora, CurateRequest

CLUSTERS_TOLD = 1000  # in report.json; removed.jsonl.zst has them all
CONTAMINATED_TOLD = 1000


def described(request: CurateRequest, corpora: Corpora) -> dict[str, Any]:
    """Returns the configuration and the inputs, as the report has them."""
    inputs = {"files": _files(corpora.new), "against": corpora.old and _files(corpora.old)}
    return {"config": as_dict(request.config), "inputs": inputs}


def build_report(
    request: CurateRequest,
    corpora: Corpora,
    results: list[PassResult],
    shards: list[dict[str, Any]],
) -> dict[str, Any]:
    stages: dict[str, StageCount] = {}
    bad: dict[str, Any] = {"count": 0, "examples": []}
    passed_over: Counter[str] = Counter()
    histograms = np.zeros((2, BINS), np.int64)
    clusters: dict[str, Any] = {}
    contamination: dict[str, Any] = {}
    for number, result in enumerate(results):
        for part, *_ in result.corpus.new_slices().values():
            summary = part.summary
            for stage, count in summary["stages"].items():
                stages.setdefault(stage, StageCount()).merge(count)
            if number == 0:
                bad["count"] += summary["bad"]["count"]
                bad["examples"] += summary["bad"]["examples"]
                passed_over.update(summary["passed_over"])
            histograms += summary["sizes"]
        for stage, removals in result.removals.items():
            cuts = _cuts(result) if stage == "decontaminate" else {}
            stages[stage] = _corpus_count(stage, result, removals, cuts)
            if stage == "decontaminate":
                contamination = _contamination(result, cuts, removals)
            else:
                clusters[stage] = _clusters(result.corpus, removals)
                if stage == "fuzzy":
                    large = large_clusters(result.corpus, result.entered[stage], removals)
                    clusters[stage]["large"] = large
    bad["examples"] = bad["examples"][:BAD_TOLD]
    order = [stage for stage in request.config.ordered if stage in stages]
    sources = _sources(results[-1].corpus)
    return {
        **described(request, corpora),
        "bad_lines": bad,
        "passed_over": dict(sorted(passed_over.items())),
        "stages": [{"stage": stage} | stages[stage].dump() for stage in order],
        "sources": sources,
        "clusters": clusters,
        "contamination": contamination,
        "blend": blend_of(request.config.blend, sources),
        "histograms": {"bytes_log2": histograms.tolist()},
        "documents": sum(shard["documents"] for shard in shards),
        "shards": shards,
    }


def nothing_left(report: dict[str, Any]) -> Problem:
    """Words what happened to all records, by reason, where a run ends with no document."""
    passed_over, bad, stages = report["passed_over"], report["bad_lines"], report["stages"]
    files, read = len(report["inputs"]["files"]), stages[0]["documents_in"] if stages else 0
    said = [f"0 documents are left of {read:,} in {counted(files, 'file')}"]
    if passed_over:
        said.append(f"passed over: {_counted(passed_over)}")
    if bad["count"]:
        said.append(f"{bad['count']:,} bad records, such as {bad['examples'][0]}")
    said += [f"{s['stage']}: {_counted(s['reasons'])}" for s in stages if s["reasons"]]
    if read:
        last = next(s["stage"] for s in stages if not s["documents_out"])
        other_stages = [stage for stage in report["config"]["stages"] if stage != last]
        hint = f"change the settings of [{last}], or leave the stage out: "
        hint += f'--set "stages={other_stages}"'
    elif passed_over:
        hint = "of WARC, HTML pages with status 200 are read, and texts of WET files"
    else:
        hint = "give files that hold records"
    return Problem("; ".join(said), hint)


def why(stage: dict[str, Any]) -> str:
    """Words why documents were dropped by a stage of a report, and how others were cut."""
    ordered = sorted(stage["reasons"].items(), key=lambda item: (-item[1], item[0]))
    words = [f"{reason} {count:,}" for reason, count in ordered]
    if cut := stage["documents_cut"]:
        words.append(f"{cut:,} cut into {counted(stage['pieces'], 'piece')} around texts of tasks")
    return ", ".join(words)


def _counted(reasons: dict[str, int]) -> str:
    """Words counts by reason, the most frequent first: "3 answers with status 404, 1 WARC records:
    'request'"."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{count:,} {reason}" for reason, count in ordered])


def removed_lines(results: list[PassResult]) -> Iterator[bytes]:
    """Yields the lines of removed.jsonl.zst, by stage and then in the order of the input."""
    for result in results:
        for part, *_ in result.corpus.new_slices().values():
            yield from part.removed()
        for stage, removals in result.removals.items():
            cuts = _cuts(result) if stage == "decontaminate" else {}
            for entry in _removed(result.corpus, removals):
                number, reason = entry.pop("number"), entry.pop("reason")
                line = {"id": entry.pop("id"), "source": entry.pop("source"), "stage": stage}
                line |= {"reason": CORPUS_REASONS[stage][reason]} | entry
                yield json_line(line | _ngrams(cuts.get(number)))


def _removed(corpus: Corpus, removals: Removals) -> Iterator[dict[str, Any]]:
    """Yields the record of each removed document."""
    ids = _ids(corpus, removals.removed)
    kept_ids = _ids(corpus, removals.kept)
    roots = _ids(corpus, removals.root)
    sources = corpus.sources(removals.removed)
    for index, number in enumerate(removals.removed.tolist()):
        entry = {"number": number, "reason": int(removals.reason[index]), "id": ids[index]}
        entry |= {"source": sources[index], "kept_id": kept_ids[index]}
        if kept_ids[index] is not None:
            jaccard = float(removals.jaccard[index])
            entry |= {"jaccard": round(jaccard, 6), "cluster": roots[index]}
        yield entry


def _ids(corpus: Corpus, numbers: np.ndarray) -> list[str | int | None]:
    """Returns the ids of documents; None for -1."""
    present = np.flatnonzero(numbers >= 0)
    ids: list[str | int | None] = [None] * len(numbers)
    for index, key in zip(present.tolist(), corpus.keys(numbers[present]), strict=True):
        ids[index] = id_of(key)
    return ids


def _corpus_count(
    stage: Stage, result: PassResult, removals: Removals, cuts: dict[int, dict[str, Any]]
) -> StageCount:
    corpus = result.corpus
    entered = result.entered[stage][: corpus.num_new]
    sizes = corpus.column("sizes")[: corpus.num_new]
    left = entered.copy()
    left[removals.removed] = False
    lost = sum(cut["bytes_in"] - cut["bytes_out"] for n, cut in cuts.items() if left[n])
    pieces = [cut["pieces"] for n, cut in cuts.items() if left[n] and cut["cuts"]]
    count = StageCount(
        documents_in=int(entered.sum()),
        documents_out=int(left.sum()) + sum(pieces) - len(pieces),
        bytes_in=int(sizes[entered].sum()),
        bytes_out=int(sizes[left].sum()) - lost,
        documents_cut=len(pieces),
        pieces=sum(pieces),
    )
    for index, reason in enumerate(CORPUS_REASONS[stage]):
        of_it = removals.removed[removals.reason == index]
        if of_it.size:
            count.reasons[reason] = int(of_it.size)
    first = {
        reason: removals.removed[removals.reason == index][:SAMPLES].tolist()
        for index, reason in enumerate(CORPUS_REASONS[stage])
    }
    sampled = [number for numbers in first.values() for number in numbers]
    descriptions = _by_number(corpus, removals.rows(np.isin(removals.removed, sampled)))
    for reason, numbers in first.items():
        for number in numbers:
            sample = {
                k: v for k, v in descriptions[number].items() if k not in ("number", "reason")
            }
            text = corpus.text(number)[:SAMPLE_CHARACTERS]
            count.sample(reason, sample | {"text": text} | _ngrams(cuts.get(number)))
    return count


def _by_number(corpus: Corpus, removals: Removals) -> dict[int, dict[str, Any]]:
    return {document["number"]: document for document in _removed(corpus, removals)}


def _clusters(corpus: Corpus, removals: Removals) -> dict[str, Any]:
    """Describes each cluster: the document that stays, and the removed ones with their Jaccard."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, root in enumerate(removals.root.tolist()):
        members[root].append(index)
    roots = np.array(list(members), np.int64)
    ordered = [root for _, root in sorted(zip(corpus.keys(roots), roots.tolist(), strict=True))]
    shown = ordered[:CLUSTERS_TOLD]
    indices = np.array([index for root in shown for index in members[root]], np.int64)
    descriptions = _by_number(corpus, removals.rows(indices))
    listed = []
    for root in shown:
        copies = [descriptions[int(removals.removed[index])] for index in members[root]]
        removed = [{"id": copy["id"], "jaccard": copy["jaccard"]} for copy in copies]
        cluster = {"cluster": copies[0]["cluster"], "kept_id": copies[0]["kept_id"]}
        listed.append(cluster | {"removed": removed})
    sizes = np.bincount([len(indices) + 1 for indices in members.values()])
    return {
        "count": len(members),
        "sizes": {str(size): int(sizes[size]) for size in np.flatnonzero(sizes)},
        "jaccard": np.histogram(removals.jaccard, 20, (0.0, 1.0))[0].tolist(),
        "shown": listed,
    }


def _cuts(result: PassResult) -> dict[int, dict[str, Any]]:
    """Reads by document number the cuts of each document that had an n-gram of a task."""
    cuts: dict[int, dict[str, Any]] = {}
    for index, (rows, files) in sorted(result.changed.items()):
        part_cuts = parse_json(bytes(files.data("cuts.json")))
        cuts |= dict(zip((rows + result.corpus.bounds[index]).tolist(), part_cuts, strict=True))
    return cuts


def _ngrams(cut: dict[str, Any] | None) -> dict[str, Any]:
    return {"tasks": cut["tasks"], "ngrams": cut["ngrams"]} if cut else {}


def _contamination(
    result: PassResult, cuts: dict[int, dict[str, Any]], removals: Removals
) -> dict[str, Any]:
    """Lists by task: its n-grams in the corpus, the documents cut for them, and the task's texts
    with spared common phrases."""
    corpus, found = result.corpus, result.found
    assert found is not None, "the stage was run"
    numbers = np.array(list(cuts), np.int64)
    ids = dict(zip(numbers.tolist(), _ids(corpus, numbers), strict=True))
    dropped = set(removals.removed.tolist())
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, cut in cuts.items():
        entry = {"id": ids[number], "cuts": cut["cuts"], "dropped": number in dropped}
        for task in cut["tasks"]:
            tasks[task].append(entry | {"ngrams": cut["ngrams"]})
    return {
        task: {
            "documents": len(tasks[task]),
            "shown": tasks[task][:CONTAMINATED_TOLD],
            "ngrams": ngrams,
            "common": found.spared.get(task, []),
        }
        for task, ngrams in found.ngrams.items()
    }


def _sources(corpus: Corpus) -> dict[str, Any]:
    """Counts the remaining documents and bytes by source; cut documents count as before the cut."""
    total: dict[str, dict[str, int]] = defaultdict(lambda: {"documents": 0, "bytes": 0})
    for part, alive, _ in corpus.new_slices().values():
        names, source_ids = part.summary["sources"], part.array("sources")[alive]
        sizes = np.bincount(source_ids, part.array("sizes")[alive], len(names))
        for name, count, size in zip(
            names, np.bincount(source_ids, minlength=len(names)), sizes, strict=True
        ):
            total[name]["documents"] += int(count)
            total[name]["bytes"] += int(size)
    return dict(sorted(total.items()))


def _files(inputs: CorpusFiles) -> list[dict[str, Any]]:
    return [{"name": inputs.names[s.path], "bytes": s.size} for s in inputs.sources]
