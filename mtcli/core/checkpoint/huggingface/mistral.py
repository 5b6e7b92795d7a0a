"""Mistral: Llama with a window that may limit how far a token sees."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Table
from mtcli.core.checkpoint.huggingface.llama import LLAMA
from mtcli.core.checkpoint.huggingface.rope import read_windowed, write_rope
from mtcli.core.config.model import ModelConfig

WINDOW = 4096  # where config.json does not say


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
