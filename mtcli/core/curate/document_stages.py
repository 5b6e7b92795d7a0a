"""Processes a block in a worker: the per-document stages, then the features of corpus stages."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.curate.batch import Batch, batches
from mtcli.core.curate.config import CORPUS_STAGES, CurateConfig, Stage
from mtcli.core.curate.decontaminate import make_matches
from mtcli.core.curate.documents import BadRecord, Document, PassedOver, id_of
from mtcli.core.curate.exact import text_hashes
from mtcli.core.curate.gopher_rules import make_rules
from mtcli.core.curate.hashing import Array
from mtcli.core.curate.language import make_language
from mtcli.core.curate.minhash import make_signatures
from mtcli.core.curate.normalise import make_normalise
from mtcli.core.curate.parts import PartWriter, written_aside
from mtcli.core.curate.quality import make_quality
from mtcli.core.curate.warc import make_extract

SAMPLES = 5  # documents told of each reason
SAMPLE_CHARACTERS = 200
SUMMED = ("documents_in", "documents_out", "bytes_in", "bytes_out", "documents_cut", "pieces")
BINS = 32  # of a histogram of sizes: powers of two
BAD_TOLD = 20  # bad lines that a report names
REASONS = 100  # of records passed over, that a part tells apart
OTHER_REASONS = "other reasons"

Records = Iterable[Document | BadRecord | PassedOver]

StageFunction = Callable[[Batch], None]
Feature = Callable[[list[Document], Batch], dict[str, Array]]
# By their names, from their section of the config.
STAGE_MAKERS: dict[Stage, Callable[[Any], StageFunction]] = {
    "extract": make_extract,
    "normalise": make_normalise,
    "language": make_language,
    "rules": make_rules,
    "quality": make_quality,
}
FEATURE_MAKERS: dict[Stage, Callable[[Any], Feature]] = {
    "exact": lambda _: text_hashes,
    "fuzzy": make_signatures,
    "decontaminate": make_matches,
}


class StageGroup(NamedTuple):
    """The stages of one pass: per-document ones, then corpus stages, which need their features."""

    documents: tuple[Stage, ...]
    corpus: tuple[Stage, ...]


def passes_of(stages: tuple[Stage, ...]) -> list[StageGroup]:
    """Divides the stages into passes over the documents; at least one.

    Corpus stages share a pass up to `decontaminate`, the only one that changes texts.
    """
    groups = [StageGroup((), ())]
    for stage in stages:
        last = groups[-1]
        if stage in CORPUS_STAGES:
            if "decontaminate" in last.corpus:
                groups.append(last := StageGroup((), ()))
            groups[-1] = last._replace(corpus=(*last.corpus, stage))
        else:
            if last.corpus:
                groups.append(last := StageGroup((), ()))
            groups[-1] = last._replace(documents=(*last.documents, stage))
    return groups


def make_stage(stage: Stage, config: CurateConfig) -> StageFunction:
    """Builds a per-document stage, and imports its libraries."""
    return STAGE_MAKERS[stage](getattr(config, stage))


def make_feature(stage: Stage, config: CurateConfig) -> Feature:
    """Builds the function that computes the arrays of a corpus stage."""
    return FEATURE_MAKERS[stage](getattr(config, stage))


@dataclass
class StageCount:
    """Documents and bytes of text into and out of a stage, and the dropped ones by reason.

    A document that is cut leaves as pieces: out = in - dropped - cut + pieces.
    """

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    documents_cut: int = 0
    pieces: int = 0  # of the documents that were cut
    reasons: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """Returns the counts as JSON."""
        return {
            **{name: getattr(self, name) for name in SUMMED},
            "documents_dropped": self.reasons.total(),
            "reasons": dict(sorted(self.reasons.items())),
            "samples": {reason: self.samples[reason] for reason in sorted(self.samples)},
        }

    def merge(self, other: dict[str, Any]) -> None:
        """Adds the dump of another part, with its samples while there is room."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + other[name])
        self.reasons.update(other["reasons"])
        for reason, samples in other["samples"].items():
            own_samples = self.samples.setdefault(reason, [])
            own_samples += samples[: SAMPLES - len(own_samples)]

    def sample(self, reason: str, described: dict[str, Any]) -> None:
        """Keeps a sample of a reason while there is room."""
        samples = self.samples.setdefault(reason, [])
        if len(samples) < SAMPLES:
            samples.append(described)


