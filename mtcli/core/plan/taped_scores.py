"""Scaled dot products on a tape: of whole rows, by the kernel that a device has for them."""

from collections.abc import Sequence
from itertools import chain

from mtcli.core.plan.tape import Gradients, Storage, Tape, Value
from mtcli.core.plan.taped_ops import (
    Kit,
    apart,
    joined,
    moved,
    resized,
    reused,
    same,
    then,
    while_made,
)

CPU_ROW_BYTES = 2048  # whole_attention on CPU takes rows up to this long in blocks of heads
BLOCK_BYTES = 2**20  # of scores in such a block
SPAN = 8  # bytes that say which keys a query sees

QKV = tuple[Value, Value, Value]


class Heads:
    """Bytes of queries q, of keys or values k and of a log-sum-exp, at `size` bytes an element; and
    how many scores there are. Of all rows, or of one of so many."""

    def __init__(self, kit: Kit, size: int, rows: int = 1) -> None:
        t, m, tokens = kit.t, kit.work.model, kit.t.tokens / rows
        self.size, self.rows = size, rows
        self.q, self.k = tokens * t.queries * size, tokens * t.keys / 2 * size
        self.lse = tokens * t.heads * t.wide
        self.scores = tokens * t.heads * kit.work.seq_len
        self.grouped = kit.work.kv_heads != m.num_heads


def copied(kit: Kit, x: Value, size: float) -> Value:
    """x laid out anew, whose gradient is handed on as it is."""
    return kit.tape.op([x], [size], lambda tape, grads: [same(grads[0])])[0]


