"""The pipeline: passes over the documents, decisions over the corpus between them, shards.

The result is a function of the input files' names and bytes and of the configuration. All that is
made on the way lies in `OUTPUT/.curate`, in parts that appear whole or not at all, so that a run
that was killed goes on from there, on any number of workers.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import failed, wrong
from mtcli.core.config.untrusted import append_untrusted, read_untrusted
from mtcli.core.curate.config import CurateConfig, Stage, as_dict
from mtcli.core.curate.corpus import Corpus, Removals
from mtcli.core.curate.decontaminate import REASONS, TaskNgrams, cut_text
from mtcli.core.curate.documents import (
    BLOCK_BYTES,
    Document,
    Inputs,
    Reader,
    blocks_of,
    count_lines,
    find_inputs,
)
from mtcli.core.curate.exact import same_texts
from mtcli.core.curate.fuzzy import find_near
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.parts import Part, PartWriter, document_of, line_of, publish, save_arrays
from mtcli.core.curate.shards import (
    ShardJob,
    changed_lines,
    gather_routes,
    plan_shards,
    route_part,
    write_shard,
)
from mtcli.core.curate.stages import BlockWork, Group, groups_of
from mtcli.core.curate.workers import Runner
from mtcli.core.data.documents import Reading
from mtcli.core.data.sources import REMOVED, REPORT, FileKind, FileRange, TextBlock, told
from mtcli.core.runtime.atomic_writes import write_text
from mtcli.core.runtime.process_pool import Progress

WORK = ".curate"
REPORT_HTML = "report.html"
CORPUS_REASONS = {"exact": ("same text",), "fuzzy": ("near duplicate",), "decontaminate": REASONS}

Say = Callable[[str], None]


class CurateRequest(NamedTuple):
    """A request to curate; the flags of the command, by their names."""

    inputs: tuple[str, ...]
    output: Path
    config: CurateConfig
    workers: int = 1
    against: tuple[str, ...] = ()
    text_key: str = "text"
    split_on_blank: bool = False
    skip_bad: bool = False
    resume: bool = False
    force: bool = False
    format: FileKind | None = None


class Corpora(NamedTuple):
    """The files to clean, and those of an older corpus that are compared with only."""

    new: Inputs
    old: Inputs | None


class PassResult(NamedTuple):
    """What a pass left: the corpus, what corpus stages removed, and what they cut, by part."""

    corpus: Corpus
    removals: dict[Stage, Removals]
    changed: dict[int, tuple[Array, Path]]
    entered: dict[Stage, Array]  # who was alive before each corpus stage


def curate(request: CurateRequest, say: Say) -> dict[str, Any]:
    """Writes the shards, the removed documents and the report to `output`; returns the report.

    Raises MtcliError for inputs and configurations that are wrong, for an output that exists, and
    for a full disk.
    """
    corpora = find_corpora(request)
    if request.resume and (report := _done(request, corpora)):
        say(f"{request.output} is complete: nothing to do")
        return report
    _require_free(request)
    work = request.output / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
        with open(work / "lock", "ab") as lock:
            _take(lock, request.output)
            _begin(work, request, corpora)
            report = _Pipeline(request, corpora, work, say).run()
        shutil.rmtree(work)
    except OSError as error:
        raise failed(f"{request.output}: {error}", "free space, then --resume") from None
    return report


def find_corpora(request: CurateRequest) -> Corpora:
    """Finds all input files. Raises MtcliError for what is not there."""
    new = find_inputs(request.inputs, request.format)
    old = find_inputs(request.against) if request.against else None
    if any(source.kind == "warc" for source in new.sources):
        if "extract" not in request.config.ordered:
            said = "a WARC file is given, and the stages have no extract"
            raise wrong(said, "stages = ['extract', ...]", "stages")
    return Corpora(new, old)


class _Pipeline:
    """One run, in its work folder."""

    def __init__(self, request: CurateRequest, corpora: Corpora, work: Path, say: Say) -> None:
        self.request, self.corpora, self.work, self.say = request, corpora, work, say
        self.config = request.config
        self.run_phase = Runner(request.workers)
        self.groups = groups_of(self.config.ordered)

    def run(self) -> dict[str, Any]:
        """Runs all passes and publishes; returns the report."""
        from mtcli.core.curate.report import build_report

        files, size = len(self.corpora.new.sources), self.corpora.new.size
        self.say(
            f"{files:,} files of {size / 1e6:,.1f} MB -> {self.request.output}; "
            f"{', '.join(self.config.ordered) or 'no stages'}; {self.request.workers} workers"
        )
        if left_out := self.corpora.new.left_out:
            self.say(f"left out of folders: {told(left_out)}")
        results: list[PassResult] = []
        for number, group in enumerate(self.groups):
            parts = (
                self._first_pass(group)
                if not results
                else self._next_pass(number, group, results[-1])
            )
            results.append(self._decide(number, group, Corpus(parts)))
        made = self.work / "out"
        made.mkdir(exist_ok=True)
        shards = self._write_shards(results[-1], made)
        self._write_removed(results, made)
        report = build_report(self.request, self.corpora, results, shards)
        self._publish(report, made)
        return report

    # Passes

    def _first_pass(self, group: Group) -> list[Part]:
        inputs = self.corpora.new
        folder = self.work / "pass-0"
        features = Group((), tuple(s for s in group.corpus if s != "decontaminate"))
        parts = self._read(inputs, group, folder)
        if self.corpora.old and any("exact" in g.corpus or "fuzzy" in g.corpus for g in [group]):
            old = self._read(self.corpora.old, features, self.work / "against-0")
            parts += [Part(part.folder, against=True) for part in old]
        return parts

    def _read(self, inputs: Inputs, group: Group, folder: Path) -> list[Part]:
        request = self.request
        blocks = blocks_of(inputs, request.split_on_blank)
        reading = Reading(request.text_key, request.split_on_blank, False, None, whole=True)
        missing = [block for block in blocks if not _part_folder(folder, block.number).exists()]
        if missing:
            before = self._lines_before(blocks) if len(blocks) > 1 else {}
            reader = Reader(reading, inputs.names, before)
            work = partial(
                _read_block, BlockWork(group, self.config, request.skip_bad), reader, folder
            )
            size = sum(block.size for block in missing)
            for _ in self.run_phase(work, missing, size, "read", "B"):
                pass
        return [Part(_part_folder(folder, block.number)) for block in blocks]

    def _lines_before(self, blocks: list[TextBlock]) -> dict[tuple[str, int], int]:
        """Counts the lines before each file range that starts inside of a file."""
        pieces = [piece for block in blocks for piece in block.pieces]
        split = [piece for piece in pieces if piece.stop < piece.source.size]
        size = sum(piece.stop - piece.start for piece in split)
        counts = self.run_phase(count_piece, split, size, "count lines", "B")
        found, lines = {}, 0
        for piece, count in zip(split, counts, strict=True):
            lines = count + (lines if piece.start else 0)
            found[piece.source.path, piece.stop] = lines
        return found

    def _next_pass(self, number: int, group: Group, last: PassResult) -> list[Part]:
        """Runs further per-document stages over what the last pass left."""
        folder = self.work / f"pass-{number}"
        corpus = last.corpus
        new = [index for index, part in enumerate(corpus.parts) if not part.against]
        missing = [index for index in new if not _part_folder(folder, index).exists()]
        block_work = BlockWork(group, self.config, True)
        work = partial(_reread_part, block_work, corpus, last.changed, folder)
        for _ in self.run_phase(work, missing, len(missing), f"pass {number + 1}"):
            pass
        parts = [Part(_part_folder(folder, index)) for index in new]
        if self.corpora.old and group.corpus:
            features = Group((), tuple(s for s in group.corpus if s != "decontaminate"))
            old = self._read(self.corpora.old, features, self.work / f"against-{number}")
            parts += [Part(part.folder, against=True) for part in old]
        return parts

    # Decisions

    def _decide(self, number: int, group: Group, corpus: Corpus) -> PassResult:
        removals: dict[Stage, Removals] = {}
        changed: dict[int, tuple[Array, Path]] = {}
        entered = {}
        for stage in group.corpus:
            entered[stage] = corpus.alive.copy()
            folder = self.work / f"{stage}-{number}"
            path = folder.with_suffix(".npz")
            if stage == "decontaminate":
                changed = self._decontaminate(corpus, folder)
            if not path.exists():
                self._removals(stage, corpus, folder, changed).save(path)
            removals[stage] = Removals.load(path)
            corpus.alive[removals[stage].removed] = False
        return PassResult(corpus, removals, changed, entered)

    def _removals(
        self,
        stage: Stage,
        corpus: Corpus,
        folder: Path,
        changed: Mapping[int, tuple[Array, Path]],
    ) -> Removals:
        priority = self.config.priority(stage)
        if stage == "exact":
            return _exact(corpus, priority)
        if stage == "fuzzy":
            return find_near(corpus, self.config.fuzzy, priority, folder, self.run_phase)
        found = [_dropped(corpus, index, folder) for index, (_, folder) in sorted(changed.items())]
        table = np.concatenate([np.zeros((0, 2), np.int64), *found])
        none = np.full(len(table), -1, np.int64)
        return Removals(table[:, 0], none, none, np.full(len(table), np.nan), table[:, 1])

    def _decontaminate(self, corpus: Corpus, folder: Path) -> dict[int, tuple[Array, Path]]:
        """Cuts every document with an n-gram of a task that is no common phrase."""
        counts, hit = count_matches(corpus)
        common = counts >= self.config.decontaminate.common
        folder.mkdir(exist_ok=True)
        save_arrays(folder / "counts.npz", counts=counts)
        parts = [index for index in hit if (hit[index] & _any(corpus, index, common)).any()]
        missing = [index for index in parts if not _part_folder(folder, index).exists()]
        if missing:
            ngrams = TaskNgrams(self.config.decontaminate)
            work = partial(_cut_part, self.config, ngrams, corpus, common, folder)
            for _ in self.run_phase(work, missing, len(missing), "decontaminate"):
                pass
        folders = {index: _part_folder(folder, index) for index in parts}
        return {index: (np.load(path / "rows.npy"), path) for index, path in folders.items()}

    # Output

    def _write_shards(self, last: PassResult, made: Path) -> list[dict[str, Any]]:
        corpus = last.corpus
        plan = plan_shards(corpus, self.config.shard_mb * 1_000_000, bool(self.config.blend))
        indices = [i for i, part in enumerate(corpus.parts) if not part.against]
        route = partial(route_part, corpus, plan)
        routes = list(self.run_phase(route, indices, len(indices), "sort ids"))
        job = ShardJob(corpus, plan, gather_routes(routes, plan), made, last.changed)
        work, count = partial(write_shard, job), len(plan.names)
        return list(self.run_phase(work, range(count), count, "write shards"))

    def _write_removed(self, results: list[PassResult], made: Path) -> None:
        import zstandard

        from mtcli.core.curate.report import removed_lines

        path = made / REMOVED
        aside = path.with_name("." + REMOVED)
        with open(aside, "wb") as file:
            compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
            with compressor.stream_writer(file, closefd=False) as stream:
                for line in removed_lines(results):
                    stream.write(line)
        aside.replace(path)

    def _publish(self, report: dict[str, Any], made: Path) -> None:
        """Moves all to the output folder; the report last, which says that the rest is there."""
        from mtcli.core.curate.html import report_html

        output = self.request.output
        write_text(made / REPORT_HTML, report_html(report))
        write_text(made / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        names = {path.name for path in made.iterdir()} - {REPORT}
        for old in _outputs(output):
            if old.name not in names:
                old.unlink()
        for name in [*sorted(names), REPORT]:
            (made / name).replace(output / name)


def _read_block(
    work: BlockWork, reader: Reader, folder: Path, block: TextBlock, progress: Progress
) -> None:
    writer = PartWriter(_part_folder(folder, block.number))
    work.run((item for piece in block.pieces for item in reader.read(piece, progress)), writer)


def count_piece(piece: FileRange, progress: Progress) -> int:
    """Counts the line breaks of a file range; none where ranges of its kind are whole files."""
    return count_lines(piece, progress)


def _reread_part(
    work: BlockWork,
    corpus: Corpus,
    changed: Mapping[int, tuple[Array, Path]],
    folder: Path,
    index: int,
    progress: Progress,
) -> None:
    work.run(_documents(corpus, index, changed), PartWriter(_part_folder(folder, index)))
    progress(1)


def _documents(
    corpus: Corpus, index: int, changed: Mapping[int, tuple[Array, Path]]
) -> Iterator[Document]:
    """The documents of a part that are left."""
    part = corpus.parts[index]
    cut = changed_lines(changed.get(index))
    keys, lines = part.keys(), part.lines
    alive = corpus.alive[corpus.bounds[index] : corpus.bounds[index + 1]]
    for row in np.flatnonzero(alive).tolist():
        document = document_of(cut[row] if row in cut else lines[row], keys[row], 0)
        document.size = len(document.text.encode("utf-8", "surrogatepass"))
        yield document


def _exact(corpus: Corpus, priority: tuple[str, ...]) -> Removals:
    numbers = np.flatnonzero(corpus.alive)
    groups = same_texts(corpus.column("text_hash")[numbers].reshape(-1, 2))
    order = np.argsort(groups, kind="stable")
    begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(np.append(begins, len(order)))
    clusters = [
        np.sort(numbers[order[start : start + size]])
        for start, size in zip(begins[sizes > 1], sizes[sizes > 1], strict=True)
    ]
    return corpus.removals(clusters, priority)


def count_matches(corpus: Corpus) -> tuple[Array, dict[int, Array]]:
    """How often the corpus has each n-gram, and which documents of a part have any."""
    counts, hit = np.zeros(0, np.int64), {}
    for index, part in enumerate(corpus.parts):
        if part.against:
            continue
        alive = corpus.alive[corpus.bounds[index] : corpus.bounds[index + 1]]
        per_document = part.array("num_matches")
        matches = part.array("matches")[np.repeat(alive, per_document)]
        if matches.size:
            more = np.bincount(matches)
            longer, shorter = (counts, more) if len(counts) > len(more) else (more, counts)
            counts = longer.astype(np.int64)
            counts[: len(shorter)] += shorter
            hit[index] = alive & (per_document > 0)
    return counts, hit


def _any(corpus: Corpus, index: int, common: Array) -> Array:
    """Which documents of a part have an n-gram that is not common."""
    part = corpus.parts[index]
    per_document, matches = part.array("num_matches"), part.array("matches")
    rare = np.zeros(len(matches), bool)
    known = matches < len(common)
    rare[known] = ~common[matches[known]]
    owners = np.repeat(np.arange(len(per_document)), per_document)
    return np.bincount(owners, rare, len(per_document)) > 0


def _cut_part(
    config: CurateConfig,
    ngrams: TaskNgrams,
    corpus: Corpus,
    common: Array,
    folder: Path,
    index: int,
    progress: Progress,
) -> None:
    """Writes the documents of a part that are cut, and what is left of them."""
    final = _part_folder(folder, index)
    aside = final.with_name(final.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    alive = corpus.alive[corpus.bounds[index] : corpus.bounds[index + 1]]
    rows = np.flatnonzero(alive & _any(corpus, index, common))
    part, rule = corpus.parts[index], config.decontaminate
    keys, ends, reasons, told = part.keys(), [0], [], []
    with open(aside / "documents.jsonl", "wb") as file:
        for row in rows.tolist():
            document = document_of(part.lines[row], keys[row], 0)
            matches = [m for m in ngrams.matches(document.text) if not common[m.ngram]]
            cut = cut_text(document.text, matches, rule)
            before = len(document.text.encode())
            document.text = cut.text
            line = line_of(document)
            ends.append(ends[-1] + file.write(line))
            too_many = cut.cuts > rule.max_cuts
            reasons.append(0 if too_many else 1 if not cut.text.strip() else -1)
            tasks = sorted({ngrams.names[ngrams.task_of[n]] for n in cut.ngrams})
            told.append(
                {
                    "cuts": cut.cuts,
                    "bytes_in": before,
                    "bytes_out": len(cut.text.encode()) if reasons[-1] < 0 else 0,
                    "ngrams": list(dict.fromkeys(map(ngrams.text, cut.ngrams))),
                    "tasks": tasks,
                }
            )
    np.save(aside / "rows.npy", rows)
    np.save(aside / "line_ends.npy", np.array(ends[1:], np.int64))
    np.save(aside / "reasons.npy", np.array(reasons, np.int64))
    (aside / "cuts.json").write_text(json.dumps(told))
    publish(aside, final)
    progress(1)


def _dropped(corpus: Corpus, index: int, folder: Path) -> Array:
    """(number, reason) of the documents of a part that cutting left nothing of [dropped, 2]."""
    rows, reasons = np.load(folder / "rows.npy"), np.load(folder / "reasons.npy")
    gone = reasons >= 0
    return np.stack([rows[gone] + corpus.bounds[index], reasons[gone]], axis=1).astype(np.int64)


def _part_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


# The output folder


def _fingerprint(request: CurateRequest, corpora: Corpora) -> str:
    """Fingerprints a run: equal for two that must write the same bytes."""
    files = [
        [(source.path, source.size, os.stat(source.path).st_mtime_ns) for source in one.sources]
        for one in corpora
        if one
    ]
    told = [files, as_dict(request.config), request.text_key, request.split_on_blank]
    told += [request.format, BLOCK_BYTES]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _take(lock: Any, output: Path) -> None:
    try:
        # lockf, not flock: workers forked later must not hold it when we are killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise wrong(f"another run is writing {output}", "wait for it, or end it") from None


def _begin(work: Path, request: CurateRequest, corpora: Corpora) -> None:
    """Empties the work folder, unless this run resumes what is in it."""
    path, now = work / "fingerprint", _fingerprint(request, corpora)
    before = read_untrusted(path).decode(errors="replace") if path.exists() else ""
    if request.resume and before and before != now:
        message = f"{work} was begun with other inputs or options"
        raise wrong(message, "give the same ones, or leave --resume out to start over")
    if request.resume and before:
        return
    for entry in work.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
    with append_untrusted(path) as file:
        file.write(now.encode())


def _outputs(folder: Path) -> list[Path]:
    names = [REPORT, REPORT_HTML]
    return [*folder.glob("*.jsonl.zst"), *(folder / n for n in names if (folder / n).exists())]


def _require_free(request: CurateRequest) -> None:
    output = request.output
    if output.exists() and not output.is_dir():
        raise wrong(f"{output} is a file", "name a folder", "--output")
    made = [] if request.force or not output.exists() else _outputs(output)
    if made and not (request.resume and (output / WORK).exists()):
        message = f"{output} has {len(made)} files of an earlier run, such as {made[0].name}"
        raise wrong(message, "--force to replace them, or another folder", "--output")


def _done(request: CurateRequest, corpora: Corpora) -> dict[str, Any] | None:
    """The report of a run that is complete, where --resume finds one of the same inputs."""
    from mtcli.core.curate.report import described

    path = request.output / REPORT
    if not path.exists() or (request.output / WORK).exists():
        return None
    try:
        report = json.loads(read_untrusted(path))
        same = {key: report[key] for key in ("config", "inputs")} == described(request, corpora)
    except (ValueError, TypeError, KeyError):
        same = False
    if not same and not request.force:
        message = f"{request.output} was made from other inputs or options"
        raise wrong(message, "--force to replace it, or another --output", "--output")
    return report if same else None
