"""Activations of a block in code from before 2022, as its papers count them."""

from dataclasses import replace

from mtcli.core.plan.workload import Workload


def as_published(work: Workload) -> Workload:
    """The workload with a block's published bytes, where it is from before flash attention."""
    return work if work.flash else replace(work, block_bytes=published_bytes(work))


def published_bytes(work: Workload) -> float:
    """Bytes that a block saves for backward: arXiv:2205.05198, equations 1 to 6, with general
    widths, gated MLPs and experts."""
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
