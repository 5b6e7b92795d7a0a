"""Adds tokens to a tokenizer, which finds them in any text; their ids follow its own, in order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import shown
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer

FIELD = "train.new_tokens"
CONFIGURED = "added_tokens_decoder"  # of tokenizer_config.json: added tokens by id
# As Qwen3's <tool_call>: found ahead of any normaliser, and shown where special tokens are not.
KIND = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
KIND |= {"special": False}


def with_new_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokenizer:
    """Returns the tokenizer with a new token for each text: the ids of transformers' `add_tokens`.

    Raises MtcliError with the texts that are tokens already, and where ids would have gaps.
    """
    vocab, first = tokenizer.backend.get_vocab(with_added_tokens=True), tokenizer.vocab_size
    if repeated := [f"{shown(text)} (id {vocab[text]})" for text in texts if text in vocab]:
        message = f"the tokenizer of {first:,} ids has {', '.join(repeated)} already"
        had = [shown(text) for text in texts if text in vocab]
        raise wrong(message, f"leave {', '.join(had)} out of {FIELD}", FIELD)
    table: dict[str, Any] = json.loads(tokenizer.definition)
    entries = {first + i: {"content": text} | KIND for i, text in enumerate(texts)}
    added = [{"id": token} | entry for token, entry in entries.items()]
    table["added_tokens"] = [*(table.get("added_tokens") or []), *added]
    config = dict(tokenizer.config)
    if isinstance(config.get(CONFIGURED), dict):
        by_id = {str(token): entry for token, entry in entries.items()}
        config[CONFIGURED] = {**config[CONFIGURED], **by_id}  # type: ignore[dict-item]
    extended = Tokenizer(json.dumps(table, ensure_ascii=False), config)
    ids = [extended.backend.token_to_id(text) for text in texts]
    if ids != list(entries):
        message = f"the tokenizer has ids up to {first - 1} with gaps, and would give new tokens "
        raise wrong(f"{message}the ids {ids}", "use a tokenizer without gaps", FIELD)
    return extended


def extended_size(folder: Path, texts: Sequence[str]) -> int:
    """Returns the number of ids of a folder's tokenizer with new tokens."""
    return with_new_tokens(load_tokenizer(folder), texts).vocab_size
