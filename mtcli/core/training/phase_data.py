"""Opens the data of a run's phases: each source goes on where the run has read it.

The position of a source is in tokens, as its samples are of another length in another phase.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtcli.core.checkpoint.run_progress import planned_samples, progress_of
from mtcli.core.config.blend import read_blend
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.phases import PhaseSpan
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import token_files
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.together import together
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes, samples_read
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.state import StartingPoint
from mtcli.core.training.validation_sets import ValidationSets, open_validation, token_bytes


class SourceFiles(NamedTuple):
    """Data sources by their prefixes, with the files of each."""

    prefixes: Sequence[str]
    files: Sequence[Sequence[Path]]


@dataclass
class PhaseLoaders:
    """The training data of a phase, and its validation sets: none where train.eval_every is 0."""

    train: MicroBatchLoader
    valid: ValidationSets[MicroBatchLoader]

    def enter(self, span: PhaseSpan, samples: ConsumedSamples, local_rank: int) -> None:
        """Opens the data of the next phase, and counts its samples from here on. Collective."""
        self.close()
        groups, (planned, read) = self.train.groups, samples.order_of(span)
        opened = _open(span, groups, planned, read, local_rank)
        self.train, self.valid = opened.train, opened.valid
        hashes = data_hashes(self.train.batches, local_rank, groups.world)
        samples.enter(span, self.train.batches, hashes, read)

    def close(self) -> None:
        """Ends the readers."""
        self.train.close()
        self.valid.close()


def open_phase(
    span: PhaseSpan, groups: Groups, start: StartingPoint, local_rank: int
) -> PhaseLoaders:
    """Opens the data of the phase that a run starts in. Collective."""
    planned, read = None, dict[str, int]()
    if start.checkpoint and start.is_own:
        planned, record = planned_samples(start.checkpoint), progress_of(start.checkpoint).samples
        read = record.read if record else read
    return _open(span, groups, planned, read, local_rank)


def samples_of_sources(
    config: RunConfig, read: Mapping[str, int], local_rank: int, world: Axis
) -> list[int]:
    """Returns the samples of each source of a phase that were read before it, by the tokens `read`
    of each, which has its hash as a key; none where nothing was. Collective."""
    if not read:
        return []
    prefixes, _ = read_blend(config.data.train)
    hashes = data_hashes(SourceFiles(prefixes, token_files(prefixes)), local_rank, world)
    return [samples_read(read.get(one.sampled, 0), config.batch.seq_len) for one in hashes]


def _open(
    span: PhaseSpan, groups: Groups, planned: int | None, read: Mapping[str, int], local_rank: int
) -> PhaseLoaders:
    config = span.config
    read_samples = samples_of_sources(config, read, local_rank, groups.world)

    def opened() -> tuple[MicroBatchLoader, dict[str, MicroBatchLoader]]:
        train, valid = collect_errors(
            lambda: open_loader(config, groups, planned=planned, span=span, read=read_samples),
            lambda: open_validation(config, groups),
        )
        return train, valid

    train, valid = together(groups.world, opened)
    sets = ValidationSets(valid, token_bytes(config, valid), config.train.best_of)
    return PhaseLoaders(train, sets)
