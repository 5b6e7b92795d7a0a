"""Bytes that are there for a moment, at the worst one: gradients on their way, whole weights.

What `activations.py` counts stays from a forward to its backward. A step's peak has more: the
float32 copy of the logits in the loss, the gradients inside the block whose backward runs, its
weight gradients until a bucket takes them, under zero=3 gathered weights, and under zero=1 the rows
that owners give back after the update, when activations are gone.
"""

from mtcli.core.cost.activations import (
    CHUNK_BYTES,
    Shapes,
    block_activations,
    head_gradient,
    logits_bytes,
    mlp_activations,
    remakes_swiglu,
    score_bytes,
    takes_plain_attention,
)
from mtcli.core.cost.workload import Workload

CPU_LOSS_BYTES = 2**20  # logits that the loss on CPU takes at once; two copies meet
RING_COPIES = 5  # float32 scores at once in attention_backward_reference
DROPPED_COPIES = 7  # of 4 bytes: 64-bit indices of each probability, while they are hashed


def head_working(work: Workload, cpu: bool) -> float:
    """Bytes beside what the head keeps.

    On CPU a float32 copy of some logits, or what their product's backward gives; on a GPU a chunk
    of logits and the head's input, or its gradients once more.
    """
    t, logits = Shapes.of(work), logits_bytes(work)
    before = t.stream * (work.sequence_cut > 1)  # the head's input, before it is gathered
    if not cpu:
        return max(min(logits, CHUNK_BYTES) + t.gathered + before, t.gathered + head_gradient(work))
    copy = 0.0 if t.size >= 4 else min(logits, 2 * CPU_LOSS_BYTES) / t.size * t.wide
    weight = logits / t.tokens * t.hidden
    return max(copy + before, t.gathered + before + weight)


def block_working(work: Workload, cpu: bool) -> float:
    """Bytes in the worst op of a block, beyond what all forwards have kept."""
    again = 0.0
    if work.recompute == "full":
        again = block_activations(work, cpu) - Shapes.of(work).stream
    return again + _tied(work) + max(*_mlp_backward(work, cpu), _attention(work, cpu))


def _tied(work: Workload) -> float:
    """The head's weight gradient, which waits for the embedding's where both are one tensor."""
    if work.layout.num_stages > 1 or work.zero == 3 or not work.model.tie_embeddings:
        return 0.0
    t = Shapes.of(work)
    return logits_bytes(work) / t.tokens * t.hidden


def _attention(work: Workload, cpu: bool) -> float:
    """Where scores are written out, by plain products, as of a ring in float64."""
    t, m = Shapes.of(work), work.model
    done = mlp_activations(work, cpu)  # not kept yet, or no longer
    scores = score_bytes(work)
    if m.attention_dropout:
        return DROPPED_COPIES * scores - done
    if takes_plain_attention(work, cpu):
        return 2 * scores - done
    if work.layout.cp == 1 or work.cp_mode != "ring" or cpu or work.sizes.weight <= 4:
        return 0.0
    heads = t.tokens * (3 * t.queries + t.keys) * t.wide
    return RING_COPIES * scores / work.layout.cp + heads + 3 * t.stream - done


def _mlp_backward(work: Workload, cpu: bool) -> tuple[float, float, float]:
    """In the backward of the second product, of the activation, and of the first product.

    The gradient of the block's output waits for the residual add all the while.
    """
    m, t, layout = work.model, Shapes.of(work), work.layout
    gated, narrow = 2 if m.activation == "swiglu" else 1, work.sizes.gemm == "fp8"
    rows, width = t.tokens, m.ffn_hidden_size / layout.tp
    weights = gathered = 0.0
    if m.num_experts:
        rows, width = work.expert_rows, m.moe_ffn_hidden_size / layout.etp
        weights = m.num_experts / layout.ep * m.hidden_size * width * t.size
    inner, outer = rows * width * t.size, rows * m.hidden_size * t.size
    in_turn = m.num_experts / layout.ep if m.num_experts and (cpu or narrow) else 1  # one by one
    inner /= in_turn
    one = weights or m.hidden_size * width * t.size
    if work.sequence_cut > 1 or m.num_experts:
        gathered = outer
    kept = mlp_activations(work, cpu)
    # Under full recompute without tp a gated block whose backward ran before has one left.
    stays = gated == 2 and work.recompute == "full" and layout.tp == 1 and not m.num_experts
    before = one * stays
    # A batched product's weight gradient is laid out anew, when the output's gradient is gone; of
    # experts one by one they are stacked in the end, the second product's before the first one's.
    turned = one if m.num_experts and not (cpu or narrow) else 0.0
    stacked = (1 + gated) * one if m.num_experts and (cpu or narrow) else 0.0
    # In float8 the operands of a weight's gradient are there as bytes, of x and of the gradient.
    bytes_of_2 = narrow * rows * (m.hidden_size + width) / in_turn
    bytes_of_1 = narrow * rows * (m.hidden_size + gated * width) / in_turn
    if remakes_swiglu(work, cpu) and not m.num_experts:  # beside its own gradients
        of_2, of_swiglu = 3 * inner + one + bytes_of_2 + gathered, 0.0
    else:
        of_2 = inner + one + bytes_of_2 + max(gathered + before, turned)
        of_swiglu = gated * inner + cpu * before
    return (
        t.stream + of_2,
        t.stream + of_swiglu,
        t.stream + gated * (inner + one) + bytes_of_1 + outer + gathered + stacked - kept,
    )
