"""Applies `decontaminate` to a corpus: counts n-grams in all of it, cuts documents part by part."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mtcli.core.curate.config import DecontaminateConfig
from mtcli.core.curate.corpus import ChangedLines, Corpus, Found, Removals, Slice
from mtcli.core.curate.decontaminate import TaskNgrams, cut_text
from mtcli.core.curate.documents import Document, id_of, key_of
from mtcli.core.curate.engine import Engine
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import LINES, document_of, line_of, written_aside
from mtcli.core.runtime.process_pool import Progress


class _CutJob(NamedTuple):
    """The input of a worker that cuts documents; `spared` selects the common n-grams."""

    config: DecontaminateConfig
    ngrams: TaskNgrams
    spared: Array


def cut_corpus(
    corpus: Corpus, config: DecontaminateConfig, folder: Path, engine: Engine
) -> tuple[dict[int, ChangedLines], Found]:
    """Cuts the n-grams of tasks out of every document, but for common phrases; returns the cut
    documents' new lines by part, and the n-grams that the corpus has."""
    counts, ngrams = count_matches(corpus), TaskNgrams(config)
    spared = ngrams.spared(counts, config.common)
    found = ngrams.found(counts, spared)
    slices = corpus.new_slices()
    hit = {index: view for index, view in slices.items() if _hit(view, spared).any()}
    job = _CutJob(config, ngrams, spared)
    cut_parts = engine.make(partial(_cut_part, job), hit, folder, "decontaminate")
    rows = {index: np.array(files.array("rows")) for index, files in cut_parts.items()}  # in memory
    return {index: ChangedLines(rows[index], files) for index, files in cut_parts.items()}, found


def cut_removals(corpus: Corpus, changed: Mapping[int, ChangedLines]) -> Removals:
    """Lists the documents that cutting removed: nothing was left, or too many pieces."""
    rows = [np.zeros((2, 0), np.int64)]
    for index, (numbers, files) in sorted(changed.items()):
        reasons = files.array("reasons")
        table = np.stack([numbers + corpus.bounds[index], reasons])
        rows.append(table[:, reasons >= 0])
    removed, reasons = np.concatenate(rows, axis=1)
    none = np.full(len(removed), -1, np.int64)
    return Removals(removed, none, none, np.full(len(removed), np.nan), reasons)


def count_matches(corpus: Corpus) -> Array:
    """Counts how often each n-gram occurs in the corpus, int64 [last found n-gram + 1]."""
    counts = np.zeros(0, np.int64)
    for part, left, _ in corpus.new_slices().values():
        alive = np.repeat(left, part.array("num_matches"))
        more = np.bincount(part.array("matches")[alive]).astype(np.int64)
        longer, shorter = (counts, more) if len(counts) > len(more) else (more, counts)
        longer[: len(shorter)] += shorter
        counts = longer
    return counts


def _hit(view: Slice, spared: Array) -> Array:
    """Selects a part's alive documents that have an n-gram which is not spared."""
    part, alive = view.part, view.alive
    owners = np.repeat(np.arange(part.count), part.array("num_matches"))
    matches = part.array("matches")[alive[owners]]
    return np.bincount(owners[alive[owners]], ~spared[matches], part.count) > 0


def _cut_part(job: _CutJob, view: Slice, final: Path, progress: Progress) -> None:
    """Writes the new lines of a part's cut documents, with the reasons and details of each cut."""
    part = view.part
    rows = np.flatnonzero(_hit(view, job.spared))
    keys, lines, cut_lines, reasons, cut_records = part.keys(), part.lines, [], [], []
    for row in rows.tolist():
        document = document_of(lines[row], keys[row], 0)
        bytes_in, text = len(document.text.encode()), document.text
        matches = [m for m in job.ngrams.matches(text) if not job.spared[m.ngram]]
        cut = cut_text(text, matches, job.config)
        pieces = _pieces(document, cut.pieces)
        cut_lines.append(b"".join(map(line_of, pieces)))
        reason = 0 if len(pieces) > job.config.max_pieces else 1 if not pieces else -1
        reasons.append(reason)
        cut_records.append(
            {
                "cuts": cut.cuts,
                "bytes_in": bytes_in,
                "bytes_out": sum(piece.size for piece in pieces) if reason < 0 else 0,
                "pieces": len(pieces),
                "ngrams": list(dict.fromkeys(map(job.ngrams.text, cut.ngrams))),
                "tasks": job.ngrams.tasks_of(cut.ngrams),
            }
        )
    with written_aside(final) as aside:
        (aside / LINES).write_bytes(b"".join(cut_lines))
        np.save(aside / "rows.npy", rows)
        np.save(
            aside / "line_ends.npy", np.cumsum([len(line) for line in cut_lines], dtype=np.int64)
        )
        np.save(aside / "reasons.npy", np.array(reasons, np.int64))
        (aside / "cuts.json").write_text(json.dumps(cut_records))


def _pieces(document: Document, texts: tuple[str, ...]) -> list[Document]:
    """Makes a document of each piece; several pieces have the document's id with "#1", "#2", ...
    appended."""
    keys = [document.key]
    if len(texts) > 1:
        name = id_of(document.key)
        keys = [
            piece_key
            for n in range(len(texts))
            if (piece_key := key_of(f"{name}#{n + 1}")) is not None
        ]
    return [
        replace(document, key=key, text=text, size=len(text.encode()))
        for key, text in zip(keys, texts, strict=bool(texts))
    ]
