"""The record of consumed samples: from which data a run drew them, how many, and which it skipped.

A checkpoint holds it, so that a resumed run continues with the same data or says that it cannot. It
depends on no layout: samples are numbered over the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.run_progress import DatasetRecord, SampleRecord, SkippedBatch
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.phases import PhaseSpan, phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.blend import chosen, parse_split
from mtcli.core.data.indexed import stated_hash
from mtcli.core.data.loader import RunData
from mtcli.core.data.subset import AGAIN, FIELD, SourceRecord, Subset, digest
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.together import require_alike


class Sources(Protocol):
    """Data sources by their prefixes, with the files of each."""

    @property
    def prefixes(self) -> Sequence[str]:
        """Their names."""

    @property
    def files(self) -> Sequence[Sequence[Path]]:
        """The files of each."""


class SourceHashes(NamedTuple):
    """The hashes of a data source, as `DatasetRecord` has them."""

    sha256: str
    sampled: str


def require_sources(
    subset: Subset,
    prefixes: Sequence[str],
    files: Sequence[Sequence[Path]],
    shares: Sequence[float] | None = None,
) -> None:
    """Raises MtcliError where data, or its shares in a blend, are not those of a subset."""
    if len(prefixes) != len(subset.sources):
        message = f"the subset is of {len(subset.sources)} sources, and the run has {len(prefixes)}"
        raise wrong(message, "name the same data in the same order", FIELD)
    problems = []
    weights: Sequence[float | None] = shares or [None] * len(prefixes)
    for prefix, paths, share, then in zip(prefixes, files, weights, subset.sources, strict=True):
        now = then.model_copy(
            update={"sha256": stated_hash(prefix), "sampled": sampled_hash(paths), "share": share}
        )
        for kind, new, old in _hashes(now, then):
            message = f"{prefix} has the {kind} {new}, and the subset was chosen from data at "
            problems.append(Problem(f"{message}{then.prefix} with the {kind} {old}", AGAIN, FIELD))
        if now.share != then.share:
            message = f"{prefix} has the share {share}, and the subset was chosen with {then.share}"
            problems.append(Problem(message, "data.train with the selection's weights", FIELD))
    if problems:
        raise MtcliError(*problems)


def data_hashes(sources: Sources, local_rank: int, world: Axis) -> list[SourceHashes]:
    """Hashes the data of a run, as rank 0 finds it. Collective.

    One rank of each machine reads: 64 blocks of 64 KiB of each file. Raises MtcliError on every
    rank where a machine has other data than rank 0's.
    """
    local_hashes = source_hashes(sources) if local_rank == 0 else None
    from_first = gather_values(local_hashes if world.rank == 0 else None, world)[0]
    agreed = [SourceHashes(*hashes) for hashes in from_first]
    alike = agreed if local_hashes is None else local_hashes
    require_alike(world, [list(row) for row in alike], "reads data with the hashes", "data.train")
    return agreed


def source_hashes(sources: Sources) -> list[SourceHashes]:
    """Hashes each data source, as this process finds it."""
    pairs = zip(sources.prefixes, sources.files, strict=True)
    return [SourceHashes(stated_hash(prefix), sampled_hash(paths)) for prefix, paths in pairs]


def samples_read(tokens: int, seq_len: int) -> int:
    """Returns the samples of a source after which an order begins that follows some tokens."""
    return -(-tokens // seq_len)


class ConsumedSamples:
    """Counts the samples that a run draws from each dataset; equal on every rank."""

    def __init__(
        self,
        config: RunConfig,
        batches: RunData,
        hashes: Sequence[SourceHashes],
        subset: Subset | None = None,
        span: PhaseSpan | None = None,
    ) -> None:
        """`span` is the phase of the run that the batches are of."""
        self.subset = subset and digest(subset)
        self.read: dict[str, int] = {}  # tokens before this order, by the source's sampled hash
        self.skipped: list[SkippedBatch] = []
        self.skipped_tokens = 0
        self.samples: list[int] = []
        self._begin(span or phases_of(config)[0], batches, hashes)

    def order_of(self, span: PhaseSpan) -> tuple[int | None, dict[str, int]]:
        """Returns (planned samples, tokens read of sources before it) of the next phase's order of
        samples: this one, or a new one, which is planned by the phase."""
        self._draw(span.first_sample)
        if span.samples == self.span.samples:
            return self.batches.planned, self.read
        return None, self._tokens_read()

    def enter(
        self,
        span: PhaseSpan,
        batches: RunData,
        hashes: Sequence[SourceHashes],
        read: dict[str, int],
    ) -> None:
        """Goes on in the next phase, by what `order_of` returned."""
        self.read, order, samples = read, self.span.samples, self.samples
        self._begin(span, batches, hashes)
        if span.samples == order:
            self.samples, self.consumed = samples, span.first_sample

    def _begin(self, span: PhaseSpan, batches: RunData, hashes: Sequence[SourceHashes]) -> None:
        self.span, self.batches, self.hashes = span, batches, hashes
        self.split = parse_split(chosen(span.config.data, "train")[1])
        self.weights = batches.weights or (None,) * len(batches.prefixes)
        self.samples = [0] * len(batches.prefixes)
        self.consumed = span.samples[0]

    def _tokens_read(self) -> dict[str, int]:
        """Counts the tokens read of each source of the run, by its sampled hash."""
        size, read = self.span.config.batch.seq_len, dict(self.read)
        for key in {hashes.sampled for hashes in self.hashes}:
            read[key] = samples_read(read.get(key, 0), size) * size
        for hashes, samples in zip(self.hashes, self.samples, strict=True):
            read[hashes.sampled] += samples * size
        return read

    def skip(self, step: int, why: Literal["overflow", "fault"]) -> None:
        """Notes that the batch of a step made no update."""
        first, last = self.span.samples_before(step - 1), self.span.samples_before(step) - 1
        self.skipped.append(SkippedBatch(step=step, first=first, last=last, why=why))
        self.skipped_tokens += self.span.config.batch.tokens_per_step

    def faults_in_a_row(self, step: int) -> int:
        """Counts the consecutive batches, up to a step's, that were skipped for faults."""
        count = 0
        for batch in reversed(self.skipped):
            if batch.why != "fault" or batch.step != step - count:
                break
            count += 1
        return count

    def record(self, consumed: int) -> SampleRecord:
        """The record of the first `consumed` samples, whose number never falls."""
        self._draw(consumed)
        return SampleRecord(
            split=self.split,
            tokens=self._tokens(consumed) - self.skipped_tokens,
            sources=self._sources(),
            skipped=tuple(self.skipped),
            planned=self.batches.planned,
            first=self.span.samples[0],
            read=self.read,
            subset=self.subset,
        )

    def _tokens(self, consumed: int) -> int:
        """Returns the tokens of the run's first samples."""
        span = self.span
        return span.first_token + (consumed - span.first_sample) * span.config.batch.seq_len

    def resume(self, record: SampleRecord | None, consumed: int) -> None:
        """Continues from a checkpoint's record; without one, as if the run had used this data.

        Raises MtcliError with everything about the data that differs.
        """
        if record is None:
            self._draw(min(consumed, len(self.batches)))
            return
        if problems := self._differences(record):
            hint = (
                "give it the data back, or train from its weights with --init into another output"
            )
            raise MtcliError(*problems, hint=hint)
        self.samples, self.consumed = [source.samples for source in record.sources], consumed
        self.skipped, self.read = list(record.skipped), dict(record.read)
        self.skipped_tokens = self._tokens(consumed) - record.tokens

    def _draw(self, consumed: int) -> None:
        if consumed > self.consumed:
            drawn = self.batches.drawn(self.consumed, consumed)
            self.samples = [a + b for a, b in zip(self.samples, drawn, strict=True)]
            self.consumed = consumed

    def _sources(self) -> tuple[DatasetRecord, ...]:
        return tuple(self._source(number) for number in range(len(self.samples)))

    def _source(self, number: int) -> DatasetRecord:
        sha256, sample_hash = self.hashes[number]
        size = self.span.config.batch.seq_len
        earlier = samples_read(self.read.get(sample_hash, 0), size)
        tokens = (earlier + self.samples[number]) * size
        return DatasetRecord(
            prefix=self.batches.prefixes[number],
            weight=self.weights[number],
            sha256=sha256,
            sampled=sample_hash,
            samples=self.samples[number],
            epoch=tokens // self.batches.tokens[number],
        )

    def _differences(self, saved: SampleRecord) -> list[Problem]:
        sources = self._sources()
        if len(sources) != len(saved.sources):
            names = [", ".join(s.prefix for s in side) for side in (sources, saved.sources)]
            message = f"there are {len(sources)} data sources ({names[0]}), and the run was trained"
            return [Problem(f"{message} on {len(saved.sources)} ({names[1]})", "", "data.train")]
        problems = []
        for now, then in zip(sources, saved.sources, strict=True):
            for kind, new, old in _hashes(now, then):
                message = f"{now.prefix} has the {kind} {new}, and the run was trained on {old}"
                moved = "" if now.prefix == then.prefix else f" at {then.prefix}"
                problems.append(Problem(message + moved, "", "data.train"))
            if now.weight != then.weight:
                message = f"{now.prefix} has the share {now.weight}, and the run was trained with "
                problems.append(Problem(f"{message}{then.weight}", "", "data.train"))
        if self.subset != saved.subset:
            names = [subset or "none" for subset in (self.subset, saved.subset)]
            message = f"the subset is {names[0]}, and the run was trained on {names[1]}"
            problems.append(Problem(message, "", FIELD))
        if self.split != saved.split:
            message = f"the shares are {self.split}, and the run was trained with {saved.split}"
            problems.append(Problem(message, "", "data.split"))
        return problems


def _hashes(
    now: DatasetRecord | SourceRecord, then: DatasetRecord | SourceRecord
) -> list[tuple[str, str, str]]:
    """[(kind, new, old)] of the first hash that differs between two sources; [] where none does."""
    if now.sha256 and then.sha256 and now.sha256 != then.sha256:
        return [("sha256", now.sha256, then.sha256)]
    if now.sampled != then.sampled:
        return [("hash", now.sampled, then.sampled)]
    return []
