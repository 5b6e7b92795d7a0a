"""Bytes that autograd keeps between a forward and its backward, tensor by tensor, as our code runs.

| part | kept for the backward | elements, times the weight's width unless said otherwise |
|---|---|---|
| norms | the residual stream before each; float32 statistics (on CPU wide copies) | 2 R D |
| regions | the input of each tensor parallel region, gathered | 2 T D |
| attention | projections; rotated or copied queries and keys; the output | T (2 q + kv) and more |
| MLP | up and gelu(up); or gate and up, on CPU and of experts their product too | 2 T F; 3 T F |
| experts | each copy's input, insides and result; the router's input | N (2 D + 3 F) and more |
| dropout | on CPU a mask as wide as the stream, at each site | R D |

T are a micro-batch's tokens on a context parallel rank, R those between the tensor parallel regions
(T/tp under sequence parallelism), D hidden, F the MLP's width, q and kv the widths of queries and
of keys with values, N copies of tokens; F, q and kv are a rank's. Code from before 2022 (`flash` is
False) is counted as arXiv:2205.05198, section 4, counts it.
"""

from typing import NamedTuple

from mtcli.core.cost.workload import Workload
from mtcli.core.spec.sharding import VOCAB_MULTIPLE

CPU_ROW_BYTES = 2048  # whole_attention on CPU takes rows up to this long in blocks of heads
CHUNK_BYTES = 2**28  # of logits that the loss on a GPU makes at a time
INDEX = 8  # bytes


class Shapes(NamedTuple):
    """Sizes of one micro-batch on one rank."""

    tokens: float  # T
    rows: float  # R
    hidden: int  # D
    queries: float  # q
    keys: float  # kv: both, of this rank's groups
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
            2 * m.num_kv_heads * m.head_dim / tp,
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


def layer_activations(work: Workload, cpu: bool) -> float:
    """Bytes that one block keeps for one micro-batch; its input alone under full recompute."""
    if work.recompute == "full":
        return Shapes.of(work).stream
    return block_activations(work, cpu)


def block_activations(work: Workload, cpu: bool) -> float:
    """Bytes that one block keeps where it is not computed again as a whole."""
    if not work.flash:
        return _published(work)
    shapes = Shapes.of(work)
    kept = 2 * (_normed(work, cpu) + norm_activations(work, cpu))
    kept += 2 * shapes.stream * (cpu and bool(work.model.dropout))  # a GPU draws masks again
    kept += shapes.gathered + attention_activations(work, cpu)
    return kept + mlp_activations(work, cpu)


def _normed(work: Workload, cpu: bool) -> float:
    """Bytes of a norm's input, of which RMSNorm on CPU keeps a wide copy in its place."""
    copied = cpu and work.model.norm == "rmsnorm" and work.sizes.weight < 4
    return 0.0 if copied else Shapes.of(work).stream


def norm_activations(work: Workload, cpu: bool) -> float:
    """Bytes of a norm's statistics, and on CPU of RMSNorm's wide copies."""
    shapes = Shapes.of(work)
    if work.model.norm == "layernorm" or not cpu:
        return 2 * shapes.rows * shapes.wide
    copies = (1 + (shapes.size < 4)) * shapes.rows * shapes.hidden
    return (shapes.rows + copies) * shapes.wide


def attention_activations(work: Workload, cpu: bool) -> float:
    """Bytes between the projection and the output product of attention."""
    t, m = Shapes.of(work), work.model
    if m.attention_dropout:
        return _dropped_attention(work, cpu)
    projected, output = t.tokens * (t.queries + t.keys) * t.size, t.tokens * t.queries * t.size
    sums = t.tokens * t.heads * t.wide
    if work.recompute == "selective":
        return projected + output
    if takes_plain_attention(work, cpu):
        wide_heads = (1 + 2 * work.layout.cp) * t.tokens * t.queries * t.wide
        return score_bytes(work) + wide_heads + output
    grouped, turned = m.num_kv_heads != m.num_heads, m.position == "rope"
    copied = t.tokens * t.size * (turned * t.keys / 2 + (turned or grouped) * t.queries)
    if work.layout.cp == 1 or work.cp_mode == "a2a":
        if cpu and work.seq_len * t.size <= CPU_ROW_BYTES:
            return output + _in_blocks(work, projected, output)
        if work.layout.cp == 1:
            return projected + copied + output + sums
        return projected + 2 * output + sums
    own = output if turned or grouped else projected
    if work.cp_mode == "ring":
        return own + t.tokens * t.keys * t.size + 2 * output + sums
    everyone = work.layout.cp * t.tokens * t.keys * t.size
    mask = work.seq_len**2 / work.layout.cp * (1 + t.size)  # on a GPU a query has a span of keys
    return own + everyone + output + sums + cpu * mask


def _in_blocks(work: Workload, projected: float, output: float) -> float:
    """Bytes of queries, keys and values by head, and of the output once more by token. Of one
    sequence they stay as they were projected, turned or repeated, and the output is by token."""
    m = work.model
    if work.micro_batch_size > 1 or work.layout.cp > 1:
        return 4 * output
    if m.num_kv_heads != m.num_heads:
        return 3 * output
    return projected + 2 * output * (m.position == "rope")


def takes_plain_attention(work: Workload, cpu: bool) -> bool:
    """Whether a GPU has no kernel that keeps no scores: torch none for grouped queries in float32,
    and nobody in float64."""
    m, size = work.model, work.sizes.weight
    gathered = work.layout.cp > 1 and work.cp_mode == "all_gather"
    ring = work.layout.cp > 1 and work.cp_mode == "ring"
    grouped = m.num_kv_heads != m.num_heads
    return not cpu and not ring and (size > 4 or (grouped and size == 4 and not gathered))


