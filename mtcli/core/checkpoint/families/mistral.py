"""Mistral: Llama with a window that may limit how far a token sees."""

from dataclasses import replace

from mtcli.core.checkpoint.families.family import Table
from mtcli.core.checkpoint.families.llama import LLAMA
from mtcli.core.checkpoint.families.rope import read_rope, write_rope
from mtcli.core.spec.errors import wrong
from mtcli.core.spec.model_config import ModelConfig

WINDOW = 4096  # where config.json does not say


def read_windowed(theirs: Table) -> Table:
    """Rotary positions; raises MtcliError where a sliding window is shorter than the context."""
    window, context = theirs.get("sliding_window"), theirs.get("max_position_embeddings")
    if window and isinstance(window, int) and isinstance(context, int) and window < context:
        message = f"sliding_window={window} is shorter than max_position_embeddings={context}"
        hint = f"set sliding_window to null, or max_position_embeddings to {window}, in config.json"
        raise wrong(message, hint)
    return read_rope(theirs)


def write_windowless(model: ModelConfig) -> Table:
    """Rotary positions, and no sliding window."""
    return write_rope(model) | {"sliding_window": None}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    demands=(),
    read_more=lambda theirs: read_windowed({"sliding_window": WINDOW} | theirs),
    write_more=write_windowless,
)
