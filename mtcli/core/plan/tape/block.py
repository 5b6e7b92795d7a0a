"""A transformer block on a tape: attention of every kind, the MLP, and experts.

Which kernel runs is decided as the engine decides it: by the device, the dtype and the sizes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from mtcli.core.plan.tape.autograd import (
    Gradients,
    Storage,
    Tape,
    Value,
    leaf,
    named_again,
    new_gradients,
    same_gradient,
)
from mtcli.core.plan.tape.ops import (
    BLOCK,
    ENDS,
    EXPERTS,
    INDEX,
    Kit,
    activated_linear,
    add,
    add_norm,
    after,
    before,
    column_linear,
    concatenated,
    dropout,
    gates,
    gemm_bytes,
    linear,
    moved,
    norm,
    recomputes_activation,
    resized,
    reused,
    row_linear,
    saved_by,
    then,
    trained,
    views,
)
from mtcli.kernels.limits import CPU_ATTENTION_ROW_BYTES, block_rows, random_bytes

SPAN = 8  # bytes of a query's `Spans`: two int32

QKV = tuple[Value, Value, Value]


class HeadSizes:
    """Bytes of queries q, of keys or values k and of a log-sum-exp, at `size` bytes an element, and
    the number of scores; of all rows, or of one of so many."""

    def __init__(self, kit: Kit, size: int, rows: int = 1) -> None:
        t, m, tokens = kit.t, kit.work.model, kit.t.tokens / rows
        self.size, self.rows = size, rows
        self.q, self.k = tokens * t.queries * size, tokens * t.keys / 2 * size
        self.lse = tokens * t.heads * t.wide
        self.scores = tokens * t.heads * kit.work.seq_len
        self.grouped = kit.work.kv_heads != m.num_heads


def block(kit: Kit, x: Value, number: int = 0) -> Value:
    """x + attention(norm(x)), then x + mlp(norm(x)); of the order "post" the norms of sums."""
    if kit.gathering is None:
        return _saved_or_recomputed(kit, x)
    group, experts = (kit.groups[i]._replace(name=f"{i} of {number}") for i in (BLOCK, EXPERTS))
    kit = replace(kit, groups=(group, experts, *kit.groups[ENDS:]))
    inside = before(kit.gathering, group, x)
    y = _saved_or_recomputed(kit, inside)
    return after(kit.gathering, group, y)


def _saved_or_recomputed(kit: Kit, x: Value) -> Value:
    if kit.work.recompute == "full":
        return kit.tape.recompute(lambda x: _block(kit, x), x)
    return _block(kit, x)


def _block(kit: Kit, x: Value) -> Value:
    tape, m = kit.tape, kit.work.model
    if kit.work.block_bytes:  # of code that is not ours, as a whole
        more = kit.work.block_bytes - x.size
        return tape.op([x], [x.size], new_gradients(x.size), saved=[x], more=more)[0]
    if m.norm_order == "post":
        y = _norm_of_sum(kit, x, attention(kit, x))
        return then(kit, y, _norm_of_sum(kit, y, mlp(kit, y, m.ffn_hidden_size / kit.work.columns)))
    normed = norm(kit, x)
    y = then(kit, normed, attention(kit, normed))
    if m.dropout:
        total = then(kit, y, dropout(kit, y, x))
        normed = norm(kit, total)
    else:
        total, normed = add_norm(kit, x, y)
        tape.free(y)
    if m.num_experts:
        part = mixture(kit, normed)
    else:
        part = mlp(kit, normed, m.ffn_hidden_size / kit.work.columns)
    out = dropout(kit, part, total)
    tape.free(part, normed, total)
    return out


def _norm_of_sum(kit: Kit, x: Value, y: Value) -> Value:
    """norm(x + dropout(y)), which frees y."""
    if kit.work.model.dropout:
        total = dropout(kit, y, x)
        normed = norm(kit, total)
    else:
        total, normed = add_norm(kit, x, y)
    kit.tape.free(total, y)
    return normed


def mlp(kit: Kit, x: Value, width: float, name: str = "mlp") -> Value:
    """down(activation(up(x))), `width` of this rank; on a GPU the bias is GELU's."""
    up = "gate_up" if gates(kit) > 1 else "up"
    inner = column_linear(kit, x, (gates(kit) * width, kit.t.inner), f"{name}.{up}")
    down = row_linear(kit, inner, (kit.t.hidden, width), f"{name}.down", activated_linear)
    return then(kit, inner, down)


