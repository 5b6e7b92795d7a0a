"""Defines a request to curate, and finds the files that it names."""

from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.curate.config import CurateConfig
from mtcli.core.curate.documents import WET, CorpusFiles, find_files
from mtcli.core.data.compressed import inner_name
from mtcli.core.data.sources import FileKind, SourceFile, require_used

HINT = "a file that is there, by its path from here or from the config's folder"


class CurateRequest(NamedTuple):
    """The flags of `mtcli curate`, by name."""

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
    """The files to clean, and those of an older corpus that are only compared with."""

    new: CorpusFiles
    old: CorpusFiles | None

    @property
    def sources(self) -> list[SourceFile]:
        return [source for files in (self.new, self.old) if files for source in files.sources]


def find_corpora(request: CurateRequest) -> Corpora:
    """Finds all input files. Raises MtcliError with every missing one."""
    new, old, _ = collect_errors(
        lambda: find_files(request.inputs, request.format),
        lambda: find_files(request.against) if request.against else None,
        lambda: _require_files(request.config),
    )
    if _has_pages(new) and "extract" not in request.config.ordered:
        said = "HTML is given, and the stages have no extract"
        raise wrong(said, "stages = ['extract', ...]", "stages")
    if old and _has_pages(old):
        said = "HTML is given, whose pages are no text yet"
        raise wrong(said, "mtcli curate it first, and name the folder that this makes", "--against")
    corpora = Corpora(new, old)
    require_used(corpora.sources, request.text_key, request.split_on_blank)
    return corpora


def _has_pages(files: CorpusFiles) -> bool:
    """Says whether a corpus has HTML, or WARC files other than WET, whose records are texts."""
    pages = (Path(source.path) for source in files.sources if source.kind in ("html", "warc"))
    return any(inner_name(path).suffix != WET for path in pages)


def _require_files(config: CurateConfig) -> None:
    """Raises MtcliError for each missing file that the stages need."""
    named = []
    if "decontaminate" in config.ordered:
        named += [("decontaminate.tasks", task) for task in config.decontaminate.tasks]
    if "quality" in config.ordered and config.quality.model:
        named += [("quality.model", config.quality.model)]
    missing = [
        Problem(f"{path} cannot be read: it is not there", HINT, field)
        for field, path in named
        if not Path(path).exists()
    ]
    if missing:
        raise MtcliError(*missing)
