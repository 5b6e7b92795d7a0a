"""Describes a training step for the cost model: its model, batch and layout.

A `Workload` is made from a `RunConfig`, or from a published record (`benchmarks/published`), which
may use precisions that mtcli does not train in.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import ceil, lcm
from typing import Any, NamedTuple

from mtcli.core.config.model import SEQUENCES, ModelConfig
from mtcli.core.config.schema import Fp8Scaling, LoraConfig, OptimizerConfig, RunConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.plan.costs import Pass
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.schedule.ops import Schedule


class Precision(NamedTuple):
    """Bytes per element of weights, gradients and optimizer state, and the precision of GEMMs."""

    weight: int  # also of activations
    gradient: int  # flat buckets, wide but for train.gradients
    master: int  # a wide copy of the weights, where they are narrow
    moment: int
    gemm: str


PRECISIONS = {
    "fp64": Precision(8, 8, 0, 8, "fp64"),
    "fp32": Precision(4, 4, 0, 4, "fp32"),
    "bf16": Precision(2, 4, 4, 4, "bf16"),
    "fp16": Precision(2, 4, 4, 4, "fp16"),
    "fp8": Precision(2, 4, 4, 4, "fp8"),
    "nvfp4": Precision(2, 4, 4, 4, "nvfp4"),
}
COMPILED = 0.5  # of the host's time is left where blocks are compiled: fewer and larger kernels
REPLAYED = 0.02  # and where CUDA graphs launch a micro-batch as one
UNEVEN_ROUNDS = 8  # of pp micro-batches, after which uneven stages have a steady pace within 0.1 %


class BlockCounts(NamedTuple):
    """How many blocks some stages have: first ones of a mixture without experts, and the rest; and
    which ones, where parameters of some are frozen."""

    dense: int
    mixed: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """A training step: its model, its batch, its layout, and the options of sharding."""

    model: ModelConfig
    layout: ParallelLayout
    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    precision: str = "bf16"
    moments: str = "fp32"
    gradients: str = "fp32"
    ema: float = 0.0  # of an average of weights, as wide as masters
    fp8_scaling: Fp8Scaling = "rowwise"
    optimizer: OptimizerConfig = OptimizerConfig()
    sync: SyncConfig = SyncConfig()
    overlaps_neighbours: bool = False  # decentralized replicas exchange while the step is computed
    steps: int = 1  # of the run, over which an exchange now and then is averaged
    schedule_name: str = "1f1b"
    sequence_parallel: bool = True
    gathers_ahead: bool = False  # zero=1 gathers new weights behind the next forward pass
    ep_overlap: bool = False  # tokens travel to experts beside the shared expert's GEMMs
    tp_overlap: bool = False  # collectives of tensor parallel layers travel beside their GEMMs
    zero: int = 0
    recompute: str = "none"
    stage_sizes: tuple[int, ...] = ()
    cp_mode: str = "ring"
    dispatcher: str = "all_to_all"
    document_mask: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    async_save: bool = False  # saves are written from a copy in host memory
    imbalance: float = 1.0  # copies of tokens that the busiest rank's experts get, over the mean
    bucket_bytes: float = 25 * 2**20  # of gradients that are reduced together
    lora: LoraConfig = LoraConfig()  # the adapters that are trained in the place of weights
    freeze: tuple[str, ...] = ()  # patterns of the weights that are not trained

    @classmethod
    def of(cls, config: RunConfig, world: int) -> "Workload":
        """The step of a run config on `world` ranks; fields of equal names are copied from the
        config."""
        p, layout = config.parallel, ParallelLayout.of_run(config, world)
        even = spread(config.model.num_layers, layout.num_stages)
        given: dict[str, Any] = {**vars(config.batch), **vars(p), **vars(config.train)} | {
            "model": config.model,
            "lora": config.lora,
            "layout": layout,
            "optimizer": config.optimizer,
            "sync": config.sync,
            "overlaps_neighbours": config.overlaps_neighbours,
            "schedule_name": p.schedule,
            "sequence_parallel": p.sequence_parallel or p.grid_rows > 1,
            "gathers_ahead": config.sync.method == "all_reduce" and not config.train.cuda_graphs,
            "ep_overlap": p.dispatcher == "all_to_all",
            "tp_overlap": p.tp_overlap and _takes_overlap(config),
            "stage_sizes": () if p.stage_layers == even else p.stage_layers,
            "document_mask": config.data.document_mask or config.model.head != "lm",
            "bucket_bytes": p.bucket_mib * 2**20,
        }
        return cls(
            **{field.name: given[field.name] for field in fields(cls) if field.name in given}
        )

    @cached_property
    def sizes(self) -> Precision:
        """Bytes per element of weights, gradients and optimizer state."""
        sizes = PRECISIONS[self.precision]
        moment = 2 if self.moments == "bf16" else sizes.moment
        gradient = 2 if self.gradients == "bf16" else sizes.gradient
        return sizes._replace(moment=moment, gradient=gradient)

    @property
    def gradient_width(self) -> int:
        """Bytes per element of accumulated and reduced gradients."""
        return self.sizes.gradient

    @property
    def accumulated_bytes(self) -> float:
        """Mean bytes per weight that a backward moves to accumulate a gradient: the gradient is
        read, and the bucket (core/sync/all_reduce.py) is written; from the second micro-batch
        on it is read too."""
        width = self.gradient_width
        again = 0.0 if self.zero == 3 else width * (1 - 1 / self.num_micro_batches)
        return self.sizes.weight + width + again

    @property
    def hiding_passes(self) -> Pass:
        """Shares of the passes that hide data parallel traffic: buckets are reduced behind the
        last backwards, and zero=1's all-gather of weights runs behind the next forward."""
        return Pass(float(self.gathers_ahead), 1.0)

    @property
    def unfused(self) -> float:
        """The ratio of element-wise memory traffic to mtcli's kernels', 1 for mtcli."""
        return 1.0

    @property
    def host_share(self) -> float:
        """The host's time over that of launching each operation from Python."""
        return REPLAYED if self.cuda_graphs else COMPILED if self.compile else 1.0

    def crossing_share(self, nodes: float) -> float:
        """The share of token copies for other nodes' experts that cross the network: 1."""
        return 1.0

    @property
    def narrow_experts(self) -> bool:
        """Whether fp8 is also of routed experts: not for mtcli (config/fp8.py)."""
        return False

    @property
    def gathers_without_copy(self) -> bool:
        """Whether zero=1 gathers new weights without a buffer, as other software does."""
        return False

    @property
    def run(self) -> tuple[ModelConfig, LoraConfig, tuple[str, ...]]:
        """The model, and what of it is trained."""
        return self.model, self.lora, self.freeze

    @property
    def gemms_back(self) -> float:
        """GEMMs in a linear layer's backward: of its input's gradient, and of a trained weight's;
        the mean of layers of which some are frozen."""
        if self.lora.rank or not self.freeze:
            return 1 if self.lora.rank else 2
        matrices = [p for p in run_parameters(*self.run).values() if p.matrices]
        return 1 + sum(p.numel for p in matrices if p.trained) / sum(p.numel for p in matrices)

    @property
    def block_bytes(self) -> float:
        """Bytes that a block of other software saves for backward; 0 for mtcli's, which are
        counted."""
        return 0.0

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backwards into I and W."""
        return self.schedule_name == "zero_bubble" and self.layout.pp > 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data parallel rank per step."""
        return max(1, self.global_batch_size // (self.micro_batch_size * self.layout.batch_shards))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.global_batch_size * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context parallel rank."""
        return self.micro_batch_size * self.seq_len // self.layout.cp

    @property
    def stream_bytes(self) -> float:
        """Bytes of a micro-batch's residual stream on one cp rank, over all tp ranks."""
        return float(self.tokens * self.model.hidden_size * self.sizes.weight)

    @property
    def head_bytes(self) -> float:
        """Bytes of queries, keys and values of a rank's heads."""
        heads = self.model.num_heads + 2 * self.kv_heads
        return (
            self.row_tokens * heads * self.model.padded_head_dim / self.columns * self.sizes.weight
        )

    @property
    def routed_bytes(self) -> float:
        """Bytes of the token copies for the busiest rank's experts."""
        return self.expert_rows * self.model.hidden_size * self.sizes.weight

    @property
    def sharded_halves(self) -> int:
        """The halves of a block that tensor parallelism shards: attention, and a dense MLP."""
        return 1 + (self.model.dense_ffn_hidden_size > 0)

    @property
    def tp_mode(self) -> str:
        """2d where the tp ranks form a grid of several rows, else 1d."""
        return "2d" if self.layout.tp_rows > 1 else "1d"

    @property
    def columns(self) -> int:
        """Ranks over which tensor parallelism shards heads: all tp ranks, or those of a row."""
        return self.layout.tp_columns

    @property
    def panels(self) -> int:
        """The panels of a GEMM on a grid of tp ranks; 1 without a grid."""
        rows, columns = self.layout.tp_rows, self.columns
        return lcm(rows, columns) if rows > 1 else 1

    @property
    def row_tokens(self) -> float:
        """Tokens of a micro-batch on one row of tp ranks."""
        return self.tokens / self.layout.tp_rows

    @property
    def kv_sharers(self) -> int:
        """Tensor parallel ranks that share a key-value head."""
        return max(1, self.columns // self.model.num_kv_heads)

    @property
    def kv_heads(self) -> int:
        """Key-value heads summed over tp ranks; a shared one counts on each rank."""
        return self.model.num_kv_heads * self.kv_sharers

    @property
    def sequence_shards(self) -> int:
        """Ranks over which sequence parallelism shards norms, dropout and residuals."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def sequences(self) -> int:
        """Sequences per row that do not attend to each other; packed documents are not known."""
        return SEQUENCES.get(self.model.head, 1) if self.document_mask else 1

    @property
    def expert_copies(self) -> float:
        """Copies of tokens for the busiest rank's experts, up to their capacity."""
        return self._copies(self.imbalance) * self.layout.etp

    @property
    def sent_copies(self) -> float:
        """Copies of its own tokens that a rank sends to experts."""
        return self._copies(1.0)

    @property
    def expert_rows(self) -> float:
        """Rows that the busiest rank's experts compute: `expert_copies`, or padded to the
        capacity."""
        padded = self.model.pad_to_capacity
        return self._padded_rows * self.layout.etp if padded else self.expert_copies

    @property
    def sent_rows(self) -> float:
        """Rows that a rank sends to experts: `sent_copies`, or padded to the capacity."""
        return self._padded_rows if self.model.pad_to_capacity else self.sent_copies

    @property
    def layout_words(self) -> str:
        """The layout in one line, without axes of size 1."""
        layout, axes = self.layout, ("tp", "cp", "dp", "replica", "pp", "vpp", "ep", "etp")
        sizes = {axis: layout.size(axis) for axis in axes if axis != "vpp"}
        sizes = {axis: sizes.get(axis, layout.vpp) for axis in axes} | {"tp": layout.tp}
        words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1] or ["one rank"]
        if self.tp_mode == "2d":
            words.insert(1, f"({layout.tp_rows} x {layout.tp_columns})")
        words.append(f"micro-batch {self.micro_batch_size}")
        if layout.pp > 1:
            words.append(self.schedule_name)
        if self.zero:
            words.append(f"zero={self.zero}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if layout.tp > 1 and not self.sequence_parallel:
            words.append("whole sequences")
        return " ".join(words)

    def _copies(self, load: float) -> float:
        m = self.model
        return self.tokens / self.sequence_shards * m.top_k * min(load, m.capacity_factor or load)

    @property
    def _padded_rows(self) -> float:
        """Rows of all experts, padded to the capacity; a sequence's copies may all be on one
        rank."""
        m, tokens = self.model, self.tokens / self.sequence_shards
        load = m.top_k * m.capacity_factor / m.num_experts
        if m.drop_scope == "sub_sequence":
            return m.num_experts * ceil(tokens * load)
        return m.num_experts * min(tokens, self.micro_batch_size * ceil(self.seq_len * load))

    @cached_property
    def layers_of_stage(self) -> tuple[int, ...]:
        """Layers of each stage: `stage_sizes`, or as even as possible."""
        return self.stage_sizes or spread(self.model.num_layers, self.layout.num_stages)

    def block_counts(self, stages: Iterable[int]) -> BlockCounts:
        """Counts the blocks of some stages."""
        numbers: list[int] = []
        dense = layers = 0
        for stage in stages:
            count = self.layers_of_stage[stage]
            first = sum(self.layers_of_stage[:stage])
            layers += count
            numbers += range(first, first + count)
            dense += min(count, max(0, self.model.first_dense_layers - first))
        return BlockCounts(dense, layers - dense, tuple(numbers) if self.freeze else ())

    def layers_of_rank(self, pp_rank: int) -> int:
        """Layers of all the stages of a pipeline rank."""
        return sum(self.layers_of_stage[pp_rank :: self.layout.pp])

    @property
    def most_layers(self) -> int:
        """Layers of the pipeline rank that has most."""
        return max(map(self.layers_of_rank, range(self.layout.pp)))

    @cached_property
    def large_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks that may have most bytes: the ends, and the one with most layers."""
        pp = self.layout.pp
        return tuple({0, max(range(pp), key=self.layers_of_rank), pp - 1})

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The schedule of this layout for some number of micro-batches."""
        layout = self.layout
        return schedule_of(self.schedule_name, layout.pp, layout.vpp, num_micro_batches)

    @cached_property
    def representative(self) -> int:
        """The number of micro-batches after which the pipeline repeats with a period of pp."""
        pp, m = self.layout.pp, self.num_micro_batches
        rounds = 3 if self.layout.vpp > 1 else 2
        uneven = self.layout.vpp > 1 and len(set(self.layers_of_stage)) > 1
        rounds = UNEVEN_ROUNDS if self.stage_sizes or uneven else rounds
        return m if m < (rounds + 1) * pp else rounds * pp + m % pp


def _takes_overlap(config: RunConfig) -> bool:
    """Whether linear layers are those that exchange beside their GEMMs."""
    train = config.train
    return not (train.compile or train.precision == "fp8" or config.lora.rank)


@lru_cache(maxsize=16)  # a search asks for the same ones again and again
def schedule_of(name: str, pp: int, vpp: int, num_micro_batches: int) -> Schedule:
    """`schedule_for`, with its last results cached."""
    return schedule_for(name, pp, vpp, num_micro_batches)


def spread(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible; the ends, with embedding and head, get fewer."""
    per_stage, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2
    return tuple(per_stage + (first <= stage < first + more) for stage in range(num_stages))
