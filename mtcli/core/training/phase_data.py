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
from mtcli.core.data.loader import token_files
from mtcli.core.parallel.groups import Groups
from mtcli.core.parallel.together import together
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes, samples_read
from mtcli.core.training.loader import MicroBatchLoader, open_loader
from mtcli.core.training.state import StartingPoint


class SourceFiles(NamedTuple):
    """Data sources by their prefixes, with the files of each."""

    prefixes: Sequence[str]
    files: Sequence[Sequence[Path]]


@dataclass
class PhaseLoaders:
    """The training data of a phase, and its validation data where train.eval_every is set."""

    train: MicroBatchLoader
    valid: MicroBatchLoader | None

    def enter(self, span: PhaseSpan, samples: ConsumedSamples, local_rank: int) -> None:
        """Opens the data of the next phase, and counts its samples from here on. Collective."""
        self.close()
        groups, (planned, read) = self.train.groups, samples.order_of(span)
        opened = _open(span, groups, planned, read, local_rank)
        self.train, self.valid = opened.train, opened.valid
        hashes = data_hashes(self.train.batches, local_rank, groups.world)
        samples.enter(span, self.train.batches, hashes, read)

    def close(self) -> None:
        """Ends the reader of training data."""
        self.train.close()


def open_phase(
    span: PhaseSpan, groups: Groups, start: StartingPoint, local_rank: int
) -> PhaseLoaders:
    """Opens the data of the phase that a run starts in. Collective."""
    planned, read = None, dict[str, int]()
    if start.checkpoint and start.is_own:
        planned, record = planned_samples(start.checkpoint), progress_of(start.checkpoint).samples
        read = record.read if record else read
    return _open(span, groups, planned, read, local_rank)


def _open(
    span: PhaseSpan, groups: Groups, planned: int | None, read: Mapping[str, int], local_rank: int
) -> PhaseLoaders:
    config, world, positions = span.config, groups.world, list[int]()
    if read:
        prefixes, _ = read_blend(config.data.train)
        sources = SourceFiles(prefixes, token_files(prefixes))
        hashes = data_hashes(sources, local_rank, world)
        tokens = [read.get(one.sampled, 0) for one in hashes]
        positions = [samples_read(count, config.batch.seq_len) for count in tokens]

    def opened() -> list[MicroBatchLoader | None]:
        return collect_errors(
            lambda: open_loader(config, groups, planned=planned, span=span, read=positions),
            lambda: (
                open_loader(config, groups, validation=True) if config.train.eval_every else None
            ),
        )

    train, valid = together(world, opened)
    assert train is not None
    return PhaseLoaders(train, valid)
