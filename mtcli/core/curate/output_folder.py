"""Checks the output folder: files in the way, resumed runs and complete ones."""

import hashlib
import json
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import append_untrusted, read_untrusted
from mtcli.core.curate.config import as_dict
from mtcli.core.curate.documents import BLOCK_BYTES
from mtcli.core.curate.report import described
from mtcli.core.curate.request import Corpora, CurateRequest
from mtcli.core.data.sources import REMOVED, REPORT, REPORT_HTML
from mtcli.core.runtime.outputs import require_apart
from mtcli.core.runtime.work_folder import WorkFolder

WORK = ".curate"
MADE = "out"  # in the work folder: what is moved to the output once all of it is there


def _fingerprint(request: CurateRequest, corpora: Corpora) -> str:
    """Hashes a run's inputs and options; equal for two runs that must write the same bytes."""
    files = [[source.facts for source in corpus.sources] for corpus in corpora if corpus]
    determinants = [files, as_dict(request.config), request.text_key, request.split_on_blank]
    determinants += [request.format, BLOCK_BYTES]
    return hashlib.sha256(json.dumps(determinants).encode()).hexdigest()


def begin(work: WorkFolder, request: CurateRequest, corpora: Corpora) -> None:
    """Empties the work folder, unless this run resumes the one that left it.

    Raises MtcliError for a resumed run with other inputs or options.
    """
    path, now = work.path / "fingerprint", _fingerprint(request, corpora)
    previous = read_untrusted(path).decode(errors="replace") if path.exists() else ""
    if request.resume and previous and previous != now:
        message = f"{work.path} was begun with other inputs or options"
        raise wrong(message, "give the same ones, or leave --resume out to start over")
    if request.resume and previous:
        return
    for published in _named(work.path / MADE / REPORT, request.output):  # by a run killed meanwhile
        published.unlink()
    work.clear()
    with append_untrusted(path) as file:
        file.write(now.encode())


def outputs(folder: Path) -> list[Path]:
    """Lists the files of an earlier run in a folder, by its report; other files are the user's."""
    report = folder / REPORT
    return [*_named(report, folder), *[report] * report.exists()]


def _named(report: Path, folder: Path) -> list[Path]:
    """Lists the files in a folder that a report names; none where it cannot be read."""
    try:
        shards = [str(shard["name"]) for shard in json.loads(read_untrusted(report))["shards"]]
    except (OSError, ValueError, TypeError, KeyError, MtcliError):
        return []
    paths = [folder / name for name in (*shards, REMOVED, REPORT_HTML) if Path(name).name == name]
    return [path for path in paths if path.is_file()]


def require_free(request: CurateRequest, corpora: Corpora) -> None:
    """Raises MtcliError where files of an earlier run, or inputs, are in the way."""
    output = request.output
    if output.exists() and not output.is_dir():
        raise wrong(f"{output} is a file", "name a folder", "--output")
    folder = output.resolve()
    inside = [source.path for source in corpora.sources if Path(source.path).parent == folder]
    if inside:
        message = f"the input {inside[0]} is in --output {output}, whose files a run replaces"
        raise wrong(message, "name another folder", "--output")
    inputs = (source.path for source in corpora.sources)
    require_apart(inputs, [output / WORK, *outputs(output)], "--output")
    existing = [] if request.force or not output.exists() else outputs(output)
    if existing and not (request.resume and (output / WORK).exists()):
        message = (
            f"{output} has {len(existing)} files of an earlier run, such as {existing[0].name}"
        )
        raise wrong(message, "--force to replace them, or another folder", "--output")


def done_before(request: CurateRequest, corpora: Corpora) -> dict[str, Any] | None:
    """Returns the report of a complete run on the same inputs, where --resume finds one."""
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
