"""A transformer block on a tape: attention, an MLP or experts, and the norms and sums between.

Attention is of every kind: by one kernel or op by op, by document, and over cp ranks. Which kernel
runs is decided as the engine decides it: by the device, the dtype and the sizes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.ops import (
    BLOCK,
    ENDS,
    EXPERTS,
    INDEX,
    TapeContext,
    Weight,
    add,
    add_norm,
    batched_gemm,
    column_linear,
    concatenated,
    copied,
    dropout,
    linear,
    moved,
    norm,
    recomputes_activation,
    resized,
    reused,
    row_linear,
    saved_by,
    trained,
    views,
)
from mtcli.kernels.limits import CPU_ATTENTION_ROW_BYTES, block_rows, random_bytes


def block(ctx: TapeContext, x: Value, number: int = 0) -> Value:
    """x + attention(norm(x)), then x + mlp(norm(x)); of the order "post" the norms of sums."""
    if ctx.gathering is None:
        return _saved_or_recomputed(ctx, x)
    group, experts = (ctx.groups[i]._replace(name=f"{i} of {number}") for i in (BLOCK, EXPERTS))
    inside = replace(ctx, groups=(group, experts, *ctx.groups[ENDS:]))
    return ctx.gathering.around(group, x, lambda x: _saved_or_recomputed(inside, x))


def _saved_or_recomputed(ctx: TapeContext, x: Value) -> Value:
    if ctx.work.recompute == "full":
        return ctx.tape.recompute(lambda x: _block(ctx, x), x)
    return _block(ctx, x)


def _block(ctx: TapeContext, x: Value) -> Value:
    tape, m = ctx.tape, ctx.work.model
    if ctx.work.block_bytes:  # of code that is not ours, as a whole
        more = ctx.work.block_bytes - x.size
        return tape.op([x], [x.size], new_gradients(x.size), saved=[x], more=more)[0]
    width = m.ffn_hidden_size / ctx.work.columns
    if m.norm_order == "post":
        y = _norm_of_sum(ctx, x, attention(ctx, x))
        return _norm_of_sum(ctx, y, mlp(ctx, y, width))
    y = attention(ctx, norm(ctx, x))
    if m.dropout:
        total = dropout(ctx, y, x)
        del y
        normed = norm(ctx, total)
    else:
        total, normed = add_norm(ctx, x, y)
        del y
    part = mixture(ctx, normed) if m.num_experts else mlp(ctx, normed, width)
    return dropout(ctx, part, total)


def _norm_of_sum(ctx: TapeContext, x: Value, y: Value) -> Value:
    """norm(x + dropout(y))."""
    if ctx.work.model.dropout:
        return norm(ctx, dropout(ctx, y, x))
    return add_norm(ctx, x, y)[1]


SPAN = 8  # bytes of a query's `Spans`: two int32

QKV = tuple[Value, Value, Value]


def attention(ctx: TapeContext, x: Value) -> Value:
    """Runs the attention half of a block."""
    tape, t = ctx.tape, ctx.t
    qkv = _heads(ctx, x)
    if ctx.work.recompute == "selective":
        mixed = tape.recompute(lambda x: _mix(ctx, x), qkv)
    else:
        mixed = _mix(ctx, qkv)
    del qkv
    return row_linear(ctx, mixed, (t.hidden, t.queries), "attention.out")


def _heads(ctx: TapeContext, x: Value) -> Value:
    """Queries, keys and values; ranks that share a key-value head exchange columns for heads."""
    tape, t, sharers = ctx.tape, ctx.t, ctx.work.kv_sharers
    shape = t.queries + t.keys / sharers, t.inner
    columns = column_linear(ctx, x, shape, "attention.qkv")
    if sharers == 1:
        return columns
    size, own_keys = t.tokens * (t.queries + t.keys) * t.size, t.tokens * t.keys / sharers * t.size
    summed = new_gradients(columns.size, moment=own_keys + columns.size)
    sent = tape.op([columns], [size], summed)[0]
    exchanged = new_gradients(size, moment=2 * size)  # laid out by receiver, and what comes
    parts = tape.op([sent], [size], exchanged)[0]
    del sent
    return copied(ctx, parts, size)


def _mix(ctx: TapeContext, qkv: Value) -> Value:
    tape, m, heads = ctx.tape, ctx.work.model, HeadSizes(ctx, ctx.t.size)
    q, k, v = tape.op([qkv], [qkv, qkv, qkv], new_gradients(qkv.size))
    if heads.grouped and m.num_kv_heads > ctx.work.columns:
        q = copied(ctx, q, heads.q)
    if m.position == "rope":
        q, k = _rotated(ctx, q, k, heads)
    if m.attention_dropout:
        return _with_dropout(ctx, (q, k, v), heads)
    if ctx.work.layout.cp == 1:
        return full_row_attention(ctx, (q, k, v), heads)
    ways = {
        "ring": ring_attention,
        "all_gather": gathered_attention,
        "a2a": exchanged_attention,
    }
    return ways[ctx.work.cp_mode](ctx, (q, k, v), heads)


class HeadSizes:
    """Bytes of queries q, of keys or values k and of a log-sum-exp, at `size` bytes an element, and
    the number of scores; of all rows, or of one of so many."""

    def __init__(self, ctx: TapeContext, size: int, rows: int = 1) -> None:
        t, m, tokens = ctx.t, ctx.work.model, ctx.t.tokens / rows
        self.size, self.rows = size, rows
        self.q, self.k = tokens * t.queries * size, tokens * t.keys / 2 * size
        self.lse = tokens * t.heads * t.wide
        self.scores = tokens * t.heads * ctx.work.seq_len
        self.grouped = ctx.work.kv_heads != m.num_heads


def _rotated(ctx: TapeContext, q: Value, k: Value, heads: HeadSizes) -> tuple[Value, Value]:
    """Rotates queries and keys by position: by one kernel, or op by op."""
    sizes = heads.q, heads.k
    if ctx.by_torch:
        rotated = [moved(ctx, x, n, n, 2.5 * n) for x, n in zip((q, k), sizes, strict=True)]
    else:
        rotated = ctx.tape.op([q, k], sizes, new_gradients(*sizes))
    return rotated[0], rotated[1]


def _with_dropout(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention with dropout of its probabilities; each head has all keys and values."""
    tape, (q, *kv), size = ctx.tape, qkv, ctx.t.size
    all_keys = ctx.work.layout.cp * heads.q
    k, v = (_per_head(ctx, x, heads, all_keys) for x in kv)
    visible = Value(tape.new(mask_numel(ctx)))
    scaled = moved(ctx, q, heads.q, heads.q, heads.q)
    scores = batched_gemm(ctx, (scaled, k), heads.scores * size)
    del scaled, k
    left = _dropped_softmax(ctx, scores, visible, heads)
    del scores
    mixed = batched_gemm(ctx, (left, v), heads.q)
    del left, v, visible
    return copied(ctx, mixed, heads.q)