class BlockWork:
    """Runs a pass's stages over documents and writes a part.

    Pickles as its configuration: each process builds the stages once.
    """

    def __init__(self, group: StageGroup, config: CurateConfig, skip_bad: bool) -> None:
        self._made_of = group, config, skip_bad
        self._stages = [(stage, make_stage(stage, config)) for stage in group.documents]
        self._features = [make_feature(stage, config) for stage in group.corpus]
        self._skip_bad = skip_bad

    def __reduce__(self) -> tuple[Callable[..., "BlockWork"], tuple[StageGroup, str, bool]]:
        group, config, skip_bad = self._made_of
        return _made_once, (group, config.model_dump_json(), skip_bad)

    def run(self, items: Records, folder: Path) -> None:
        """Writes the part of a block's documents. Raises MtcliError for a bad line that is not
        skipped."""
        with written_aside(folder) as aside:
            self._write(items, PartWriter(aside))

    def _write(self, items: Records, writer: PartWriter) -> None:
        counts = {stage: StageCount() for stage, _ in self._stages}
        bad: list[str] = []
        passed_over: Counter[str] = Counter()
        sizes = np.zeros((2, BINS), np.int64)
        for batch in batches(self._good(items, bad, passed_over)):
            sizes[0] += _histogram(batch.documents)
            for stage, function in self._stages:
                _run_stage(stage, function, batch, counts[stage])
            for index in sorted(batch.drops):
                writer.remove(removal(batch.documents[index], *batch.drops[index]))
            left = [batch.documents[index] for index in batch.alive()]
            sizes[1] += _histogram(left)
            left_batch = batch if not batch.drops else Batch(left)
            writer.add(left)
            for feature in self._features:
                writer.add_arrays(feature(left, left_batch))
        writer.close(
            {
                "stages": {stage: count.dump() for stage, count in counts.items()},
                "bad": {"count": len(bad), "examples": bad[:BAD_TOLD]},
                "passed_over": passed_over,
                "sizes": sizes.tolist(),
            }
        )

    def _good(
        self, items: Records, bad: list[str], passed_over: Counter[str]
    ) -> Iterator[Document]:
        for item in items:
            if isinstance(item, Document):
                yield item
            elif isinstance(item, PassedOver):
                is_told = item.reason in passed_over or len(passed_over) < REASONS
                passed_over[item.reason if is_told else OTHER_REASONS] += 1
            elif self._skip_bad:
                bad.append(str(item))
            else:
                raise wrong(str(item), "--skip-bad leaves such records out; or mend this one")


@cache
def _made_once(group: StageGroup, config: str, skip_bad: bool) -> BlockWork:
    return BlockWork(group, CurateConfig.model_validate_json(config), skip_bad)


def removal(
    document: Document, stage: str, reason: str, detail: dict[str, object]
) -> dict[str, object]:
    """Builds the record of a dropped document in `removed.jsonl.zst`."""
    entry = {"id": id_of(document.key), "source": document.source, "stage": stage}
    return entry | {"reason": reason, "kept_id": None} | detail


def _run_stage(stage: str, function: StageFunction, batch: Batch, count: StageCount) -> None:
    entered = batch.alive()
    count.documents_in += len(entered)
    count.bytes_in += sum([batch.documents[index].size for index in entered])
    dropped_before = set(batch.drops)
    function(batch)
    for index in sorted(batch.drops.keys() - dropped_before):
        document, drop = batch.documents[index], batch.drops[index]
        count.reasons[drop.reason] += 1
        text = document.text[:SAMPLE_CHARACTERS]
        sample = {"id": id_of(document.key), "source": document.source, "text": text}
        count.sample(drop.reason, sample | drop.detail)
    after = batch.alive()
    count.documents_out += len(after)
    count.bytes_out += sum([batch.documents[index].size for index in after])


def _histogram(documents: list[Document]) -> Array:
    sizes = np.array([document.size for document in documents], float)
    bits = np.frexp(sizes)[1]  # as int.bit_length
    return np.bincount(np.minimum(bits, BINS - 1), minlength=BINS)
