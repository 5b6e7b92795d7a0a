"""Applies `decontaminate` to a corpus: counts n-grams in all of it, cuts documents part by part."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.curate.config import DecontaminateConfig
from mtcli.core.curate.corpus import ChangedLines, Corpus, Removals
from mtcli.core.curate.decontaminate import TaskNgrams, cut_text
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import LINES, document_of, line_of, part_folder, publish
from mtcli.core.curate.workers import Runner
from mtcli.core.runtime.process_pool import Progress


class _CutJob(NamedTuple):
    """What a worker needs to cut documents; `common` says which n-grams are spared."""

    corpus: Corpus
    config: DecontaminateConfig
    ngrams: TaskNgrams
    common: Array
    folder: Path


def cut_corpus(
    corpus: Corpus, config: DecontaminateConfig, folder: Path, run: Runner
) -> dict[int, ChangedLines]:
    """Cuts every document with an n-gram of a task that is no common phrase; returns what is left,
    by part."""
    common = count_matches(corpus) >= config.common
    folder.mkdir(exist_ok=True)
    parts = [
        index
        for index, part in enumerate(corpus.parts)
        if not part.against and _hit(corpus, index, common).any()
    ]
    missing = [index for index in parts if not part_folder(folder, index).exists()]
    if missing:
        job = _CutJob(corpus, config, TaskNgrams(config), common, folder)
        for _ in run(partial(_cut_part, job), missing, len(missing), "decontaminate"):
            pass
    folders = {index: part_folder(folder, index) for index in parts}
    return {i: ChangedLines(np.load(path / "rows.npy"), path) for i, path in folders.items()}


def cut_removals(corpus: Corpus, changed: dict[int, ChangedLines]) -> Removals:
    """The documents that cutting left nothing of, or that were cut too often."""
    rows = [np.zeros((2, 0), np.int64)]
    for index, (numbers, folder) in sorted(changed.items()):
        reasons = np.load(folder / "reasons.npy")
        table = np.stack([numbers + corpus.bounds[index], reasons])
        rows.append(table[:, reasons >= 0])
    removed, reasons = np.concatenate(rows, axis=1)
    none = np.full(len(removed), -1, np.int64)
    return Removals(removed, none, none, np.full(len(removed), np.nan), reasons)


def count_matches(corpus: Corpus) -> Array:
    """How often the corpus has each n-gram [n-grams, up to the last that it has]."""
    counts = np.zeros(0, np.int64)
    for index, part in enumerate(corpus.parts):
        if not part.against:
            alive = np.repeat(corpus.alive_of(index), part.array("num_matches"))
            more = np.bincount(part.array("matches")[alive]).astype(np.int64)
            longer, shorter = (counts, more) if len(counts) > len(more) else (more, counts)
            longer[: len(shorter)] += shorter
            counts = longer
    return counts


def _hit(corpus: Corpus, index: int, common: Array) -> Array:
    """Which documents of a part are left and have an n-gram that is not common."""
    part, alive = corpus.parts[index], corpus.alive_of(index)
    owners = np.repeat(np.arange(part.count), part.array("num_matches"))
    matches = part.array("matches")[alive[owners]]
    return np.bincount(owners[alive[owners]], ~common[matches], part.count) > 0


def _cut_part(job: _CutJob, index: int, progress: Progress = lambda _: None) -> None:
    """Writes the documents of a part that are cut, and what is left of them."""
    final = part_folder(job.folder, index)
    aside = final.with_name(final.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    part = job.corpus.parts[index]
    rows = np.flatnonzero(_hit(job.corpus, index, job.common))
    keys, ends, reasons, told = part.keys(), [0], [], []
    with open(aside / LINES, "wb") as file:
        for row in rows.tolist():
            document = document_of(part.lines[row], keys[row], 0)
            before, text = len(document.text.encode()), document.text
            matches = [m for m in job.ngrams.matches(text) if not job.common[m.ngram]]
            cut = cut_text(text, matches, job.config)
            document.text = cut.text
            ends.append(ends[-1] + file.write(line_of(document)))
            too_many = cut.cuts > job.config.max_cuts
            reason = 0 if too_many else 1 if not cut.text.strip() else -1
            reasons.append(reason)
            told.append(
                {
                    "cuts": cut.cuts,
                    "bytes_in": before,
                    "bytes_out": len(cut.text.encode()) if reason < 0 else 0,
                    "ngrams": list(dict.fromkeys(map(job.ngrams.text, cut.ngrams))),
                    "tasks": job.ngrams.tasks_of(cut.ngrams),
                }
            )
    np.save(aside / "rows.npy", rows)
    np.save(aside / "line_ends.npy", np.array(ends[1:], np.int64))
    np.save(aside / "reasons.npy", np.array(reasons, np.int64))
    (aside / "cuts.json").write_text(json.dumps(told))
    publish(aside, final)
    progress(1)
