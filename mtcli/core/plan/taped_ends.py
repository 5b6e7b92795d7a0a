"""A model's ends on a tape: the embedding, and the head with its loss."""

from collections.abc import Callable, Sequence

from mtcli.core.plan.shapes import INDEX, chunk_rows, logits_bytes
from mtcli.core.plan.tape import Gradients, Storage, Tape, Value, leaf
from mtcli.core.plan.taped_layers import dropout, norm
from mtcli.core.plan.taped_ops import ENDS, Kit, add, enter, leave, linear, same, then

TORCH_LOSS_BYTES = 2**20  # logits that torch's functions take at once


def embedded(kit: Kit, weight: Value) -> Value:
    """The embedding's rows, with positions and dropout."""
    tape, t, m = kit.tape, kit.t, kit.work.model
    whole, table = t.tokens * t.hidden * t.size, logits_bytes(kit.work) / t.tokens * t.hidden

    def of_table(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        return [tape.new(table)]

    rows = tape.op([weight], [whole], of_table, more=t.tokens * INDEX)[0]
    masked = tape.op([rows], [whole], lambda tape, grads: [tape.new(whole)], more=t.tokens)[0]
    tape.free(rows)
    x = leave(kit, masked)
    tape.free(masked)
    if m.position == "learned":
        places = m.max_seq_len * t.hidden * t.size

        def of_places(tape: Tape, grads: Sequence[Storage]) -> Gradients:
            return [tape.new(places)]

        row = tape.op([leaf(m.max_seq_len)], [t.stream], of_places, more=t.rows * INDEX)[0]
        both = add(kit, x, row)
        tape.free(x, row)
        x = both
    if m.dropout:
        dropped = dropout(kit, x, None)
        tape.free(x)
        x = dropped
    return x


def head(kit: Kit, x: Value, weight: Value) -> Value:
    """The last norm, to which x is given up, and the loss. zero=3 reduces the table's gradient when
    the loss' is made."""
    tape, gathering = kit.tape, kit.gathering
    normed = out_of_stage(kit, then(kit, x, norm(kit, x)))
    if gathering is not None:
        table = logits_bytes(kit.work) / kit.t.tokens * kit.t.hidden
        table *= weight.made_by is None  # a tied one waits for the embedding's
        wide = table / kit.t.size * kit.t.wide
        normed = _marked(kit, normed, lambda: gathering.reduced(kit.groups[ENDS], wide, table))
    gathered = enter(kit, normed)
    loss = (_loss_by_torch if kit.by_torch else _loss_in_chunks)(kit, gathered, weight)
    tape.free(gathered, normed)
    return loss if gathering is None else _marked(kit, loss, lambda: tape.waiting.append([]))


def out_of_stage(kit: Kit, y: Value) -> Value:
    """A stage's result; under zero=3 its last gathered weights go, and come for the backward."""
    gathering = kit.gathering
    if gathering is None:
        return y
    gathering.settle()
    return _marked(kit, y, lambda: gathering.backward(kit.groups[ENDS]))


def _marked(kit: Kit, x: Value, event: Callable[[], None]) -> Value:
    """x, on whose way back something happens."""

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        event()
        return [same(grads[0])]

    value = kit.tape.op([x], [x], back)[0]
    kit.tape.free(x)
    return value


def _loss_in_chunks(kit: Kit, x: Value, weight: Value) -> Value:
    """The forward makes the gradients of x and of the table, from a chunk of logits at a time."""
    tape, t, part = kit.tape, kit.t, chunk_rows(kit.work) / kit.work.tokens
    logits, several = logits_bytes(kit.work), part < 1
    table = logits / t.tokens * t.hidden
    summed = table / t.size * t.wide if several else table

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        of_x = tape.new(x.size)
        scaled = tape.new(summed)
        if summed == table:
            return [of_x, scaled]
        found = tape.new(table)
        tape.free(scaled)
        return [of_x, found]

    of_x = tape.new(x.size)
    made = [tape.new(summed)] if several else []
    tape.moment(part * logits + max(part * x.size, 0.0 if several else table))
    tape.free(of_x, *made)
    return tape.op([x, weight], [0.0], back, more=x.size + summed)[0]


def _loss_by_torch(kit: Kit, x: Value, weight: Value) -> Value:
    """Exponentials in the place of the logits, and then their gradient."""
    tape, t, columns = kit.tape, kit.t, logits_bytes(kit.work) / kit.t.tokens / kit.t.size
    logits = linear(kit, x, (columns, t.hidden), weight=weight, plain=True)
    copy = 0.0 if t.size >= 4 else min(logits.size, 2 * TORCH_LOSS_BYTES) / t.size * t.wide
    kept = t.tokens * (INDEX + 1 + 2 * t.wide)
    tape.moment(kept + copy)

    def back(tape: Tape, grads: Sequence[Storage]) -> Gradients:
        logits.storage.holders += 1
        return [logits.storage]

    loss = tape.op([logits], [0.0], back, kept=[logits], more=kept)[0]
    tape.free(logits)
    return loss


def vocabulary_table(kit: Kit, both: bool) -> Value:
    """The vocabulary's table: of both ends, where they share one, whose gradients are summed."""
    table = logits_bytes(kit.work) / kit.t.tokens * kit.t.hidden
    weight = leaf(table / kit.t.hidden / kit.t.size)
    if not (both and kit.work.model.tie_embeddings):
        return weight
    return kit.tape.op([weight], [0.0], lambda tape, grads: [same(grads[0])])[0]