def whole(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Attention of whole rows, by the kernel that is chosen for them; by torch's of a document."""
    work = kit.work
    if work.document_mask and kit.by_torch:
        return _by_document(kit, qkv, heads)
    if work.document_mask:
        return fused(kit, qkv, heads, heads.k, SPAN * work.micro_batch_size * work.seq_len)
    return _of_rows(kit, qkv, heads, copies=work.micro_batch_size > 1 or work.layout.cp > 1)


def _by_document(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Rows of a document each, one after another, of tokens that are laid out row by row."""
    work = kit.work
    rows, sizes = work.micro_batch_size, (heads.q, heads.k, heads.k)
    one = Heads(kit, heads.size, rows)
    if rows > 1 and work.layout.cp > 1:  # by heads, which are laid out one by one
        q, k, v = (copied(kit, x, size) for x, size in zip(qkv, sizes, strict=True))
    else:
        q, k, v = (reused(kit, x) for x in qkv)
    split = [apart(kit, x, rows, size) for x, size in zip((q, k, v), sizes, strict=True)]
    parts = [_of_rows(kit, row, one, copies=False) for row in zip(*split, strict=True)]
    mixed = joined(kit, parts, heads.q)
    kit.tape.free(q, k, v, *chain(*split), *parts)
    return mixed


def _of_rows(kit: Kit, qkv: QKV, heads: Heads, copies: bool) -> Value:
    """`copies` are of rows that do not lie in memory head by head."""
    if kit.cpu and kit.work.seq_len * made_in(kit, heads.size) <= CPU_ROW_BYTES:
        return _in_blocks(kit, qkv, heads, copies)
    if kit.slow:
        wide = Heads(kit, 4, heads.rows)
        sizes = ((heads.q, wide.q), (heads.k, wide.k), (heads.k, wide.k))
        q, k, v = (moved(kit, x, to, of) for x, (of, to) in zip(qkv, sizes, strict=True))
        mixed = fused(kit, (q, k, v), wide, wide.k)
        kit.tape.free(q, k, v)
        return then(kit, mixed, resized(kit, mixed, heads.q))
    if not kit.cpu and (heads.size > 4 or (heads.grouped and heads.size == 4)):
        return plain(kit, qkv, heads)
    return fused(kit, qkv, heads, heads.k)


def made_in(kit: Kit, size: float) -> float:
    """Bytes of an element of `size` where it is multiplied."""
    return 2 * size if kit.slow else size


def fused(kit: Kit, qkv: QKV, heads: Heads, keys: float, spans: float = 0.0) -> Value:
    """A kernel that keeps the log-sum-exp in place of the scores; `keys` bytes of keys, of which
    each query sees a span."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(heads.q), tape.new(keys), tape.new(keys)]

    return kit.tape.op(qkv, [heads.q], back, kept=qkv, keeps_results=[0], more=heads.lse + spans)[0]


def _in_blocks(kit: Kit, qkv: QKV, heads: Heads, copies: bool) -> Value:
    """Some heads at a time on CPU; of several sequences by head, and the output again by token."""
    kept = () if copies else qkv[: 1 if heads.grouped else 3]
    more = (3 if copies else 2 * heads.grouped) * heads.q
    forward, backward = blocks_bytes(kit, heads, kit.work.seq_len)

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
    mixed = kit.tape.op(qkv, [heads.q], back, kept=kept, keeps_results=[0], more=more)[0]
    return then(kit, mixed, copied(kit, mixed, heads.q)) if copies else mixed


def blocks_bytes(kit: Kit, heads: Heads, rows: int) -> tuple[float, float]:
    """Bytes at once of blocks of heads' scores [rows, rows], on the way there and back."""
    size = made_in(kit, heads.size)
    one, scores = rows**2 * size, heads.scores / kit.work.seq_len * rows * size
    block, unseen = min(scores, max(BLOCK_BYTES // one, 1) * one), one * kit.work.model.causal
    part = block / scores * heads.q / heads.size * size  # a block's queries
    there, back = (3, 5) if kit.slow else (0, 1)  # copies of them, and products
    # Going back, probabilities and their gradient are there.
    return unseen + max(block + there * part, unseen), unseen + 2 * block + back * part


def plain(kit: Kit, qkv: QKV, heads: Heads) -> Value:
    """Products that write their scores: scaled queries and keys, values and probabilities stay.
    A row's values are copied where they are of a group or of one row among others."""
    tape, (q, *kv) = kit.tape, qkv
    times = kit.work.layout.cp if kit.work.cp_mode == "all_gather" else 1
    scaled = moved(kit, q, heads.q, heads.q)
    several = heads.grouped or kit.work.micro_batch_size > heads.rows
    k = moved(kit, kv[0], times * heads.q, times * heads.k)
    v = moved(kit, kv[1], times * heads.q, times * heads.k) if several else reused(kit, kv[1])
    scores = product(kit, (scaled, k), heads.scores * heads.size)
    tape.free(scaled, k)
    chances = _softmax(kit, scores)
    tape.free(scores)
    mixed = product(kit, (chances, v), heads.q, seen=times * heads.q)
    tape.free(chances, v)
    return then(kit, mixed, copied(kit, mixed, heads.q))


def _softmax(kit: Kit, scores: Value, *kept: Value) -> Value:
    """Probabilities, which are kept beside what else is."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(scores.size)]

    return kit.tape.op([scores], [scores.size], back, kept=kept, keeps_results=[0])[0]


def masked_softmax(kit: Kit, scores: Value, numel: float) -> Value:
    """Probabilities of what is seen; by torch of wide copies, which are kept."""
    if not kit.by_torch:
        return _softmax(kit, scores)
    wide = numel * kit.t.wide
    unseen = Value(kit.tape.new(mask_numel(kit)))
    filled = moved(kit, scores, wide, scores.size, wide)
    chances = _softmax(kit, filled, unseen)
    kit.tape.free(filled, unseen)
    if unseen.size:  # what sees nothing gets zeros
        chances = then(kit, chances, moved(kit, chances, wide, wide))
    return (
        chances if wide == scores.size else then(kit, chances, resized(kit, chances, scores.size))
    )


def mask_numel(kit: Kit) -> float:
    """Elements of a mask of a row's queries and keys, of documents each row's, or none."""
    work = kit.work
    if not (work.model.causal or work.document_mask):
        return 0.0
    return kit.t.tokens * work.seq_len / (1 if work.document_mask else work.micro_batch_size)


def product(kit: Kit, factors: tuple[Value, Value], size: float, seen: float = 0.0) -> Value:
    """A batched product, which on CPU is made in float32 of float16; of the second factor's memory
    maybe `seen` bytes alone."""
    (first, second), copies = factors, 2 * kit.slow
    sizes = first.size, seen or second.size

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        found = []
        for mine, other in (sizes, sizes[::-1]):
            tape.moment(while_made(kit, copies * (size + other), mine))
            found.append(tape.new(mine))
        return found

    kit.tape.moment(while_made(kit, copies * sum(sizes), size))
    return kit.tape.op(factors, [size], back, kept=factors)[0]
