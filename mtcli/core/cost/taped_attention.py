"""Attention on a tape: projections, positions, and scaled dot products in each of their ways."""

from collections.abc import Sequence

from mtcli.core.cost.tape import Gradients, Storage, Tape, Value
from mtcli.core.cost.taped_ops import Kit, column_linear, moved, resized, row_linear, same

CPU_ROW_BYTES = 2048  # whole_attention on CPU takes rows up to this long in blocks of heads
BLOCK_BYTES = 2**20  # of scores in such a block
SPAN = 8  # bytes that say which keys a query sees
DRAWN = 3  # 64-bit numbers of each probability at once, while its mask is hashed


def attention(kit: Kit, x: Value) -> Value:
    """The attention part of a block."""
    tape, t, hidden = kit.tape, kit.t, kit.t.hidden
    qkv = column_linear(kit, x, (t.queries + t.keys, hidden))
    if kit.work.recompute == "selective":
        mixed = tape.again(lambda x: _mix(kit, x), qkv)
    else:
        mixed = _mix(kit, qkv)
    tape.free(qkv)
    y = row_linear(kit, mixed, (hidden, t.queries))
    tape.free(mixed)
    return y


class Heads:
    """Bytes of queries Q, of keys or values K, of a log-sum-exp, and of scores in float32."""

    def __init__(self, kit: Kit, size: int) -> None:
        t, m = kit.t, kit.work.model
        self.size = size
        self.q, self.k = t.tokens * t.queries * size, t.tokens * t.keys / 2 * size
        self.lse = t.tokens * t.heads * t.wide
        self.scores = t.tokens * t.heads * kit.work.seq_len
        self.grouped = m.num_kv_heads != m.num_heads


def _mix(kit: Kit, qkv: Value) -> Value:
    tape, m, heads = kit.tape, kit.work.model, Heads(kit, kit.t.size)

    def joined(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(qkv.size)]

    q, k, v = tape.op([qkv], [qkv, qkv, qkv], joined)
    if heads.grouped and m.num_kv_heads > kit.work.layout.tp:
        q = _replaced(kit, q, _copied(kit, q, heads.q))
    if m.position == "rope":
        q, k = _turned(kit, q, k, heads)
    if m.attention_dropout:
        y = _dropped(kit, (q, k, v), heads)
    elif kit.work.layout.cp == 1:
        y = _whole(kit, (q, k, v), heads)
    else:
        ways = {"ring": _ring, "all_gather": _gathered, "a2a": _by_heads}
        y = ways[kit.work.cp_mode](kit, (q, k, v), heads)
    tape.free(q, k, v)
    return y


QKV = tuple[Value, Value, Value]


def _replaced(kit: Kit, old: Value, new: Value) -> Value:
    kit.tape.free(old)
    return new


def _copied(kit: Kit, x: Value, size: float) -> Value:
    return kit.tape.op([x], [size], lambda tape, grads: [same(grads[0])])[0]


def _turned(kit: Kit, q: Value, k: Value, heads: Heads) -> tuple[Value, Value]:
    """Rotated queries and keys: by one kernel, or on CPU op by op."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(heads.q), tape.new(heads.k)]

    if not kit.cpu:
        turned = kit.tape.op([q, k], [heads.q, heads.k], back)
        kit.tape.free(q, k)
        return turned[0], turned[1]
    found = []
    for x, size in ((q, heads.q), (k, heads.k)):
        found.append(moved(kit, x, size, size, 2.5 * size))
    kit.tape.free(q, k)
    return found[0], found[1]


def _whole(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Attention of whole rows, by the kernel that is chosen for them."""
    if not kit.slow:
        return _fitting(kit, qkv, heads)
    wide = Heads(kit, 4)
    sizes = ((heads.q, wide.q), (heads.k, wide.k), (heads.k, wide.k))
    q, k, v = (moved(kit, x, to, of) for x, (of, to) in zip(qkv, sizes, strict=True))
    mixed = _fitting(kit, (q, k, v), wide)
    kit.tape.free(q, k, v)
    return _replaced(kit, mixed, resized(kit, mixed, heads.q))


