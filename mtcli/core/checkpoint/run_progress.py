"""Defines the progress of a run in its checkpoint: the manifest's `extra`.

It has no tensors: samples consumed and from which data, updates, the loss scale, random state.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.config.fields import Count, Section
from mtcli.core.config.schema import LOWEST_LOSS_SCALE


class ScaleState(Section):
    """The state of a dynamic loss scale."""

    scale: Annotated[float, Field(ge=LOWEST_LOSS_SCALE, allow_inf_nan=False)]
    """the factor on the next step's loss"""
    good_steps: Count
    """steps without overflow since the scale last changed"""
    patience: Count
    """overflows until the scale is halved"""


class DatasetRecord(Section):
    """A dataset that samples are drawn from, and their number."""

    prefix: str
    """its path when samples were drawn"""
    weight: float | None
    """its share of the samples; None: in proportion to its tokens"""
    sha256: str
    """hash of its .bin, as `mtcli preprocess` wrote it; empty for data from another tool"""
    sampled: str
    """XXH3 (128 bits) of the sizes of .bin and .idx and of 64 blocks of 64 KiB of each"""
    samples: Count
    """sequences drawn from it"""
    epoch: Count
    """complete passes over its part of the split that these samples make"""


class SkippedBatch(Section):
    """A batch that made no update."""

    step: Count
    first: Count
    """its first sample"""
    last: Count
    """its last sample"""
    why: Literal["overflow", "fault"]


class SampleRecord(Section):
    """The consumed samples, as a checkpoint records them."""

    model_config = ConfigDict(extra="ignore")

    split: tuple[float, float, float]
    """shares of train, valid and test"""
    tokens: Count
    """tokens trained on"""
    sources: tuple[DatasetRecord, ...]
    skipped: tuple[SkippedBatch, ...]
    planned: Count | None = None
    """number of samples when the run began, or their order, which decides that"""
    first: Count = 0
    """the first sample of this order, which began with a phase of other sources or another
    seq_len"""
    read: dict[str, Count] = {}
    """tokens that were read of sources before this order, by `DatasetRecord.sampled`"""
    subset: str | None = None
    """hash of the members of data.subset and their weights"""


class RandomState(Section):
    """The state of random numbers. Each is a function of the seed, a name, the step and a global
    index (keyed counters), so no generator has a state of its own."""

    kind: Literal["counter"] = "counter"
    seed: Count
    step: Count


class BaseRecord(Section):
    """The base weights of a run's adapters."""

    path: str
    """their folder when the run began"""
    hash: str
    """hash of the manifest, or of blocks of the tensors' files"""


class EvaluatedStep(Section):
    """A step and its validation loss."""

    step: Count
    loss: float


class ValidationState(Section):
    """The lowest validation losses of a run, and how long none was lower."""

    best: tuple[EvaluatedStep, ...] = ()
    """the lowest ones, lowest first"""
    since: Count = 0
    """evaluations since the lowest"""


class RunProgress(Section):
    """The progress of a run: the manifest's `extra`."""

    model_config = ConfigDict(extra="ignore")  # notes of others, which no step depends on

    consumed_samples: Count = 0
    """sequences trained on"""
    updates: Count | None = None
    """updates made; fewer than steps where some were skipped"""
    loss_scale: ScaleState | None = None
    """the loss scale, in a float16 run whose scale is dynamic"""
    random: RandomState | None = None
    """the source of initial weights, dropout and the order of the data"""
    samples: SampleRecord | None = None
    """the consumed samples"""
    sync: dict[str, Any] = {}
    """counters of the replicas' exchanges"""
    base: BaseRecord | None = None
    """the base weights, in a run that trains adapters"""
    validation: ValidationState | None = None
    """its validation losses, where it has any"""


def progress_of(checkpoint: Checkpoint) -> RunProgress:
    """Reads the progress of a checkpoint's run. Raises MtcliError for invalid progress."""
    try:
        return RunProgress.model_validate(checkpoint.extra)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(checkpoint.folder, f"extra.{where}: {first['msg']}") from None


def planned_samples(checkpoint: Checkpoint) -> int | None:
    """Returns the number of samples of a checkpoint's run when it began, as far as known.

    A record without it was written by a version in which each resume planned anew.
    """
    record, config = progress_of(checkpoint).samples, checkpoint.config
    if record is not None and record.planned is not None:
        return record.planned
    return None if config is None else config.train.steps * config.batch.global_batch_size