def score_bytes(work: Workload) -> float:
    """A layer's attention scores of one micro-batch on a rank, in float32 at least."""
    t = Shapes.of(work)
    return t.tokens * t.heads * work.seq_len * t.wide


def mlp_activations(work: Workload, cpu: bool) -> float:
    """Bytes of the feed-forward part, its input included."""
    m, t = work.model, Shapes.of(work)
    if not m.num_experts:
        width = m.ffn_hidden_size / work.layout.tp
        return t.gathered + _insides(work, t.tokens, width, remakes_swiglu(work, cpu))
    return _expert_activations(work, cpu)


def embedding_activations(work: Workload, cpu: bool) -> float:
    """Where the embedding's rows came from, and on CPU the mask of its dropout."""
    shapes = Shapes.of(work)
    positions = INDEX * shapes.rows * (work.model.position == "learned")
    return (
        shapes.tokens * (INDEX + 1) + positions + shapes.stream * (cpu and bool(work.model.dropout))
    )


def head_activations(work: Workload, cpu: bool) -> float:
    """The last norm's input; on CPU the head's input and the exponentials of the logits, on a GPU
    the gradients of the head's input and weight, which its chunked loss makes in the forward."""
    t = Shapes.of(work)
    kept = _normed(work, cpu) + norm_activations(work, cpu) + t.gathered
    if not cpu:
        return kept + head_gradient(work)
    return kept + logits_bytes(work) + t.tokens * (INDEX + 1 + 2 * t.wide)


def head_gradient(work: Workload) -> float:
    """Bytes of the head's weight gradient: wide where it is a sum over several chunks of tokens."""
    t, logits = Shapes.of(work), logits_bytes(work)
    size = t.size if logits <= CHUNK_BYTES else t.wide
    return logits / (t.tokens * t.size) * t.hidden * size


def logits_bytes(work: Workload) -> float:
    """The logits of a micro-batch, vocabulary padding included."""
    cut = VOCAB_MULTIPLE * work.layout.tp
    columns = -(-work.model.vocab_size // cut) * VOCAB_MULTIPLE
    return float(work.tokens * work.sizes.weight * columns)


def boundary_activations(work: Workload) -> float:
    """What a stage holds of a micro-batch because another stage comes after it: its output."""
    return Shapes.of(work).stream


def turning_activations(work: Workload) -> float:
    """Cosines and sines of a micro-batch's positions."""
    return (
        work.tokens * 2 * work.model.head_dim * work.sizes.weight * (work.model.position == "rope")
    )


def weight_halves(work: Workload) -> float:
    """Bytes of one block that the weight half of a split backward waits with: the input of each
    product and the gradient of its output. Experts' products are not split."""
    m, t, tp = work.model, Shapes.of(work), work.layout.tp
    gated = 2 if m.activation == "swiglu" else 1
    width = (m.shared_expert_ffn_hidden_size if m.num_experts else m.ffn_hidden_size) / tp
    attention = 2 * m.hidden_size + 2 * t.queries + t.keys
    mlp = 2 * m.hidden_size + (1 + gated) * width if width else 0.0
    return t.tokens * t.size * (attention + mlp)


def remakes_swiglu(work: Workload, cpu: bool) -> bool:
    """Whether a SwiGLU that is not a routed expert's is made again in the backward: by a GPU's
    kernel, which float64 has not, but in a block that is computed again, which has it by then."""
    gated = work.model.activation == "swiglu"
    return gated and not cpu and work.sizes.weight <= 4 and work.recompute != "full"


def _insides(work: Workload, rows: float, width: float, remade: bool) -> float:
    """Bytes inside an MLP: what the activation is of, and its result where that is not `remade`."""
    widths = 3 if work.model.activation == "swiglu" else 2
    return (widths - remade) * rows * width * work.sizes.weight


def _expert_activations(work: Workload, cpu: bool) -> float:
    m, t, etp = work.model, Shapes.of(work), work.layout.etp
    copies, rows = t.rows * m.top_k, work.expert_rows
    if work.dispatcher == "all_gather":
        copies *= etp
    router = t.rows * (m.hidden_size + m.num_experts) * t.wide
    if cpu:  # results and weighted results, and those that padding takes apart
        moved = (2 + m.pad_to_capacity) * copies
        index = 5 * copies * INDEX
    else:
        moved = rows / etp if m.pad_to_capacity else copies
        index = copies * (2 * INDEX + t.wide) + 2 * rows * INDEX * (work.layout.ep * etp > 1)
    moved = (moved + rows) * m.hidden_size * t.size
    kept = router + moved + index + _insides(work, rows, m.moe_ffn_hidden_size / etp, False)
    if m.shared_expert_ffn_hidden_size:
        width = m.shared_expert_ffn_hidden_size / work.layout.tp
        kept += _insides(work, t.tokens, width, remakes_swiglu(work, cpu)) + t.gathered
        kept += 2 * t.stream * m.shared_expert_gate
    return kept


def _dropped_attention(work: Workload, cpu: bool) -> float:
    """Probabilities (on CPU in float32), the mask and what it leaves, keys and values repeated."""
    t = Shapes.of(work)
    scores = t.tokens * t.heads * work.seq_len
    heads = t.tokens * t.size * (t.queries + t.keys + 4 * t.queries)
    if work.recompute == "selective":
        return t.tokens * t.size * (2 * t.queries + t.keys)
    return heads + scores * ((t.wide if cpu else t.size) + 2 * t.size)


def _published(work: Workload) -> float:
    """arXiv:2205.05198, equations 1 to 6, with general widths, gated MLPs and experts."""
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
