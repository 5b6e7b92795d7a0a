"""Attention on a tape: projections, positions, dropout of probabilities, and what mixes values."""

from collections.abc import Sequence

from mtcli.core.plan.tape import Gradients, Storage, Tape, Value
from mtcli.core.plan.taped_context import by_heads, gathered, in_order, ring
from mtcli.core.plan.taped_ops import Kit, column_linear, moved, row_linear, then
from mtcli.core.plan.taped_scores import (
    QKV,
    Heads,
    copied,
    mask_numel,
    masked_softmax,
    product,
    whole,
)

DRAWN = 3  # 64-bit numbers of each probability at once, while its mask is hashed


def attention(kit: Kit, x: Value) -> Value:
    """The attention part of a block."""
    tape, t = kit.tape, kit.t
    qkv = _heads(kit, x)
    if kit.work.recompute == "selective":
        mixed = tape.again(lambda x: _mix(kit, x), qkv)
    else:
        mixed = _mix(kit, qkv)
    tape.free(qkv)
    y = row_linear(kit, mixed, (t.hidden, t.queries))
    tape.free(mixed)
    return y


def _heads(kit: Kit, x: Value) -> Value:
    """Queries, keys and values; ranks that share a key-value head exchange columns for heads."""
    tape, t, sharers = kit.tape, kit.t, kit.work.kv_sharers
    columns = column_linear(kit, x, (t.queries + t.keys / sharers, t.hidden))
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
    whole = then(kit, parts, copied(kit, parts, size))
    return then(kit, columns, whole)


def _mix(kit: Kit, qkv: Value) -> Value:
    tape, m, heads = kit.tape, kit.work.model, Heads(kit, kit.t.size)

    def joined(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(qkv.size)]

    q, k, v = tape.op([qkv], [qkv, qkv, qkv], joined)
    if heads.grouped and m.num_kv_heads > kit.work.layout.tp:
        q = then(kit, q, copied(kit, q, heads.q))
    if m.position == "rope":
        q, k = _turned(kit, q, k, heads)
    if m.attention_dropout:
        y = _dropped(kit, (q, k, v), heads)
    elif kit.work.layout.cp == 1:
        y = whole(kit, (q, k, v), heads)
    else:
        ways = {"ring": ring, "all_gather": gathered, "a2a": by_heads}
        y = ways[kit.work.cp_mode](kit, (q, k, v), heads)
    tape.free(q, k, v)
    return y


def _turned(kit: Kit, q: Value, k: Value, heads: Heads) -> tuple[Value, Value]:
    """Rotated queries and keys: by one kernel, or op by op."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(heads.q), tape.new(heads.k)]

    if not kit.by_torch:
        turned = kit.tape.op([q, k], [heads.q, heads.k], back)
        kit.tape.free(q, k)
        return turned[0], turned[1]
    found = []
    for x, size in ((q, heads.q), (k, heads.k)):
        found.append(moved(kit, x, size, size, 2.5 * size))
    kit.tape.free(q, k)
    return found[0], found[1]


def _dropped(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Probabilities, of which a mask leaves some; each head has all keys and values."""
    tape, (q, *kv), size = kit.tape, qkv, kit.t.size
    whole = kit.work.layout.cp * heads.q
    k, v = (_per_head(kit, x, heads, whole) for x in kv)
    seen = tape.new(mask_numel(kit))
    scaled = moved(kit, q, heads.q, heads.q, heads.q)
    scores = product(kit, (scaled, k), heads.scores * size)
    tape.free(scaled, k)
    chances = masked_softmax(kit, scores, heads.scores)
    tape.free(scores)
    tape.moment(DRAWN * 8 * heads.scores)

    def masked(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(chances.size)]

    left = tape.op([chances], [chances.size], masked, more=chances.size)[0]
    mixed = product(kit, (left, v), heads.q)
    tape.free(chances, left, v, seen)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _per_head(kit: Kit, x: Value, heads: Heads, size: float) -> Value:
    if kit.work.layout.cp == 1:
        return moved(kit, x, size, heads.k)
    gathered = in_order(kit, x, heads)
    return then(kit, gathered, moved(kit, gathered, size, gathered.size))
