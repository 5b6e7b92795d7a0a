"""Finds the text model in the folder of one that also reads images: Gemma 3 and Mistral Small 3.1.

config.json holds the text model's fields in `text_config`. Its tensors are
`language_model.model.layers...` in published folders, `model.language_model.layers...` in
transformers' memory since 4.52, and `lm_head.weight` or `language_model.lm_head.weight`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from mtcli.core.checkpoint.huggingface.family import Table
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import shown

Source = TypeVar("Source")

TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral"}  # by the model_type of all of it
TEXT = "text_config"
# Fields of config.json that are the text model's too; those inside text_config have no effect.
OUTER: tuple[str, ...] = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
OUTER += ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\.)?")
_PART = re.compile(r"(?:model\.)?(vision_tower|multi_modal_projector)\.")


def text_of(table: Table, path: Path) -> Table:
    """Returns the text model's config.json; a table of text alone is returned as it is.

    Raises MtcliError where the text model is of another type than the family's.
    """
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        return table
    text, expected = table.get(TEXT), TEXT_MODELS[kind]
    if not isinstance(text, dict):
        message = f"{path}: {TEXT}={shown(text)} is not a table"
        raise wrong(message, "is it the config.json of the weights?")
    if text.get("model_type", expected) != expected:
        message = f"{path}: model_type={shown(text['model_type'])} in {TEXT} is not supported"
        raise wrong(message, f"{kind} is read with {expected}")
    shared = {name: table[name] for name in OUTER if table.get(name) is not None}
    return text | shared | {"model_type": expected}


def text_sources(sources: Mapping[str, Source]) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Returns the tensors that are not of a vision tower or its projector, with the names that a
    text model has; and the names of the parts left out."""
    texts, parts = dict[str, Source](), dict[str, None]()
    for name, source in sources.items():
        if part := _PART.match(name):
            parts[part[1]] = None
        else:
            texts[_TEXT.sub(lambda found: found[1] or "model.", name, count=1)] = source
    return texts, tuple(sorted(parts))
