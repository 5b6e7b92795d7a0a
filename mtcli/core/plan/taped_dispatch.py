"""The way of tokens to their experts and back on a tape, by either dispatcher."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mtcli.core.plan.shapes import INDEX
from mtcli.core.plan.tape import Gradients, Storage, Tape, Value
from mtcli.core.plan.taped_ops import Kit, moved, then

Experts = Callable[[Kit, Value], Value]


class Routed(NamedTuple):
    """Bytes of tokens, of the copies of them that are kept, and of the rows that these lie in, more
    where experts are padded; how many copies there are, and how many places for copies."""

    tokens: float
    copies: float
    rows: float
    num_copies: float
    num_places: float
    padding: float  # bytes of copies that are put into rows of zeros, or 0

    @classmethod
    def of(cls, kit: Kit, ranks: int, copies: float, rows: float) -> "Routed":
        """The tokens of so many ranks, some copies and rows of which are here."""
        m, row, tokens = kit.work.model, kit.t.hidden * kit.t.size, ranks * kit.t.rows
        padding = copies * row * m.pad_to_capacity
        return cls(tokens * row, copies * row, rows * row, copies, tokens * m.top_k, padding)


def dispatched(kit: Kit, x: Value, weights: Value, experts: Experts) -> Value:
    """The experts' results summed by token."""
    ways = {"all_to_all": _to_each, "all_gather": _to_all}
    return ways[kit.work.dispatcher](kit, x, weights, experts)


def _to_each(kit: Kit, x: Value, weights: Value, experts: Experts) -> Value:
    """Copies of tokens go to their experts' ranks and are put together by expert there."""
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
    results = experts(kit, rows)
    if travels:
        results = then(kit, results, _reordered(kit, results, back))
    if layout.etp > 1:
        results = then(kit, results, moved(kit, results, received, here, here))
    if layout.ep > 1:
        results = then(kit, results, moved(kit, results, sent, received))
    y = _summed(kit, results, weights, mine)
    tape.free(results, rows, order, back)
    return y


def _to_all(kit: Kit, x: Value, weights: Value, experts: Experts) -> Value:
    """Every rank of an expert group sees all its tokens."""
    tape, work = kit.tape, kit.work
    ranks = work.layout.ep * work.layout.etp
    everyone = Routed.of(kit, ranks, work.expert_copies, work.expert_rows)
    gathered = moved(kit, x, ranks * x.size, x.size) if ranks > 1 else x
    rows = _spread(kit, gathered, everyone)
    results = then(kit, rows, experts(kit, rows))
    whole = _summed(kit, results, weights, everyone)
    if ranks == 1:
        tape.free(results)
        return whole
    y = moved(kit, whole, x.size, whole.size)
    tape.free(whole, results, gathered)
    return y


def _reordered(kit: Kit, rows: Value, order: Value) -> Value:
    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(rows.size)]

    return kit.tape.op([rows], [rows.size], back, kept=[order])[0]


def _spread(kit: Kit, x: Value, routed: Routed) -> Value:
    """Copies of tokens, sorted by expert; torch makes them first, and then pads them."""
    besides = kit.by_torch * routed.padding
    indices = routed.num_copies * (1 + (besides > 0)) if kit.by_torch else routed.num_places

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        tape.moment(besides + x.size)
        return [tape.new(x.size)]

    kit.tape.moment(besides + routed.rows)
    return kit.tape.op([x], [routed.rows], back, more=indices * INDEX)[0]


def _summed(kit: Kit, rows: Value, weights: Value, routed: Routed) -> Value:
    """Rows times their weights, summed by token."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(rows.size), tape.new(weights.size)]

    if not kit.by_torch:
        return kit.tape.op([rows, weights], [routed.tokens], back, kept=[rows])[0]

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
    kept = indices * INDEX + routed.num_copies * kit.t.size  # and weights
    return kit.tape.op([rows, weights], [routed.tokens], by_torch, kept=[rows], more=kept)[0]
