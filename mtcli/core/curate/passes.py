"""Runs the pipeline: passes over the documents, decisions over the corpus between them, shards.

The result is a function of the input files' names and bytes and of the configuration. Intermediate
parts are in `OUTPUT/.curate` and appear whole or not at all, so a killed run resumes from them, on
any number of workers.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mtcli.core.config.counts import counted
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.curate.config import Stage
from mtcli.core.curate.contamination import cut_corpus, cut_removals
from mtcli.core.curate.corpus import ChangedLines, Corpus, PassResult, Removals, Slice
from mtcli.core.curate.document_stages import BlockWork, StageGroup, passes_of
from mtcli.core.curate.documents import CorpusFiles, Document, blocks_of, key_of
from mtcli.core.curate.engine import Engine
from mtcli.core.curate.html import report_html
from mtcli.core.curate.output_folder import (
    MADE,
    WORK,
    begin,
    done_before,
    outputs,
    require_free,
)
from mtcli.core.curate.parts import Files, Part, document_of, json_page, load_line
from mtcli.core.curate.reading import Reader
from mtcli.core.curate.report import build_report, nothing_left, removed_lines
from mtcli.core.curate.request import Corpora, CurateRequest, find_corpora
from mtcli.core.curate.shards import LEVEL, ShardJob, changed_lines, plan_shards, sample_keys
from mtcli.core.data.documents import count_lines
from mtcli.core.data.sources import REMOVED, REPORT, REPORT_HTML, TextBlock, told
from mtcli.core.runtime.atomic_writes import atomic_file, folder_of, write_text
from mtcli.core.runtime.process_pool import Progress
from mtcli.core.runtime.work_folder import WorkFolder

Say = Callable[[str], None]


def curate(request: CurateRequest, engine: Engine, say: Say) -> dict[str, Any]:
    """Writes the shards, the removed documents and the report to `output`; returns the report.

    Raises MtcliError for wrong inputs and configurations, an output that exists, and a full disk.
    Raises it too where no document is left: then nothing is published.
    """
    corpora = find_corpora(request)
    if request.resume and (report := done_before(request, corpora)):
        say(f"{request.output} is complete: nothing to do")
        return report
    require_free(request, corpora)
    with folder_of("--output", request.output):
        work = WorkFolder(request.output / WORK, request.output)
    try:
        begin(work, request, corpora)
        report = _Pipeline(request, corpora, work.path, engine, say).run()
        work.remove()
    except _NothingLeft:
        work.remove()
        raise
    except OSError as error:
        raise failed(f"{request.output}: {error}", "free space, then --resume") from None
    finally:
        work.close()
    return report


class _NothingLeft(MtcliError):
    """The error of a run that ends without a document."""


class _Pipeline:
    """A run in its work folder."""

    def __init__(
        self, request: CurateRequest, corpora: Corpora, work: Path, engine: Engine, say: Say
    ) -> None:
        self.request, self.corpora, self.work, self.say = request, corpora, work, say
        self.config, self.engine = request.config, engine
        self.groups = passes_of(self.config.ordered)

    def run(self) -> dict[str, Any]:
        """Runs all passes and publishes; returns the report."""
        files, size = len(self.corpora.new.sources), self.corpora.new.size
        self.say(
            f"{counted(files, 'file')} of {size / 1e6:,.1f} MB -> {self.request.output}; "
            f"{', '.join(self.config.ordered) or 'no stages'}; "
            f"{counted(self.request.workers, 'worker')}"
        )
        if left_out := self.corpora.new.left_out:
            self.say(f"left out of folders: {told(left_out)}")
        results: list[PassResult] = []
        for number, group in enumerate(self.groups):
            if number == 0:
                new = self._read(self.corpora.new, group, self.work / "pass-0")
            else:
                new = self._next_pass(number, group, results[-1])
            corpus = Corpus([*map(Part, new), *self._against(number, group)])
            results.append(self._decide(number, group, corpus))
        if not any(view.alive.any() for view in results[-1].corpus.new_slices().values()):
            report = build_report(self.request, self.corpora, results, [])
            raise _NothingLeft(nothing_left(report))
        folder = self.work / MADE
        folder.mkdir(exist_ok=True)
        shards = self._write_shards(results[-1], folder)
        self._write_removed(results, folder)
        report = build_report(self.request, self.corpora, results, shards)
        self._publish(report, folder)
        return report

    # Passes

    def _against(self, number: int, group: StageGroup) -> list[Part]:
        """Reads the parts of the older corpus, for a pass that compares with it."""
        compared = tuple(stage for stage in group.corpus if stage != "decontaminate")
        if not self.corpora.old or not compared:
            return []
        folder = self.work / f"against-{number}"
        old = self._read(self.corpora.old, StageGroup((), compared), folder)
        return [Part(files, against=True) for files in old]

    def _read(self, inputs: CorpusFiles, group: StageGroup, folder: Path) -> list[Files]:
        request = self.request
        blocks = blocks_of(inputs, request.split_on_blank)
        lines_before = self._lines_before(blocks) if len(blocks) > 1 else {}
        html = "extract" in group.documents
        reader = Reader.of(inputs, request.text_key, request.split_on_blank, lines_before, html)
        work = partial(_read_block, BlockWork(group, self.config, request.skip_bad), reader)
        items = {block.number: block for block in blocks}
        return list(self.engine.make(work, items, folder, "read", "B").values())

    def _lines_before(self, blocks: list[TextBlock]) -> dict[tuple[str, int], int]:
        """Counts the lines before each file range that starts inside a file."""
        pieces = [piece for block in blocks for piece in block.pieces]
        split = [piece for piece in pieces if piece.stop < piece.source.size]
        size = sum(piece.stop - piece.start for piece in split)
        counts = self.engine.map(count_lines, split, size, "count lines", "B")
        lines_before, lines = {}, 0
        for piece, count in zip(split, counts, strict=True):
            lines = count + (lines if piece.start else 0)
            lines_before[piece.source.path, piece.stop] = lines
        return lines_before

    def _next_pass(self, number: int, group: StageGroup, last: PassResult) -> list[Files]:
        """Runs further per-document stages over the documents that the last pass left."""
        folder = self.work / f"pass-{number}"
        corpus = last.corpus
        items = {
            index: (view, last.changed.get(index)) for index, view in corpus.new_slices().items()
        }
        work = partial(_reread, BlockWork(group, self.config, True))
        return list(self.engine.make(work, items, folder, f"pass {number + 1}").values())

    # Decisions

    def _decide(self, number: int, group: StageGroup, corpus: Corpus) -> PassResult:
        removals: dict[Stage, Removals] = {}
        changed: dict[int, ChangedLines] = {}
        entered, found = {}, None
        for stage in group.corpus:
            entered[stage] = corpus.alive.copy()
            folder = self.work / f"{stage}-{number}"
            path = folder.with_suffix(".npz")
            if stage == "decontaminate":
                changed, found = cut_corpus(corpus, self.config.decontaminate, folder, self.engine)
            if not path.exists():
                self._removals(stage, corpus, folder, changed).save(path)
            removals[stage] = Removals.load(path)
            corpus.alive[removals[stage].removed] = False
        return PassResult(corpus, removals, changed, entered, found)

    def _removals(
        self,
        stage: Stage,
        corpus: Corpus,
        folder: Path,
        changed: Mapping[int, ChangedLines],
    ) -> Removals:
        priority = self.config.priority(stage)
        if stage == "exact":
            return self.engine.same(corpus, priority)
        if stage == "fuzzy":
            return self.engine.near(corpus, self.config.fuzzy, priority, folder)
        return cut_removals(corpus, changed)

    # Output

    def _write_shards(self, last: PassResult, folder: Path) -> list[dict[str, Any]]:
        corpus = last.corpus
        by_source, slices = bool(self.config.blend), list(corpus.new_slices().values())
        sample = partial(sample_keys, by_source)
        samples = self.engine.map(sample, slices, len(slices), "sample ids")
        plan = plan_shards(samples, self.config.shard_mb * 1_000_000, by_source)
        return self.engine.write(ShardJob(corpus, plan, folder, last.changed))

    def _write_removed(self, results: list[PassResult], folder: Path) -> None:
        import zstandard

        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        with (
            atomic_file(folder / REMOVED) as aside,
            open(aside, "wb") as file,
            compressor.stream_writer(file, closefd=False) as stream,
        ):
            for line in removed_lines(results):
                stream.write(line)

    def _publish(self, report: dict[str, Any], folder: Path) -> None:
        """Moves all files to the output folder; the report last, as it marks a complete output."""
        output = self.request.output
        write_text(folder / REPORT_HTML, report_html(report))
        write_text(folder / REPORT, json_page(report))
        # Not all that is there: a killed run's worker may have left, or still write, a part of one.
        names = {shard["name"] for shard in report["shards"]} | {REMOVED, REPORT_HTML}
        for old in outputs(output):
            if old.name not in names:
                old.unlink()
        for name in [*sorted(names), REPORT]:
            (folder / name).replace(output / name)


def _read_block(
    work: BlockWork, reader: Reader, block: TextBlock, folder: Path, progress: Progress
) -> None:
    items = (item for piece in block.pieces for item in reader.read(piece, progress))
    work.run(items, folder)


def _reread(
    work: BlockWork, item: tuple[Slice, ChangedLines | None], folder: Path, progress: Progress
) -> None:
    work.run(_documents(*item), folder)


def _documents(view: Slice, changed: ChangedLines | None) -> Iterator[Document]:
    """Yields the alive documents of a part."""
    edits = changed_lines(changed)
    keys, lines = view.part.keys(), view.part.lines
    for row in np.flatnonzero(view.alive).tolist():
        pieces = edits[row].splitlines() if row in edits else [lines[row]]
        for line in pieces:
            key = keys[row] if len(pieces) == 1 else key_of(load_line(line)["id"])
            assert key is not None, "an id that `decontaminate` wrote"
            document = document_of(line, key, 0)
            document.size = len(document.text.encode("utf-8", "surrogatepass"))
            yield document