def attention(kit: Kit, x: Value) -> Value:
    """Runs the attention half of a block."""
    tape, t = kit.tape, kit.t
    qkv = _heads(kit, x)
    if kit.work.recompute == "selective":
        mixed = tape.recompute(lambda x: _mix(kit, x), qkv)
    else:
        mixed = _mix(kit, qkv)
    tape.free(qkv)
    return then(kit, mixed, row_linear(kit, mixed, (t.hidden, t.queries), "attention.out"))


def _heads(kit: Kit, x: Value) -> Value:
    """Queries, keys and values; ranks that share a key-value head exchange columns for heads."""
    tape, t, sharers = kit.tape, kit.t, kit.work.kv_sharers
    shape = t.queries + t.keys / sharers, t.inner
    columns = column_linear(kit, x, shape, "attention.qkv")
    if sharers == 1:
        return columns
    size, own_keys = t.tokens * (t.queries + t.keys) * t.size, t.tokens * t.keys / sharers * t.size

    def summed(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(own_keys + columns.size)
        return [tape.new(columns.size)]

    def exchanged(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(2 * size)  # laid out by receiver, and what comes
        return [tape.new(size)]

    sent = tape.op([columns], [size], summed)[0]
    parts = then(kit, sent, tape.op([sent], [size], exchanged)[0])
    full_heads = then(kit, parts, copied(kit, parts, size))
    return then(kit, columns, full_heads)


def _mix(kit: Kit, qkv: Value) -> Value:
    tape, m, heads = kit.tape, kit.work.model, HeadSizes(kit, kit.t.size)
    q, k, v = tape.op([qkv], [qkv, qkv, qkv], new_gradients(qkv.size))
    if heads.grouped and m.num_kv_heads > kit.work.columns:
        q = then(kit, q, copied(kit, q, heads.q))
    if m.position == "rope":
        q, k = _rotated(kit, q, k, heads)
    if m.attention_dropout:
        y = _with_dropout(kit, (q, k, v), heads)
    elif kit.work.layout.cp == 1:
        y = full_rows(kit, (q, k, v), heads)
    else:
        ways = {"ring": ring, "all_gather": gathered, "a2a": heads_exchanged}
        y = ways[kit.work.cp_mode](kit, (q, k, v), heads)
    tape.free(q, k, v)
    return y


def _rotated(kit: Kit, q: Value, k: Value, heads: HeadSizes) -> tuple[Value, Value]:
    """Rotates queries and keys by position: by one kernel, or op by op."""
    sizes = heads.q, heads.k
    if kit.by_torch:
        rotated = [moved(kit, x, n, n, 2.5 * n) for x, n in zip((q, k), sizes, strict=True)]
    else:
        rotated = kit.tape.op([q, k], sizes, new_gradients(*sizes))
    kit.tape.free(q, k)
    return rotated[0], rotated[1]


def _with_dropout(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention with dropout of its probabilities; each head has all keys and values."""
    tape, (q, *kv), size = kit.tape, qkv, kit.t.size
    all_keys = kit.work.layout.cp * heads.q
    k, v = (_per_head(kit, x, heads, all_keys) for x in kv)
    visible = Value(tape.new(mask_numel(kit)))
    scaled = moved(kit, q, heads.q, heads.q, heads.q)
    scores = batched_gemm(kit, (scaled, k), heads.scores * size)
    tape.free(scaled, k)
    left = _dropped_softmax(kit, scores, visible, heads)
    tape.free(scores)
    mixed = batched_gemm(kit, (left, v), heads.q)
    tape.free(left, v, visible)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _dropped_softmax(kit: Kit, scores: Value, visible: Value, heads: HeadSizes) -> Value:
    """Returns the probabilities that dropout leaves, which a GPU recomputes from the scores."""
    tape = kit.tape
    if not kit.by_torch:
        recomputed = [scores, visible]
        return tape.op(
            [scores], [scores.size], new_gradients(scores.size), saved=recomputed, more=heads.lse
        )[0]
    probabilities = masked_softmax(kit, scores, heads.scores)
    tape.moment(random_bytes(heads.scores, kit.work.seq_len, kit.cpu))
    size = probabilities.size
    left = tape.op([probabilities], [size], new_gradients(size), more=size)[0]
    return then(kit, probabilities, left)


def _per_head(kit: Kit, x: Value, heads: HeadSizes, size: float) -> Value:
    if kit.work.layout.cp == 1:
        return moved(kit, x, size, heads.k)
    gathered = in_order(kit, x, heads)
    return then(kit, gathered, moved(kit, gathered, size, gathered.size))


def copied(kit: Kit, x: Value, size: float) -> Value:
    """Copies x, and passes the gradient on as it is."""
    return kit.tape.op([x], [size], same_gradient)[0]


def full_rows(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of full rows; documents by our kernel's spans, or row by row in torch."""
    work = kit.work
    if work.document_mask and kit.by_torch:
        return _by_document(kit, qkv, heads)
    if work.document_mask:
        return fused(kit, qkv, heads, heads.k, SPAN * work.row_sequences * work.seq_len)
    return _of_rows(kit, qkv, heads, copies=work.row_sequences > 1 or work.layout.cp > 1)


def _by_document(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of each document of rows, one after another."""
    each, sizes = kit.work.sequences, (heads.q, heads.k, heads.k)
    rows, batch = kit.work.row_sequences * each, kit.work.micro_batch_size * each
    work = replace(kit.work, seq_len=kit.work.seq_len // each, micro_batch_size=batch)
    kit, cp = replace(kit, work=work), work.layout.cp
    one = HeadSizes(kit, heads.size, rows)
    if _is_short(kit, heads):
        return _in_blocks(kit, qkv, heads, True, one)
    if rows > 1 and cp > 1:  # by heads, which are laid out one by one
        q, k, v = (copied(kit, x, size) for x, size in zip(qkv, sizes, strict=True))
    else:
        q, k, v = (reused(kit, x) for x in qkv)
    split = [views(kit, x, rows, size) for x, size in zip((q, k, v), sizes, strict=True)]
    parts = [_of_rows(kit, row, one, copies=False) for row in zip(*split, strict=True)]
    mixed = concatenated(kit, parts, heads.q)
    kit.tape.free(q, k, v, *chain(*split), *parts)
    return mixed


def _of_rows(kit: Kit, qkv: QKV, heads: HeadSizes, copies: bool) -> Value:
    """Runs attention by the device's kernel; `copies` where rows are not stored head by head."""
    if _is_short(kit, heads):
        return _in_blocks(kit, qkv, heads, copies)
    if kit.slow:
        wide = HeadSizes(kit, 4, heads.rows)
        sizes = ((heads.q, wide.q), (heads.k, wide.k), (heads.k, wide.k))
        q, k, v = (moved(kit, x, to, of) for x, (of, to) in zip(qkv, sizes, strict=True))
        mixed = fused(kit, (q, k, v), wide, wide.k)
        kit.tape.free(q, k, v)
        return then(kit, mixed, resized(kit, mixed, heads.q))
    if not kit.cpu and heads.size > 4:
        return plain(kit, qkv, heads)
    if not kit.cpu and heads.grouped and heads.size == 4:
        q, *kv = qkv
        k, v = (moved(kit, x, heads.q, heads.k) for x in kv)
        mixed = fused(kit, (q, k, v), heads, heads.q)
        kit.tape.free(k, v)
        return mixed
    return fused(kit, qkv, heads, heads.k)


def _is_short(kit: Kit, heads: HeadSizes) -> bool:
    """Whether a row's scores stay in a CPU's cache."""
    return kit.cpu and kit.work.seq_len * compute_bytes(kit, heads.size) <= CPU_ATTENTION_ROW_BYTES


def compute_bytes(kit: Kit, size: float) -> float:
    """Bytes of an element in the dtype that GEMMs are made in."""
    return 2 * size if kit.slow else size


def fused(kit: Kit, qkv: QKV, heads: HeadSizes, keys: float, spans: float = 0.0) -> Value:
    """Runs flash attention, which saves the log-sum-exp, not the scores, and maybe `spans`."""
    return kit.tape.op(
        qkv,
        [heads.q],
        new_gradients(heads.q, keys, keys),
        saved=qkv,
        saves_results=[0],
        more=heads.lse + spans,
    )[0]


def _in_blocks(
    kit: Kit, qkv: QKV, heads: HeadSizes, copies: bool, one: HeadSizes | None = None
) -> Value:
    """Runs CPU attention, some heads at a time, maybe of `one` document; several sequences are
    copied by head and back."""
    saved = () if copies else qkv[: 1 if heads.grouped else 3]
    more = (3 if copies else 2 * heads.grouped) * heads.q
    forward, backward = head_blocks_bytes(kit, one or heads, kit.work.seq_len)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        laid = [tape.new(heads.q)] if copies else []
        found = [tape.new(heads.q) for _ in qkv]
        tape.moment(backward)
        tape.free(*laid)
        if heads.grouped:
            summed = [tape.new(heads.k), tape.new(heads.k)]
            tape.free(*found[1:])
            found[1:] = summed
        return found

    kit.tape.moment(heads.q + forward)
    mixed = kit.tape.op(qkv, [heads.q], back, saved=saved, saves_results=[0], more=more)[0]
    return then(kit, mixed, copied(kit, mixed, heads.q)) if copies else mixed


def head_blocks_bytes(kit: Kit, heads: HeadSizes, rows: int) -> tuple[float, float]:
    """Peaks of forward and backward on top of their results, of blocks of heads' scores."""
    size = compute_bytes(kit, heads.size)
    one, scores = rows**2 * size, heads.scores / kit.work.seq_len * rows * size
    block, unseen = min(scores, block_rows(int(one)) * one), one * kit.work.model.causal
    part = block / scores * heads.q / heads.size * size  # a block's queries
    there, back = (3, 5) if kit.slow else (0, 1)  # copies of them, and products
    # Going back, probabilities and their gradient are there.
    return unseen + max(block + there * part, unseen), unseen + 2 * block + back * part


def plain(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention that writes its scores: saves scaled queries and keys, values, probabilities.

    Values are copied where heads share them or where they are of one row among others.
    """
    tape, (q, *kv) = kit.tape, qkv
    times = kit.work.layout.cp if kit.work.cp_mode == "all_gather" else 1
    scaled = moved(kit, q, heads.q, heads.q)
    several = heads.grouped or kit.work.row_sequences > heads.rows
    k = moved(kit, kv[0], times * heads.q, times * heads.k)
    v = moved(kit, kv[1], times * heads.q, times * heads.k) if several else reused(kit, kv[1])
    scores = batched_gemm(kit, (scaled, k), heads.scores * heads.size)
    tape.free(scaled, k)
    probabilities = _softmax(kit, scores)
    tape.free(scores)
    mixed = batched_gemm(kit, (probabilities, v), heads.q, used=times * heads.q)
    tape.free(probabilities, v)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _softmax(kit: Kit, scores: Value, *saved: Value) -> Value:
    """Runs softmax, whose probabilities are saved on top of `saved`."""
    return kit.tape.op(
        [scores], [scores.size], new_gradients(scores.size), saved=saved, saves_results=[0]
    )[0]


def masked_softmax(kit: Kit, scores: Value, numel: float) -> Value:
    """Runs softmax under an attention mask by torch, on wide copies, which are saved."""
    wide = numel * kit.t.wide
    unseen = Value(kit.tape.new(mask_numel(kit)))
    filled = moved(kit, scores, wide, scores.size, wide)
    probabilities = _softmax(kit, filled, unseen)
    kit.tape.free(filled, unseen)
    if unseen.size:  # what sees nothing gets zeros
        probabilities = then(kit, probabilities, moved(kit, probabilities, wide, wide))
    return (
        probabilities
        if wide == scores.size
        else then(kit, probabilities, resized(kit, probabilities, scores.size))
    )


def mask_numel(kit: Kit) -> float:
    """Elements of the attention mask: one for all rows, one per row for documents, or none."""
    work = kit.work
    if not (work.model.causal or work.document_mask):
        return 0.0
    return kit.t.tokens * work.seq_len / (1 if work.document_mask else work.row_sequences)


def batched_gemm(kit: Kit, factors: tuple[Value, Value], size: float, used: float = 0.0) -> Value:
    """Runs a batched GEMM, in float32 where slow; `used` are the second factor's bytes in use."""
    (first, second), copies = factors, 2 * kit.slow
    sizes = first.size, used or second.size

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        found = []
        for mine, other in (sizes, sizes[::-1]):
            tape.moment(gemm_bytes(kit, copies * (size + other), mine))
            found.append(tape.new(mine))
        return found

    kit.tape.moment(gemm_bytes(kit, copies * sum(sizes), size))
    return kit.tape.op(factors, [size], back, saved=factors)[0]


def ring(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs ring attention, which sums its results in float32."""
    tape, (q, k, v), wide = kit.tape, qkv, kit.t.wide / kit.t.size
    both, backward_bytes = 2 * heads.k, _ring_backward_bytes(kit, heads)
    passing = min(2, kit.work.layout.cp - 1) * both  # a block that has come, and one on its way

    def apart(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [named_again(grads[0]), named_again(grads[0])]

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        grad, sums = tape.new(heads.q), (tape.new(wide * heads.q), tape.new(wide * both))
        tape.moment(passing + heads.q + 2 * both)
        tape.moment(passing + backward_bytes)
        tape.moment(passing + wide * both)
        found = [tape.new(heads.q), tape.new(both)]
        tape.free(grad, *sums)
        return found

    kv = tape.op([k, v], [both], apart)[0]
    tape.moment(passing + wide * heads.q + max(heads.q, 3 * _scores(kit, heads)))
    taken = [q, kv]
    mixed = tape.op(taken, [heads.q], back, saved=taken, saves_results=[0], more=heads.lse)[0]
    tape.free(kv)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _scores(kit: Kit, heads: HeadSizes) -> float:
    """Bytes of a block's scores in float64 on a GPU, which has no kernel of ours."""
    return heads.scores / kit.work.layout.cp * heads.size * (kit.by_torch and not kit.cpu)


def _ring_backward_bytes(kit: Kit, heads: HeadSizes) -> float:
    """Peak of one key block's backward, on top of the ring's own buffers."""
    if not kit.cpu:
        return 5 * _scores(kit, heads)
    work, size = kit.work, compute_bytes(kit, heads.size)
    rows, times = work.seq_len // work.layout.cp, size / heads.size
    q, both = times * heads.q, times * 2 * heads.k
    per_head = 2 * heads.grouped * q  # keys and values for each head
    if size >= 4 and rows * size <= CPU_ATTENTION_ROW_BYTES and not work.document_mask:
        copies = (work.row_sequences > 1) * q + per_head
        return copies + 3 * q + head_blocks_bytes(kit, heads, rows)[1]
    copies = kit.slow * (3 * q + both) + per_head
    mask = work.document_mask * kit.t.tokens * rows * (1 + size)  # and what it adds to scores
    return copies + mask + q + per_head + both


def gathered(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention over all-gathered keys and values, put in order."""
    tape, cp = kit.tape, kit.work.layout.cp
    q, *kv = qkv
    k, v = (in_order(kit, x, heads) for x in kv)
    if heads.size > 4 and not kit.cpu:
        mixed = plain(kit, (q, k, v), heads)
    else:
        mixed = fused(kit, (q, k, v), heads, cp * heads.k, _mask_bytes(kit, heads))
    tape.free(k, v)
    return mixed


def _mask_bytes(kit: Kit, heads: HeadSizes) -> float:
    """Bytes of the attention mask over gathered keys: our kernel's spans, on CPU a bias."""
    return mask_numel(kit) * heads.size if kit.cpu else SPAN * kit.t.tokens


def in_order(kit: Kit, x: Value, heads: HeadSizes) -> Value:
    """All-gathers keys or values and indexes them by position."""
    own, size = moved(kit, x, heads.k, heads.k), kit.work.layout.cp * heads.k
    parts = moved(kit, own, size, heads.k)
    kit.tape.free(own)
    return then(kit, parts, moved(kit, parts, size, size))


def heads_exchanged(kit: Kit, qkv: QKV, heads: HeadSizes) -> Value:
    """Runs attention of full sequences of some heads, with an all-to-all before and after."""
    tape = kit.tape
    sizes = (heads.q, heads.k, heads.k)
    q, k, v = (_exchanged(kit, x, size) for x, size in zip(qkv, sizes, strict=True))
    mixed = full_rows(kit, (q, k, v), heads)
    tape.free(q, k, v)
    return then(kit, mixed, _exchanged(kit, mixed, heads.q))


def _exchanged(kit: Kit, x: Value, size: float) -> Value:
    return moved(kit, x, size, size, size)


def mixture(kit: Kit, x: Value) -> Value:
    """Runs a mixture of experts, with the shared expert."""
    m, on_grid = kit.work.model, kit.work.layout.tp_rows > 1
    own = replace(kit, of_experts=True)
    entered = moved(kit, x, x.size, x.size, x.size) if on_grid else x
    routed, weights = _routed(own, entered)
    y = then(kit, weights, dispatched(own, routed, weights))
    if on_grid:
        kit.tape.free(routed, entered)
        y = then(kit, y, moved(kit, y, x.size, x.size, x.size))
    x = reused(kit, x) if on_grid else routed
    if m.shared_expert_ffn_hidden_size:
        width = m.shared_expert_ffn_hidden_size / kit.work.columns
        shared = mlp(kit, x, width, "mlp.shared_expert")
        if m.shared_expert_gate:
            gate = saved_by(kit, x, kit.t.rows * kit.t.size)
            shared = then(kit, shared, then(kit, gate, _gated(kit, gate, shared)))
        y = then(kit, shared, then(kit, y, add(kit, y, shared)))
    return then(kit, x, y)


def _gated(kit: Kit, gate: Value, x: Value) -> Value:
    """Multiplies x by its gate, a number per row."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        of_gate, of_x = tape.new(gate.size), tape.new(x.size)
        tape.moment(x.size)
        return [of_gate, of_x]

    return kit.tape.op([gate, x], [x.size], back, saved=[gate, x])[0]


def _routed(kit: Kit, x: Value) -> tuple[Value, Value]:
    """Routes tokens: (x with the router's losses attached, the weights of the chosen experts)."""
    tape, t, m = kit.tape, kit.t, kit.work.model
    table, chosen = t.rows * m.num_experts * t.wide, t.rows * m.top_k
    wide = resized(kit, x, x.size / t.size * t.wide) if t.size < 4 else x

    def of_weights(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(table)
        return [tape.new(table)]

    saved = [] if kit.work.lora.rank else [wide]
    logits = tape.op([wide], [table], new_gradients(wide.size), saved=saved)[0]
    if wide is not x:
        tape.free(wide)
    tape.moment(2 * table * (1 + kit.by_torch))
    more = table + chosen * (t.wide + INDEX)
    if m.aux_loss_coeff or m.sequence_aux_loss_coeff:
        more += table
    if m.capacity_factor:
        sharers = kit.work.layout.cp * kit.work.sequence_shards
        tape.moment(more + (2 + 4 * sharers) * table)
    weights = tape.op([logits], [chosen * t.wide], of_weights, more=more)[0]
    return reused(kit, x), then(kit, logits, weights)


def _gathered_experts(kit: Kit, x: Value) -> Value:
    if kit.gathering is None:
        return _experts(kit, x)
    group = kit.groups[EXPERTS]
    return after(kit.gathering, group, _experts(kit, before(kit.gathering, group, x)))


def _experts(kit: Kit, x: Value) -> Value:
    """Runs this rank's experts: by grouped GEMMs on a GPU, one after another on CPU."""
    m, work = kit.work.model, kit.work
    hidden, width = kit.t.hidden, m.moe_ffn_hidden_size / work.layout.etp
    gated, number = gates(kit), m.num_experts // work.layout.ep
    down = number * hidden * width * kit.t.size
    tables = [_table(kit, number * gated * width), _table(kit, number * hidden)]
    if kit.by_torch:
        return _one_by_one(kit, x, tables, number)
    inner = _grouped_gemm(kit, x, tables[0], gated * width / hidden, gated * down)
    if recomputes_activation(kit):
        return then(
            kit, inner, _grouped_activated_gemm(kit, inner, tables[1], hidden / width, down)
        )
    active = then(kit, inner, saved_by(kit, inner, inner.size / gated))
    return then(kit, active, _grouped_gemm(kit, active, tables[1], hidden / width, down))


def _table(kit: Kit, rows: float) -> Value:
    """Views all experts' weights of a kind as [experts, rows, columns]."""
    return kit.tape.op([leaf(rows)], [0.0], same_gradient)[0]


def _grouped_gemm(kit: Kit, x: Value, table: Value, times: float, size: float) -> Value:
    grads = new_gradients(x.size, trained(kit, size))
    saved = [] if kit.work.lora.rank else [x]
    return kit.tape.op([x, table], [times * x.size], grads, saved=saved)[0]


def _grouped_activated_gemm(kit: Kit, x: Value, table: Value, times: float, size: float) -> Value:
    """Runs a grouped GEMM of activation(x), recomputed in the backward in its gradient's memory."""
    given = x.size / gates(kit)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        result = tape.new(given)
        found, of_weight = tape.new(x.size), tape.new(trained(kit, size))
        tape.free(result)
        return [found, of_weight]

    kit.tape.moment(given + times * given)
    return kit.tape.op([x, table], [times * given], back, saved=[x])[0]


def _one_by_one(kit: Kit, x: Value, tables: Sequence[Value], number: int) -> Value:
    """Runs each expert's rows through its own GEMMs; weight gradients are joined at the end."""
    tape, m, size = kit.tape, kit.work.model, kit.t.size
    hidden, width = kit.t.hidden, m.moe_ffn_hidden_size / kit.work.layout.etp
    gated, rows = gates(kit), kit.work.expert_rows / number
    one = hidden * width * size
    split = views(kit, x, number, x.size)
    ups = views(kit, tables[0], number, trained(kit, gated * one * number))
    downs = views(kit, tables[1], number, trained(kit, one * number))
    parts = []
    for mine, up, down in zip(split, ups, downs, strict=True):
        inner = linear(kit, mine, (gated * width, hidden), rows, up)
        parts.append(then(kit, inner, activated_linear(kit, inner, (hidden, width), down)))
    y = concatenated(kit, parts, x.size)
    tape.free(*parts, *split)
    return y


class Routed(NamedTuple):
    """Sizes of what a dispatcher handles; bytes but for the two counts."""

    tokens: float
    copies: float  # of tokens that no capacity drops
    rows: float  # that the copies are stored in, padded experts' included
    num_copies: float
    num_chosen: float  # for copies: top_k of each token
    padding: float  # of copies that are put into rows of zeros, or 0

    @classmethod
    def of(cls, kit: Kit, ranks: int, copies: float, rows: float) -> "Routed":
        """Sizes of the tokens of so many ranks, some copies and rows of which are here."""
        m, row, tokens = kit.work.model, kit.t.hidden * kit.t.size, ranks * kit.t.rows
        padding = copies * row * m.pad_to_capacity
        return cls(tokens * row, copies * row, rows * row, copies, tokens * m.top_k, padding)


def dispatched(kit: Kit, x: Value, weights: Value) -> Value:
    """Dispatches tokens to experts and sums the results by token."""
    ways = {"all_to_all": _by_all_to_all, "all_gather": _by_all_gather}
    return ways[kit.work.dispatcher](kit, x, weights)


def _by_all_to_all(kit: Kit, x: Value, weights: Value) -> Value:
    """Sends copies of tokens to their experts' ranks, and sorts them by expert there."""
    tape, work, layout = kit.tape, kit.work, kit.work.layout
    mine, travels = Routed.of(kit, 1, work.sent_copies, work.sent_rows), layout.ep * layout.etp > 1
    sent, here = mine.rows, work.expert_rows * kit.t.hidden * kit.t.size
    received = here / layout.etp
    order, back = (Value(tape.new(INDEX * work.expert_rows * travels)) for _ in range(2))
    rows = _spread(kit, x, mine)
    if layout.ep > 1:
        rows = then(kit, rows, moved(kit, rows, received, sent))
    if layout.etp > 1:
        gathered = moved(kit, rows, here, received, here)
        rows = then(kit, gathered, then(kit, rows, _reordered(kit, gathered, order)))
    elif travels:
        rows = then(kit, rows, _reordered(kit, rows, order))
    results = _gathered_experts(kit, rows)
    if travels:
        results = then(kit, results, _reordered(kit, results, back))
    if layout.etp > 1:
        results = then(kit, results, moved(kit, results, received, here, here))
    if layout.ep > 1:
        results = then(kit, results, moved(kit, results, sent, received))
    y = _summed(kit, results, weights, mine)
    tape.free(results, rows, order, back)
    return y


def _by_all_gather(kit: Kit, x: Value, weights: Value) -> Value:
    """All-gathers an expert group's tokens, and reduce-scatters the results."""
    tape, work = kit.tape, kit.work
    ranks = work.layout.ep * work.layout.etp
    everyone = Routed.of(kit, ranks, work.expert_copies, work.expert_rows)
    gathered = moved(kit, x, ranks * x.size, x.size) if ranks > 1 else x
    rows = _spread(kit, gathered, everyone)
    results = then(kit, rows, _gathered_experts(kit, rows))
    summed = _summed(kit, results, weights, everyone)
    if ranks == 1:
        tape.free(results)
        return summed
    y = moved(kit, summed, x.size, summed.size)
    tape.free(summed, results, gathered)
    return y


def _reordered(kit: Kit, rows: Value, order: Value) -> Value:
    return kit.tape.op([rows], [rows.size], new_gradients(rows.size), saved=[order])[0]


def _spread(kit: Kit, x: Value, routed: Routed) -> Value:
    """Copies tokens, sorted by expert; torch makes the copies first, and then pads them."""
    besides = kit.by_torch * routed.padding
    indices = routed.num_copies * (1 + (besides > 0)) if kit.by_torch else routed.num_chosen

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(besides + x.size)
        return [tape.new(x.size)]

    kit.tape.moment(besides + routed.rows)
    return kit.tape.op([x], [routed.rows], back, more=indices * INDEX)[0]


def _summed(kit: Kit, rows: Value, weights: Value, routed: Routed) -> Value:
    """Weighs rows and sums them by token."""
    if not kit.by_torch:
        return kit.tape.op(
            [rows, weights], [routed.tokens], new_gradients(rows.size, weights.size), saved=[rows]
        )[0]

    def by_torch(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        of_copies = tape.new(routed.copies)
        tape.moment(routed.padding + routed.copies)  # taken from the rows, and times the gradient
        if not routed.padding:
            return [of_copies, tape.new(weights.size)]
        of_rows = tape.new(rows.size)
        tape.free(of_copies)
        return [of_rows, tape.new(weights.size)]

    kit.tape.moment(routed.padding + routed.copies + routed.tokens)
    indices = routed.num_copies * (2 + (routed.padding > 0))
    more = indices * INDEX + routed.num_copies * kit.t.size  # and weights
    return kit.tape.op([rows, weights], [routed.tokens], by_torch, saved=[rows], more=more)[0]