def _fitting(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    if kit.cpu and kit.work.seq_len * heads.size <= CPU_ROW_BYTES:
        return _in_blocks(kit, qkv, heads)
    if not kit.cpu and kit.work.document_mask:
        places = kit.work.micro_batch_size * kit.work.seq_len
        return _fused(kit, qkv, heads, heads.k, SPAN * places)
    if not kit.cpu and (heads.size > 4 or (heads.grouped and heads.size == 4)):
        return _plain(kit, qkv, heads)
    return _fused(kit, qkv, heads, heads.k)


def _fused(kit: Kit, qkv: QKV, heads: Heads, keys: float, spans: float = 0.0) -> Value:
    """A kernel that keeps the log-sum-exp in place of the scores; `keys` bytes of keys, of which
    each query sees a span."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(heads.q), tape.new(keys), tape.new(keys)]

    return kit.tape.op(qkv, [heads.q], back, kept=qkv, keeps_results=[0], more=heads.lse + spans)[0]


def _in_blocks(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Some heads at a time on CPU; of several sequences by head, and the output again by token."""
    copies = kit.work.micro_batch_size > 1 or kit.work.layout.cp > 1
    kept = () if copies else qkv[: 1 if heads.grouped else 3]
    more = (3 if copies else 2 * heads.grouped) * heads.q
    forward, backward = _blocks(kit, heads, kit.work.seq_len)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        laid = [tape.new(heads.q)] if copies else []
        found = [tape.new(heads.q) for _ in qkv]
        tape.moment(max(heads.q, backward))
        tape.free(*laid)
        if heads.grouped:
            summed = [tape.new(heads.k), tape.new(heads.k)]
            tape.free(*found[1:])
            found[1:] = summed
        return found

    kit.tape.moment(heads.q + forward)
    mixed = kit.tape.op(qkv, [heads.q], back, kept=kept, keeps_results=[0], more=more)[0]
    return _replaced(kit, mixed, _copied(kit, mixed, heads.q)) if copies else mixed


def _blocks(kit: Kit, heads: Heads, rows: int) -> tuple[float, float]:
    """Bytes at once of blocks of heads' scores [rows, rows], on the way there and back."""
    one, scores = rows**2 * heads.size, kit.t.tokens * kit.t.heads * rows * heads.size
    block, unseen = min(scores, max(BLOCK_BYTES // one, 1) * one), one * kit.work.model.causal
    # Going back, a block's probabilities and their gradient are there when the next one's are made.
    return unseen + max(block, unseen), unseen + (2 if block == scores else 3) * block


def _plain(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Products that write their scores: scaled queries and keys, values and probabilities stay."""
    tape, (q, *kv) = kit.tape, qkv
    times = kit.work.layout.cp if kit.work.cp_mode == "all_gather" else 1
    scaled = moved(kit, q, heads.q, heads.q)
    k, v = (moved(kit, x, times * heads.q, times * heads.k) for x in kv)
    scores = _product(kit, (scaled, k), heads.scores * heads.size)
    tape.free(scaled, k)
    chances = _softmax(kit, scores, heads.scores)
    tape.free(scores)
    mixed = _product(kit, (chances, v), heads.q)
    tape.free(chances, v)
    return _replaced(kit, mixed, _copied(kit, mixed, heads.q))


def _dropped(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Probabilities, of which a mask leaves some; each head has all keys and values."""
    tape, (q, *kv), size = kit.tape, qkv, kit.t.size
    whole = kit.work.layout.cp * heads.q
    k, v = (_per_head(kit, x, heads, whole) for x in kv)
    scaled = moved(kit, q, heads.q, heads.q, heads.q)
    scores = _product(kit, (scaled, k), heads.scores * size)
    tape.free(scaled, k)
    chances = _softmax(kit, scores, heads.scores)
    tape.free(scores)
    tape.moment(DRAWN * 8 * heads.scores)

    def masked(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(chances.size)]

    left = tape.op([chances], [chances.size], masked, more=chances.size)[0]
    mixed = _product(kit, (left, v), heads.q)
    tape.free(chances, left, v)
    return _replaced(kit, mixed, _copied(kit, mixed, heads.q))


def _per_head(kit: Kit, x: Value, heads: Heads, size: float) -> Value:
    if kit.work.layout.cp == 1:
        return moved(kit, x, size, heads.k)
    gathered = _in_order(kit, x, heads)
    return _replaced(kit, gathered, moved(kit, gathered, size, gathered.size))


def _softmax(kit: Kit, scores: Value, numel: float) -> Value:
    """Probabilities, of which a wide copy is kept on CPU."""
    wide = numel * kit.t.wide

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(wide if kit.cpu else scores.size)]

    if not kit.cpu:
        return kit.tape.op([scores], [scores.size], back, keeps_results=[0])[0]
    filled = moved(kit, scores, wide, scores.size, wide)
    chances = kit.tape.op([filled], [wide], back, keeps_results=[0])[0]
    kit.tape.free(filled)
    if kit.work.model.causal or kit.work.document_mask:  # what sees nothing gets zeros
        chances = _replaced(kit, chances, moved(kit, chances, wide, wide))
    return (
        chances
        if wide == scores.size
        else _replaced(kit, chances, resized(kit, chances, scores.size))
    )


def _product(kit: Kit, factors: tuple[Value, Value], size: float) -> Value:
    """A batched product, which on CPU is made in float32 of float16."""
    if kit.slow:
        first, second = (moved(kit, x, 2 * x.size, x.size) for x in factors)
        factors = first, second
    first, second = factors

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(first.size), tape.new(second.size)]

    out = kit.tape.op(factors, [(1 + kit.slow) * size], back, kept=factors)[0]
    if not kit.slow:
        return out
    kit.tape.free(*factors)
    return _replaced(kit, out, resized(kit, out, size))


def _ring(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Keys and values go round; sums over the ring are in float32."""
    tape, (q, k, v), wide = kit.tape, qkv, kit.t.wide / kit.t.size
    both, rows, in_blocks = 2 * heads.k, kit.work.seq_len // kit.work.layout.cp, 0.0
    if kit.cpu and heads.size >= 4 and rows * heads.size <= CPU_ROW_BYTES:
        copies = (kit.work.micro_batch_size > 1) + 2 * heads.grouped  # of queries; keys and values
        in_blocks = (copies + 3) * heads.q + _blocks(kit, heads, rows)[1]

    def apart(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [same(grads[0]), same(grads[0])]

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        grad, sums = tape.new(heads.q), (tape.new(wide * heads.q), tape.new(wide * both))
        tape.moment(2 * both + heads.q + 2 * both)
        tape.moment(both + in_blocks)
        tape.moment(2 * both + wide * both)
        found = [tape.new(heads.q), tape.new(both)]
        tape.free(grad, *sums)
        return found

    kv = tape.op([k, v], [both], apart)[0]
    tape.moment(2 * both + (wide + 1) * heads.q)
    taken = [q, kv]
    mixed = tape.op(taken, [heads.q], back, kept=taken, keeps_results=[0], more=heads.lse)[0]
    tape.free(kv)
    return _replaced(kit, mixed, _copied(kit, mixed, heads.q))


def _gathered(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Every rank's keys and values, gathered and put in order."""
    tape, cp = kit.tape, kit.work.layout.cp
    q, *kv = qkv
    k, v = (_in_order(kit, x, heads) for x in kv)
    if heads.size > 4 and not kit.cpu:
        mixed = _plain(kit, (q, k, v), heads)
    else:
        spans = SPAN * kit.t.tokens * (not kit.cpu)
        mixed = _fused(kit, (q, k, v), heads, cp * heads.k, spans)
    tape.free(k, v)
    return mixed


def _in_order(kit: Kit, x: Value, heads: Heads) -> Value:
    """Keys or values of every rank, gathered and then indexed by position."""
    own, size = moved(kit, x, heads.k, heads.k), kit.work.layout.cp * heads.k
    parts = moved(kit, own, size, heads.k)
    kit.tape.free(own)
    return _replaced(kit, parts, moved(kit, parts, size, size))


def _by_heads(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Whole sequences of some heads, exchanged on the way there and back."""
    tape = kit.tape
    sizes = (heads.q, heads.k, heads.k)
    q, k, v = (_exchanged(kit, x, size) for x, size in zip(qkv, sizes, strict=True))
    mixed = _whole(kit, (q, k, v), heads)
    tape.free(q, k, v)
    return _replaced(kit, mixed, _exchanged(kit, mixed, heads.q))


def _exchanged(kit: Kit, x: Value, size: float) -> Value:
    return moved(kit, x, size, size, size)
