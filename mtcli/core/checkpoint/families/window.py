"""Sliding windows: fine where they are no shorter than the context, and refused elsewhere."""

from mtcli.core.checkpoint.families.family import Table
from mtcli.core.checkpoint.families.rope import read_rope
from mtcli.core.spec.errors import wrong
from mtcli.core.spec.foreign import shown


def read_windowed(theirs: Table) -> Table:
    """Rotary positions; raises MtcliError where a sliding window is shorter than the context."""
    window, context = theirs.get("sliding_window"), theirs.get("max_position_embeddings")
    if window is not None and not isinstance(window, int):
        raise wrong(f"sliding_window={shown(window)} is not a whole number", "null, or a number")
    if window and isinstance(context, int) and window < context:
        message = f"sliding_window={window} is shorter than max_position_embeddings={context}"
        hint = f"set sliding_window to null, or max_position_embeddings to {window}, in config.json"
        raise wrong(message, hint)
    return read_rope(theirs)
