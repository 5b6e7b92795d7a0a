"""The context of the tape's ops: the sizes of a micro-batch on a rank, and whose kernels run.

T are a micro-batch's tokens on a context parallel rank, R those between the tensor parallel regions
(T/tp under sequence parallelism).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mtcli.core.mesh.sharding import VOCAB_MULTIPLE
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.tape.autograd import Tape
from mtcli.core.plan.tape.fsdp import Gathering, Group
from mtcli.core.plan.workload import Workload

INDEX = 8  # bytes of an int64


class Shapes(NamedTuple):
    """Sizes of one micro-batch on one rank."""

    tokens: float  # T, on a grid of tp ranks those of its row
    rows: float  # R
    hidden: float  # D, on a grid the columns of activations
    inner: float  # D, on a grid the hidden columns of a column-parallel weight
    queries: float  # q
    keys: float  # kv: both, of this rank's groups, whole
    heads: float
    size: int  # bytes of a weight and of an activation
    wide: int  # of a reduction: 4 at least

    @classmethod
    def of(cls, work: Workload) -> "Shapes":
        """The sizes of a workload."""
        m, tp, size = work.model, work.columns, work.sizes.weight
        rows = work.layout.tp_rows
        on_grid = rows > 1
        return cls(
            work.row_tokens,
            work.row_tokens if on_grid else work.tokens / work.sequence_shards,
            m.hidden_size / tp if on_grid else m.hidden_size,
            m.hidden_size / rows,
            m.num_heads * m.head_dim / tp,
            2 * work.kv_heads * m.head_dim / tp,
            m.num_heads / tp,
            size,
            max(4, size),
        )

    @property
    def stream(self) -> float:
        """Bytes of the residual stream [R, D]."""
        return self.rows * self.hidden * self.size


def vocabulary(work: Workload) -> int:
    """A rank's columns of logits, vocabulary padding included."""
    multiple = VOCAB_MULTIPLE * work.columns
    return -(-work.model.vocab_size // multiple) * VOCAB_MULTIPLE


class Kernels(NamedTuple):
    """The device whose kernels run, as far as memory differs by it."""

    cpu: bool
    widens: bool = False  # makes bfloat16's products in float32, as it does float16's

    @classmethod
    def of(cls, device: Device) -> "Kernels":
        """The kernels of a device."""
        return cls(device.name == "cpu", device.widens)


@dataclass(frozen=True)
class TapeContext:
    """The context of the tape's ops: the tape, the step, and whose kernels run."""

    tape: Tape
    work: Workload
    kernels: Kernels
    gathering: Gathering | None = None  # of weights that zero=3 shards
    groups: tuple[Group, ...] = ()  # a block, its experts, the ends
    of_experts: bool = False  # what they take: all columns of this rank's own tokens
    of_head: int = 0  # what it takes: so many rows of activations

    @cached_property
    def t(self) -> Shapes:
        """Sizes of one micro-batch on one rank."""
        work, sizes = self.work, Shapes.of(self.work)
        if self.of_head:
            shards = sizes.tokens / sizes.rows
            return sizes._replace(tokens=self.of_head * shards, rows=self.of_head)
        if not self.of_experts:
            return sizes
        rows = work.tokens / work.sequence_shards
        return sizes._replace(rows=rows, hidden=work.model.hidden_size)

    @property
    def cpu(self) -> bool:
        """Whether a CPU's kernels run."""
        return self.kernels.cpu

    @property
    def slow(self) -> bool:
        """Whether GEMMs of 16 bits are made in float32, as CPUs make all of float16's."""
        narrow = self.work.sizes.weight == 2
        return self.cpu and narrow and (self.kernels.widens or self.work.precision == "fp16")

    @property
    def by_torch(self) -> bool:
        """Whether torch's functions run where a GPU has kernels of ours: on CPU, and in float64."""
        return self.cpu or self.work.sizes.weight > 4


def trained(ctx: TapeContext, size: float) -> float:
    """Bytes of the gradient of a weight of the model, which is frozen beside adapters."""
    return 0.0 if ctx.work.lora.rank else size
