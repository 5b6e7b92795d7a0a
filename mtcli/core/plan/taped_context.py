"""Attention over a context cut among ranks, on a tape: a ring, gathered keys, or whole heads."""

from collections.abc import Sequence

from mtcli.core.plan.tape import Gradients, Storage, Tape, Value
from mtcli.core.plan.taped_ops import Kit, moved, same, then
from mtcli.core.plan.taped_scores import (
    CPU_ROW_BYTES,
    QKV,
    SPAN,
    Heads,
    blocks_bytes,
    copied,
    fused,
    made_in,
    mask_numel,
    plain,
    whole,
)


def ring(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Keys and values go round; sums over the ring are in float32."""
    tape, (q, k, v), wide = kit.tape, qkv, kit.t.wide / kit.t.size
    both, going_back = 2 * heads.k, _going_back(kit, heads)
    passing = min(2, kit.work.layout.cp - 1) * both  # a block that has come, and one on its way

    def apart(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [same(grads[0]), same(grads[0])]

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        grad, sums = tape.new(heads.q), (tape.new(wide * heads.q), tape.new(wide * both))
        tape.moment(passing + heads.q + 2 * both)
        tape.moment(passing + going_back)
        tape.moment(passing + wide * both)
        found = [tape.new(heads.q), tape.new(both)]
        tape.free(grad, *sums)
        return found

    kv = tape.op([k, v], [both], apart)[0]
    tape.moment(passing + wide * heads.q + max(heads.q, 3 * _scores(kit, heads)))
    taken = [q, kv]
    mixed = tape.op(taken, [heads.q], back, kept=taken, keeps_results=[0], more=heads.lse)[0]
    tape.free(kv)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _scores(kit: Kit, heads: Heads) -> float:
    """Bytes of a block's scores where no kernel of a GPU's makes them: in float64."""
    return heads.scores / kit.work.layout.cp * heads.size * (kit.by_torch and not kit.cpu)


def _going_back(kit: Kit, heads: Heads) -> float:
    """Bytes at once beside a ring's own while gradients of one block of keys are made on CPU."""
    if not kit.cpu:
        return 5 * _scores(kit, heads)
    work, size = kit.work, made_in(kit, heads.size)
    rows, times = work.seq_len // work.layout.cp, size / heads.size
    q, both = times * heads.q, times * 2 * heads.k
    per_head = 2 * heads.grouped * q  # keys and values for each head
    if size >= 4 and rows * size <= CPU_ROW_BYTES and not work.document_mask:
        copies = (work.micro_batch_size > 1) * q + per_head
        return copies + 3 * q + blocks_bytes(kit, heads, rows)[1]
    copies = kit.slow * (3 * q + both) + per_head
    mask = work.document_mask * kit.t.tokens * rows * (1 + size)  # and what it adds to scores
    return copies + mask + q + per_head + both


def gathered(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Every rank's keys and values, gathered and put in order."""
    tape, cp = kit.tape, kit.work.layout.cp
    q, *kv = qkv
    k, v = (in_order(kit, x, heads) for x in kv)
    if heads.size > 4 and not kit.cpu:
        mixed = plain(kit, (q, k, v), heads)
    else:
        mixed = fused(kit, (q, k, v), heads, cp * heads.k, _seen(kit, heads))
    tape.free(k, v)
    return mixed


def _seen(kit: Kit, heads: Heads) -> float:
    """What says which keys queries see: spans, or on CPU a mask, a number each."""
    return mask_numel(kit) * heads.size if kit.cpu else SPAN * kit.t.tokens


def in_order(kit: Kit, x: Value, heads: Heads) -> Value:
    """Keys or values of every rank, gathered and then indexed by position."""
    own, size = moved(kit, x, heads.k, heads.k), kit.work.layout.cp * heads.k
    parts = moved(kit, own, size, heads.k)
    kit.tape.free(own)
    return then(kit, parts, moved(kit, parts, size, size))


def by_heads(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Whole sequences of some heads, exchanged on the way there and back."""
    tape = kit.tape
    sizes = (heads.q, heads.k, heads.k)
    q, k, v = (_exchanged(kit, x, size) for x, size in zip(qkv, sizes, strict=True))
    mixed = whole(kit, (q, k, v), heads)
    tape.free(q, k, v)
    return then(kit, mixed, _exchanged(kit, mixed, heads.q))


def _exchanged(kit: Kit, x: Value, size: float) -> Value:
    return moved(kit, x, size, size, size)
