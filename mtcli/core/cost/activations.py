"""Bytes that autograd keeps between a forward and its backward, tensor by tensor.

The tensors of arXiv:2205.05198, section 4 (equations 1 to 6), for general widths, grouped queries,
gated MLPs, experts and flash attention. Per token, then times the micro-batch's tokens.
"""

from mtcli.core.cost.workload import Workload


def layer_activations(work: Workload) -> float:
    """Bytes that one block keeps for one micro-batch; its input alone under full recompute."""
    if work.recompute == "full":
        return work.tokens / work.sequence_cut * work.model.hidden_size * work.sizes.weight
    return _saved(work)


def recomputed_block(work: Workload) -> float:
    """Bytes of the one block that lives while it is computed again."""
    return _saved(work) if work.recompute == "full" else 0.0


def embedding_activations(work: Workload) -> float:
    """The mask of the embedding's dropout."""
    masked = bool(work.model.dropout)
    return masked * work.tokens * work.model.hidden_size / work.sequence_cut


def head_activations(work: Workload) -> float:
    """The last norm's input, the head's input, and the logits in float32."""
    hidden = 2 * work.sizes.weight * work.model.hidden_size / work.sequence_cut
    return work.tokens * hidden + logits_bytes(work)


def logits_bytes(work: Workload) -> float:
    """The logits of a micro-batch, at least in float32."""
    columns = -(-work.model.vocab_size // work.layout.tp)
    return float(work.tokens * max(4, work.sizes.weight) * columns)


def output_gradients(work: Workload) -> float:
    """Bytes of one block that the weight half of a split backward waits with: the gradient of each
    product's output, beside the inputs that the forward pass saved."""
    m, layout = work.model, work.layout
    fused = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    up = 2 if m.activation == "swiglu" else 1
    if m.num_experts:
        inner = m.top_k * (up * m.moe_ffn_hidden_size + m.hidden_size * layout.etp)
        inner += up * m.shared_expert_ffn_hidden_size
    else:
        inner = up * m.ffn_hidden_size
    shared = 2 * m.hidden_size / work.sequence_cut
    return work.tokens * work.sizes.weight * ((fused + inner) / layout.tp + shared)


def _saved(work: Workload) -> float:
    m, size = work.model, work.sizes.weight
    queries, keys = m.num_heads * m.head_dim, 2 * m.num_kv_heads * m.head_dim
    # On sequence shards: the inputs of both norms and of what follows them, two dropout masks.
    shared = 4 * size * m.hidden_size + 2 * m.hidden_size * bool(m.dropout)
    # Cut by heads: query, key, value, the attention output, its log-sum-exp in float32.
    heads = size * (2 * queries + keys)
    if work.flash:
        heads += 4 * m.num_heads
    elif work.recompute == "none":  # the softmax, and where it is dropped a mask and the result
        per_score = size + (1 + size) * bool(m.attention_dropout)
        heads += per_score * m.num_heads * work.seq_len
    per_token = shared / work.sequence_cut + heads / work.layout.tp + _mlp(work)
    return work.tokens * per_token


def _mlp(work: Workload) -> float:
    """Bytes per token inside the MLP: up and GELU, or gate, up and their product; by experts."""
    m, layout, size = work.model, work.layout, work.sizes.weight
    widths = 3 if m.activation == "swiglu" else 2
    if not m.num_experts:
        return widths * m.ffn_hidden_size * size / layout.tp
    # top_k copies of a token when experts are evenly loaded: their inputs, insides and outputs.
    routed = 2 * m.hidden_size * layout.etp + widths * m.moe_ffn_hidden_size
    shared = widths * m.shared_expert_ffn_hidden_size
    router = 2 * 4 * m.num_experts / work.sequence_cut  # logits and probabilities in float32
    return (m.top_k * routed + shared) * size / layout.tp + router