def _dropped_softmax(ctx: TapeContext, scores: Value, visible: Value, heads: HeadSizes) -> Value:
    """Returns the probabilities that dropout leaves, which a GPU recomputes from the scores."""
    tape = ctx.tape
    if not ctx.by_torch:
        recomputed = [scores, visible]
        return tape.op(
            [scores], [scores.size], new_gradients(scores.size), saved=recomputed, more=heads.lse
        )[0]
    probabilities = masked_softmax(ctx, scores, heads.scores)
    tape.moment(random_bytes(heads.scores, ctx.work.seq_len, ctx.cpu))
    size = probabilities.size
    return tape.op([probabilities], [size], new_gradients(size), more=size)[0]


def _per_head(ctx: TapeContext, x: Value, heads: HeadSizes, size: float) -> Value:
    if ctx.work.layout.cp == 1:
        return moved(ctx, x, size, heads.k)
    gathered = gathered_in_order(ctx, x, heads)
    return moved(ctx, gathered, size, gathered.size)


def full_row_attention(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of full rows; documents by our kernel's spans, or row by row in torch."""
    work = ctx.work
    if work.document_mask and ctx.by_torch:
        return _by_document(ctx, qkv, heads)
    if work.document_mask:
        return flash_attention(ctx, qkv, heads, heads.k, SPAN * work.row_sequences * work.seq_len)
    return _of_rows(ctx, qkv, heads, copies=work.row_sequences > 1 or work.layout.cp > 1)


def _by_document(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of each document of rows, one after another."""
    each, sizes = ctx.work.sequences, (heads.q, heads.k, heads.k)
    rows, batch = ctx.work.row_sequences * each, ctx.work.micro_batch_size * each
    work = replace(ctx.work, seq_len=ctx.work.seq_len // each, micro_batch_size=batch)
    ctx, cp = replace(ctx, work=work), work.layout.cp
    document = HeadSizes(ctx, heads.size, rows)
    if _is_short(ctx, heads):
        return _in_blocks(ctx, qkv, heads, True, document)
    if rows > 1 and cp > 1:  # by heads, which are laid out one by one
        q, k, v = (copied(ctx, x, size) for x, size in zip(qkv, sizes, strict=True))
    else:
        q, k, v = (reused(ctx, x) for x in qkv)
    split = [views(ctx, x, rows, size) for x, size in zip((q, k, v), sizes, strict=True)]
    parts = [_of_rows(ctx, row, document, copies=False) for row in zip(*split, strict=True)]
    return concatenated(ctx, parts, heads.q)


def _of_rows(ctx: TapeContext, qkv: QKV, heads: HeadSizes, copies: bool) -> Value:
    """Runs attention by the device's kernel; `copies` where rows are not stored head by head."""
    if _is_short(ctx, heads):
        return _in_blocks(ctx, qkv, heads, copies)
    if ctx.slow:
        wide = HeadSizes(ctx, 4, heads.rows)
        sizes = ((heads.q, wide.q), (heads.k, wide.k), (heads.k, wide.k))
        q, k, v = (moved(ctx, x, to, of) for x, (of, to) in zip(qkv, sizes, strict=True))
        mixed = flash_attention(ctx, (q, k, v), wide, wide.k)
        del q, k, v
        return resized(ctx, mixed, heads.q)
    if not ctx.cpu and heads.size > 4:
        return plain_attention(ctx, qkv, heads)
    if not ctx.cpu and heads.grouped and heads.size == 4:
        q, *kv = qkv
        k, v = (moved(ctx, x, heads.q, heads.k) for x in kv)
        return flash_attention(ctx, (q, k, v), heads, heads.q)
    return flash_attention(ctx, qkv, heads, heads.k)


def _is_short(ctx: TapeContext, heads: HeadSizes) -> bool:
    """Whether a row's scores stay in a CPU's cache."""
    return ctx.cpu and ctx.work.seq_len * compute_bytes(ctx, heads.size) <= CPU_ATTENTION_ROW_BYTES


def compute_bytes(ctx: TapeContext, size: float) -> float:
    """Bytes of an element in the dtype that GEMMs are made in."""
    return 2 * size if ctx.slow else size


def flash_attention(
    ctx: TapeContext, qkv: QKV, heads: HeadSizes, keys: float, spans: float = 0.0
) -> Value:
    """Runs flash attention, which saves the log-sum-exp, not the scores, and maybe `spans`."""
    return ctx.tape.op(
        qkv,
        [heads.q],
        new_gradients(heads.q, keys, keys),
        saved=qkv,
        saves_results=[0],
        more=heads.lse + spans,
    )[0]


def _in_blocks(
    ctx: TapeContext, qkv: QKV, heads: HeadSizes, copies: bool, document: HeadSizes | None = None
) -> Value:
    """Runs CPU attention, some heads at a time, maybe of one `document`; several sequences are
    copied by head and back."""
    kept = () if copies else qkv[: 1 if heads.grouped else 3]
    more = (3 if copies else 2 * heads.grouped) * heads.q
    forward, backward = head_blocks_bytes(ctx, document or heads, ctx.work.seq_len)

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        laid = [tape.new(heads.q)] if copies else []
        gradients: Gradients = [tape.new(heads.q) for _ in "qkv"]
        tape.moment(backward)
        del laid
        if heads.grouped:
            gradients[1:] = [tape.new(heads.k), tape.new(heads.k)]
        return gradients

    ctx.tape.moment(heads.q + forward)
    mixed = ctx.tape.op(qkv, [heads.q], back, saved=kept, saves_results=[0], more=more)[0]
    return copied(ctx, mixed, heads.q) if copies else mixed


def head_blocks_bytes(ctx: TapeContext, heads: HeadSizes, rows: int) -> tuple[float, float]:
    """Peaks of forward and backward on top of their results, of blocks of heads' scores."""
    size = compute_bytes(ctx, heads.size)
    head, scores = rows**2 * size, heads.scores / ctx.work.seq_len * rows * size
    block, unseen = min(scores, block_rows(int(head)) * head), head * ctx.work.model.causal
    part = block / scores * heads.q / heads.size * size  # a block's queries
    there, back = (3, 5) if ctx.slow else (0, 1)  # copies of them, and products
    # Going back, probabilities and their gradient are there.
    return unseen + max(block + there * part, unseen), unseen + 2 * block + back * part


def plain_attention(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention that writes its scores: saves scaled queries and keys, values, probabilities.

    Values are copied where heads share them or where they are of one row among others.
    """
    q, *kv = qkv
    times = ctx.work.layout.cp if ctx.work.cp_mode == "all_gather" else 1
    scaled = moved(ctx, q, heads.q, heads.q)
    several = heads.grouped or ctx.work.row_sequences > heads.rows
    k = moved(ctx, kv[0], times * heads.q, times * heads.k)
    v = moved(ctx, kv[1], times * heads.q, times * heads.k) if several else reused(ctx, kv[1])
    scores = batched_gemm(ctx, (scaled, k), heads.scores * heads.size)
    del scaled, k
    probabilities = _softmax(ctx, scores)
    del scores
    mixed = batched_gemm(ctx, (probabilities, v), heads.q, used=times * heads.q)
    del probabilities, v
    return copied(ctx, mixed, heads.q)


def _softmax(ctx: TapeContext, scores: Value, *saved: Value) -> Value:
    """Runs softmax, whose probabilities are saved on top of `saved`."""
    return ctx.tape.op(
        [scores], [scores.size], new_gradients(scores.size), saved=saved, saves_results=[0]
    )[0]


def masked_softmax(ctx: TapeContext, scores: Value, numel: float) -> Value:
    """Runs softmax under an attention mask by torch, on wide copies, which are saved."""
    wide = numel * ctx.t.wide
    unseen = Value(ctx.tape.new(mask_numel(ctx)))
    filled = moved(ctx, scores, wide, scores.size, wide)
    probabilities = _softmax(ctx, filled, unseen)
    masked = unseen.size > 0
    del filled, unseen
    if masked:  # what sees nothing gets zeros
        probabilities = moved(ctx, probabilities, wide, wide)
    return probabilities if wide == scores.size else resized(ctx, probabilities, scores.size)


def mask_numel(ctx: TapeContext) -> float:
    """Elements of the attention mask: one for all rows, one per row for documents, or none."""
    work = ctx.work
    if not (work.model.causal or work.document_mask):
        return 0.0
    return ctx.t.tokens * work.seq_len / (1 if work.document_mask else work.row_sequences)


def ring_attention(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs ring attention, which sums its results in float32."""
    tape, (q, k, v), wide = ctx.tape, qkv, ctx.t.wide / ctx.t.size
    both, backward_bytes = 2 * heads.k, _ring_backward_bytes(ctx, heads)
    passing = min(2, ctx.work.layout.cp - 1) * both  # a block that has come, and one on its way

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        sums = tape.new(heads.q), tape.new(wide * heads.q), tape.new(wide * both)
        tape.moment(passing + heads.q + 2 * both)
        tape.moment(passing + backward_bytes)
        tape.moment(passing + wide * both)
        gradients: Gradients = [tape.new(heads.q), tape.new(both)]
        del sums
        return gradients

    taken = [q, concatenated(ctx, [k, v], both)]
    tape.moment(passing + wide * heads.q + max(heads.q, 3 * _score_bytes(ctx, heads)))
    mixed = tape.op(taken, [heads.q], back, saved=taken, saves_results=[0], more=heads.lse)[0]
    del taken
    return copied(ctx, mixed, heads.q)


def _score_bytes(ctx: TapeContext, heads: HeadSizes) -> float:
    """Bytes of a block's scores in float64 on a GPU, which has no kernel of ours."""
    return heads.scores / ctx.work.layout.cp * heads.size * (ctx.by_torch and not ctx.cpu)


def _ring_backward_bytes(ctx: TapeContext, heads: HeadSizes) -> float:
    """Peak of one key block's backward, on top of the ring's own buffers."""
    if not ctx.cpu:
        return 5 * _score_bytes(ctx, heads)
    work, size = ctx.work, compute_bytes(ctx, heads.size)
    rows, times = work.seq_len // work.layout.cp, size / heads.size
    q, both = times * heads.q, times * 2 * heads.k
    per_head = 2 * heads.grouped * q  # keys and values for each head
    if size >= 4 and rows * size <= CPU_ATTENTION_ROW_BYTES and not work.document_mask:
        copies = (work.row_sequences > 1) * q + per_head
        return copies + 3 * q + head_blocks_bytes(ctx, heads, rows)[1]
    copies = ctx.slow * (3 * q + both) + per_head
    mask = work.document_mask * ctx.t.tokens * rows * (1 + size)  # and what it adds to scores
    return copies + mask + q + per_head + both


def gathered_attention(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention over all-gathered keys and values, put in order."""
    q, *kv = qkv
    k, v = (gathered_in_order(ctx, x, heads) for x in kv)
    if heads.size > 4 and not ctx.cpu:
        return plain_attention(ctx, (q, k, v), heads)
    return flash_attention(
        ctx, (q, k, v), heads, ctx.work.layout.cp * heads.k, _mask_bytes(ctx, heads)
    )


def _mask_bytes(ctx: TapeContext, heads: HeadSizes) -> float:
    """Bytes of the attention mask over gathered keys: our kernel's spans, on CPU a bias."""
    return mask_numel(ctx) * heads.size if ctx.cpu else SPAN * ctx.t.tokens


def gathered_in_order(ctx: TapeContext, x: Value, heads: HeadSizes) -> Value:
    """All-gathers keys or values and indexes them by position."""
    own, size = moved(ctx, x, heads.k, heads.k), ctx.work.layout.cp * heads.k
    parts = moved(ctx, own, size, heads.k)
    del own
    return moved(ctx, parts, size, size)


def exchanged_attention(ctx: TapeContext, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of full sequences of some heads, with an all-to-all before and after."""
    sizes = (heads.q, heads.k, heads.k)
    q, k, v = (_exchanged(ctx, x, size) for x, size in zip(qkv, sizes, strict=True))
    mixed = full_row_attention(ctx, (q, k, v), heads)
    del q, k, v
    return _exchanged(ctx, mixed, heads.q)


def _exchanged(ctx: TapeContext, x: Value, size: float) -> Value:
    return moved(ctx, x, size, size, size)


def mlp(ctx: TapeContext, x: Value, width: float, name: str = "mlp") -> Value:
    """down(activation(up(x))), `width` of this rank; on a GPU the bias is GELU's."""
    m = ctx.work.model
    up = "gate_up" if m.is_gated else "up"
    inner = column_linear(ctx, x, (m.up_factor * width, ctx.t.inner), f"{name}.{up}")
    return row_linear(ctx, inner, (ctx.t.hidden, width), f"{name}.down", activated=True)


def mixture(ctx: TapeContext, x: Value) -> Value:
    """Runs a mixture of experts, with the shared expert."""
    m, on_grid = ctx.work.model, ctx.work.layout.tp_rows > 1
    own = replace(ctx, of_experts=True)
    entered = moved(ctx, x, x.size, x.size, x.size) if on_grid else x
    routed, weights = _routed(own, entered)
    y = dispatched(own, routed, weights)
    del weights
    if on_grid:
        del routed, entered
        y = moved(ctx, y, x.size, x.size, x.size)
    x = reused(ctx, x) if on_grid else routed
    if m.shared_expert_ffn_hidden_size:
        width = m.shared_expert_ffn_hidden_size / ctx.work.columns
        shared = mlp(ctx, x, width, "mlp.shared_expert")
        if m.shared_expert_gate:
            shared = _gated(ctx, saved_by(ctx, x, ctx.t.rows * ctx.t.size), shared)
        y = add(ctx, y, shared)
    return y


def _gated(ctx: TapeContext, gate: Value, x: Value) -> Value:
    """Multiplies x by its gate, a number per row."""
    sizes = gate.size, x.size

    def back(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradients: Gradients = [tape.new(size) for size in sizes]
        tape.moment(sizes[1])
        return gradients

    return ctx.tape.op([gate, x], [x.size], back, saved=[gate, x])[0]


def _routed(ctx: TapeContext, x: Value) -> tuple[Value, Value]:
    """Routes tokens: (x with the router's losses attached, the weights of the chosen experts)."""
    tape, t, m = ctx.tape, ctx.t, ctx.work.model
    table, chosen = t.rows * m.num_experts * t.wide, t.rows * m.top_k
    wide = resized(ctx, x, x.size / t.size * t.wide) if t.size < 4 else x
    kept = [] if ctx.work.lora.rank else [wide]
    logits = tape.op([wide], [table], new_gradients(wide.size), saved=kept)[0]
    del wide, kept
    tape.moment(2 * table * (1 + ctx.by_torch))
    more = table + chosen * (t.wide + INDEX)
    if m.aux_loss_coeff or m.sequence_aux_loss_coeff:
        more += table
    if m.capacity_factor:
        sharers = ctx.work.layout.cp * ctx.work.sequence_shards
        tape.moment(more + (2 + 4 * sharers) * table)
    weights = tape.op([logits], [chosen * t.wide], new_gradients(table), more=more)[0]
    del logits
    return reused(ctx, x), weights


def _gathered_experts(ctx: TapeContext, x: Value) -> Value:
    if ctx.gathering is None:
        return _experts(ctx, x)
    return ctx.gathering.around(ctx.groups[EXPERTS], x, lambda x: _experts(ctx, x))


def _experts(ctx: TapeContext, x: Value) -> Value:
    """Runs this rank's experts: by grouped GEMMs on a GPU, one after another on CPU."""
    m, work = ctx.work.model, ctx.work
    hidden, width = ctx.t.hidden, m.moe_ffn_hidden_size / work.layout.etp
    gated, number = m.up_factor, m.num_experts // work.layout.ep
    down = number * hidden * width * ctx.t.size
    tables = [_expert_table(ctx, number * gated * width), _expert_table(ctx, number * hidden)]
    if ctx.by_torch:
        return _one_by_one(ctx, x, tables, number)
    inner = _grouped_gemm(ctx, x, tables[0], gated * width / hidden, gated * down)
    recomputes = recomputes_activation(ctx)
    if not recomputes:
        inner = saved_by(ctx, inner, inner.size / gated)
    return _grouped_gemm(ctx, inner, tables[1], hidden / width, down, recomputes)


def _expert_table(ctx: TapeContext, rows: float) -> Value:
    """Views all experts' weights of a kind as [experts, rows, columns]."""
    return ctx.tape.op([ctx.tape.leaf(rows)], [0.0], same_gradient)[0]


def _grouped_gemm(
    ctx: TapeContext, x: Value, table: Value, times: float, size: float, activated: bool = False
) -> Value:
    """Runs a grouped GEMM of x, or of activation(x), whose backward recomputes it in its gradient's
    memory. A row gets `times` as long; the weights have `size` bytes."""
    given = x.size / (ctx.work.model.up_factor if activated else 1)
    of_x, of_weight = x.size, trained(ctx, size)
    back = new_gradients(of_x, of_weight, moment=activated * (given + of_x + of_weight))
    ctx.tape.moment(activated * (given + times * given))
    kept = [x] if activated or not ctx.work.lora.rank else []
    return ctx.tape.op([x, table], [times * given], back, saved=kept)[0]


def _one_by_one(ctx: TapeContext, x: Value, tables: Sequence[Value], number: int) -> Value:
    """Runs each expert's rows through its own GEMMs; weight gradients are joined at the end."""
    m, size = ctx.work.model, ctx.t.size
    hidden, width = ctx.t.hidden, m.moe_ffn_hidden_size / ctx.work.layout.etp
    gated, rows = m.up_factor, ctx.work.expert_rows / number
    weight_bytes = hidden * width * size
    split = views(ctx, x, number, x.size)
    ups = views(ctx, tables[0], number, trained(ctx, gated * weight_bytes * number))
    downs = views(ctx, tables[1], number, trained(ctx, weight_bytes * number))
    parts = []
    for expert_rows, up, down in zip(split, ups, downs, strict=True):
        inner = linear(ctx, expert_rows, Weight(gated * width, hidden, up), rows)
        parts.append(linear(ctx, inner, Weight(hidden, width, down), activated=True))
        del inner
    return concatenated(ctx, parts, x.size)


class Routed(NamedTuple):
    """Sizes of what a dispatcher handles; bytes but for the two counts."""

    tokens: float
    copies: float  # of tokens that no capacity drops
    rows: float  # that the copies are stored in, padded experts' included
    num_copies: float
    num_chosen: float  # for copies: top_k of each token
    padding: float  # of copies that are put into rows of zeros, or 0

    @classmethod
    def of(cls, ctx: TapeContext, ranks: int, copies: float, rows: float) -> "Routed":
        """Sizes of the tokens of so many ranks, some copies and rows of which are here."""
        m, row, tokens = ctx.work.model, ctx.t.hidden * ctx.t.size, ranks * ctx.t.rows
        padding = copies * row * m.pad_to_capacity
        return cls(tokens * row, copies * row, rows * row, copies, tokens * m.top_k, padding)


def dispatched(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """Dispatches tokens to experts and sums the results by token."""
    ways = {"all_to_all": _by_all_to_all, "all_gather": _by_all_gather}
    return ways[ctx.work.dispatcher](ctx, x, weights)


def _by_all_to_all(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """Sends copies of tokens to their experts' ranks, and sorts them by expert there."""
    tape, work, layout = ctx.tape, ctx.work, ctx.work.layout
    routed = Routed.of(ctx, 1, work.sent_copies, work.sent_rows)
    travels = layout.ep * layout.etp > 1
    sent, here = routed.rows, work.expert_rows * ctx.t.hidden * ctx.t.size
    received = here / layout.etp
    order, back = (Value(tape.new(INDEX * work.expert_rows * travels)) for _ in range(2))
    rows = _spread(ctx, x, routed)
    if layout.ep > 1:
        rows = moved(ctx, rows, received, sent)
    if layout.etp > 1:
        gathered = moved(ctx, rows, here, received, here)
        rows = _reordered(ctx, gathered, order)
        del gathered
    elif travels:
        rows = _reordered(ctx, rows, order)
    results = _gathered_experts(ctx, rows)
    if travels:
        results = _reordered(ctx, results, back)
    if layout.etp > 1:
        results = moved(ctx, results, received, here, here)
    if layout.ep > 1:
        results = moved(ctx, results, sent, received)
    return _summed(ctx, results, weights, routed)


def _by_all_gather(ctx: TapeContext, x: Value, weights: Value) -> Value:
    """All-gathers an expert group's tokens, and reduce-scatters the results."""
    work = ctx.work
    ranks = work.layout.ep * work.layout.etp
    everyone = Routed.of(ctx, ranks, work.expert_copies, work.expert_rows)
    gathered = moved(ctx, x, ranks * x.size, x.size) if ranks > 1 else x
    rows = _spread(ctx, gathered, everyone)
    results = _gathered_experts(ctx, rows)
    del rows
    summed = _summed(ctx, results, weights, everyone)
    return summed if ranks == 1 else moved(ctx, summed, x.size, summed.size)


def _reordered(ctx: TapeContext, rows: Value, order: Value) -> Value:
    return ctx.tape.op([rows], [rows.size], new_gradients(rows.size), saved=[order])[0]


def _spread(ctx: TapeContext, x: Value, routed: Routed) -> Value:
    """Copies tokens, sorted by expert; torch makes the copies first, and then pads them."""
    besides = ctx.by_torch * routed.padding
    indices = routed.num_copies * (1 + (besides > 0)) if ctx.by_torch else routed.num_chosen
    back = new_gradients(x.size, moment=besides + x.size)
    ctx.tape.moment(besides + routed.rows)
    return ctx.tape.op([x], [routed.rows], back, more=indices * INDEX)[0]


def _summed(ctx: TapeContext, rows: Value, weights: Value, routed: Routed) -> Value:
    """Weighs rows and sums them by token."""
    if not ctx.by_torch:
        return ctx.tape.op(
            [rows, weights], [routed.tokens], new_gradients(rows.size, weights.size), saved=[rows]
        )[0]

    of_rows, of_weights = rows.size, weights.size

    def by_torch(tape: Tape, grads: list[Storage], saved: Sequence[Storage]) -> Gradients:
        gradient = tape.new(routed.copies)
        tape.moment(routed.padding + routed.copies)  # taken from the rows, and times the gradient
        if routed.padding:
            gradient = tape.new(of_rows)
        return [gradient, tape.new(of_weights)]

    ctx.tape.moment(routed.padding + routed.copies + routed.tokens)
    indices = routed.num_copies * (2 + (routed.padding > 0))
    more = indices * INDEX + routed.num_copies * ctx.t.size  # and weights
    return ctx.tape.op([rows, weights], [routed.tokens], by_torch, saved=[rows], more=more)[0]
