"""Sizes of one micro-batch on one rank, as the memory of its tensors is counted in them."""

from typing import NamedTuple

from mtcli.core.mesh.sharding import VOCAB_MULTIPLE
from mtcli.core.plan.workload import Workload

INDEX = 8  # bytes
CHUNK_BYTES = 2**28  # of logits that the loss on a GPU makes at a time


class Shapes(NamedTuple):
    """Sizes of one micro-batch on one rank."""

    tokens: float  # T
    rows: float  # R
    hidden: int  # D
    queries: float  # q
    keys: float  # kv: both, of this rank's groups, whole
    heads: float
    size: int  # bytes of a weight and of an activation
    wide: int  # of a reduction: 4 at least

    @classmethod
    def of(cls, work: Workload) -> "Shapes":
        """The sizes of a workload."""
        m, tp, size = work.model, work.layout.tp, work.sizes.weight
        return cls(
            work.tokens,
            work.tokens / work.sequence_cut,
            m.hidden_size,
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

    @property
    def gathered(self) -> float:
        """Bytes of a region's input [T, D]."""
        return self.tokens * self.hidden * self.size


def logits_bytes(work: Workload) -> float:
    """The logits of a micro-batch, vocabulary padding included."""
    cut = VOCAB_MULTIPLE * work.layout.tp
    columns = -(-work.model.vocab_size // cut) * VOCAB_MULTIPLE
    return float(work.tokens * work.sizes.weight * columns)


def chunk_rows(work: Workload) -> int:
    """Tokens whose logits fill CHUNK_BYTES at most, in multiples of 128 where that leaves any."""
    fitting = int(CHUNK_BYTES // (logits_bytes(work) / work.tokens))
    return min(work.tokens, max(1, fitting // 128 * 128 or fitting))


def turning_bytes(work: Workload) -> float:
    """Cosines and sines of a micro-batch's positions."""
    return (
        work.tokens * 2 * work.model.head_dim * work.sizes.weight * (work.model.position == "rope")
    )


def published_bytes(work: Workload) -> float:
    """A block's activations in code from before 2022: arXiv:2205.05198, equations 1 to 6, with
    general widths, gated MLPs and experts."""
    m, size, tp = work.model, work.sizes.weight, work.layout.tp
    queries, keys = m.num_heads * m.head_dim, 2 * m.num_kv_heads * m.head_dim
    shared = 4 * size * m.hidden_size + 2 * m.hidden_size * bool(m.dropout)
    heads = size * (2 * queries + keys)
    if work.recompute == "none":  # the softmax, and where it is dropped a mask and the result
        per_score = size + (1 + size) * bool(m.attention_dropout)
        heads += per_score * m.num_heads * work.seq_len
    widths = 3 if m.activation == "swiglu" else 2
    mlp = widths * m.ffn_hidden_size * size / tp
    if m.num_experts:
        routed = 2 * m.hidden_size * work.layout.etp + widths * m.moe_ffn_hidden_size
        mlp = (m.top_k * routed + widths * m.shared_expert_ffn_hidden_size) * size / tp
        mlp += 2 * 4 * m.num_experts / work.sequence_cut
    return work.tokens * (shared / work.sequence_cut + heads / tp + mlp)
