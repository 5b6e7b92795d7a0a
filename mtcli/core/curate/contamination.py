"""Applies `decontaminate` to a corpus: counts n-grams in all of it, cuts documents part by part."""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.curate.config import DecontaminateConfig
from mtcli.core.curate.corpus import ChangedLines, Corpus, Removals, Slice
from mtcli.core.curate.decontaminate import TaskNgrams, cut_text
from mtcli.core.curate.engine import Engine
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import LINES, document_of, line_of, written_aside
from mtcli.core.runtime.process_pool import Progress


class _CutJob(NamedTuple):
    """The input of a worker that cuts documents; `common` says which n-grams are spared."""

    config: DecontaminateConfig
    ngrams: TaskNgrams
    common: Array


def cut_corpus(
    corpus: Corpus, config: DecontaminateConfig, folder: Path, engine: Engine
) -> dict[int, ChangedLines]:
    """Cuts every document with an n-gram of a task that is no common phrase; returns what is left,
    by part."""
    common = count_matches(corpus) >= config.common
    slices = corpus.new_slices()
    hit = {index: view for index, view in slices.items() if _hit(view, common).any()}
    if not hit:
        return {}
    job = _CutJob(config, TaskNgrams(config), common)
    made = engine.make(partial(_cut_part, job), hit, folder, "decontaminate")
    rows = {index: np.array(files.array("rows")) for index, files in made.items()}  # in memory
    return {index: ChangedLines(rows[index], files) for index, files in made.items()}


def cut_removals(corpus: Corpus, changed: dict[int, ChangedLines]) -> Removals:
    """The documents that cutting left nothing of, or that were cut too often."""
    rows = [np.zeros((2, 0), np.int64)]
    for index, (numbers, files) in sorted(changed.items()):
        reasons = files.array("reasons")
        table = np.stack([numbers + corpus.bounds[index], reasons])
        rows.append(table[:, reasons >= 0])
    removed, reasons = np.concatenate(rows, axis=1)
    none = np.full(len(removed), -1, np.int64)
    return Removals(removed, none, none, np.full(len(removed), np.nan), reasons)


def count_matches(corpus: Corpus) -> Array:
    """Counts each n-gram in the corpus [n-grams, up to the last that it has]."""
    counts = np.zeros(0, np.int64)
    for part, left, _ in corpus.new_slices().values():
        alive = np.repeat(left, part.array("num_matches"))
        more = np.bincount(part.array("matches")[alive]).astype(np.int64)
        longer, shorter = (counts, more) if len(counts) > len(more) else (more, counts)
        longer[: len(shorter)] += shorter
        counts = longer
    return counts


def _hit(view: Slice, common: Array) -> Array:
    """Selects a part's documents that are left and have an n-gram that is not common."""
    part, alive = view.part, view.alive
    owners = np.repeat(np.arange(part.count), part.array("num_matches"))
    matches = part.array("matches")[alive[owners]]
    return np.bincount(owners[alive[owners]], ~common[matches], part.count) > 0


def _cut_part(job: _CutJob, view: Slice, final: Path, progress: Progress) -> None:
    """Writes the documents of a part that are cut, and what is left of them."""
    part = view.part
    rows = np.flatnonzero(_hit(view, job.common))
    keys, lines, made, reasons, told = part.keys(), part.lines, [], [], []
    for row in rows.tolist():
        document = document_of(lines[row], keys[row], 0)
        before, text = len(document.text.encode()), document.text
        matches = [m for m in job.ngrams.matches(text) if not job.common[m.ngram]]
        cut = cut_text(text, matches, job.config)
        document.text = cut.text
        made.append(line_of(document))
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
    with written_aside(final) as aside:
        (aside / LINES).write_bytes(b"".join(made))
        np.save(aside / "rows.npy", rows)
        np.save(aside / "line_ends.npy", np.cumsum([len(line) for line in made], dtype=np.int64))
        np.save(aside / "reasons.npy", np.array(reasons, np.int64))
        (aside / "cuts.json").write_text(json.dumps(told))
