"""Finds a tokenizer's special tokens and the tokens that begin words."""

import json
from typing import NamedTuple

import numpy as np

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.data.tokenize import Tokenizer, configured_token

# By tokenizer_config.json's names, and what families call them where it does not say.
ROLES = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
}
UNKNOWN = ("[UNK]", "<unk>")
CONTINUES = "##"  # a WordPiece that does not begin a word
BEGINS = ("\u0120", "\u2581")  # byte-level BPE's and SentencePiece's mark of a word's beginning


class SpecialTokens(NamedTuple):
    """The ids of special tokens, and two masks over the vocabulary [V]."""

    cls: int
    sep: int
    mask: int
    pad: int
    is_plain: np.ndarray  # bool [V]: no special token, so that it may be masked or drawn at random
    begins_word: np.ndarray  # bool [V]

    @property
    def plain(self) -> np.ndarray:
        """The ids that are not special tokens, int64."""
        return np.flatnonzero(self.is_plain)


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Finds a tokenizer's special tokens. Raises MtcliError with all missing ones."""
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    ids, problems = {}, []
    for role, usual in ROLES.items():
        name = configured_token(tokenizer.config, role)
        names = usual if name is None else (name, *usual)
        candidates = [vocab[name] for name in names if name in vocab]
        if not candidates:
            problems.append(Problem(f"the tokenizer has no {role} ({' or '.join(names)})"))
        ids[role.removesuffix("_token")] = candidates[0] if candidates else -1
    if problems:
        hint = "take a tokenizer of BERT's kind, such as `mtcli preprocess --sentences --tokenizer "
        raise MtcliError(*problems, hint=hint + "train:8192` trains")
    is_plain = np.ones(tokenizer.vocab_size, bool)
    added = tokenizer.backend.get_added_tokens_decoder()
    is_plain[[id for id, token in added.items() if token.special]] = False
    is_plain[[*ids.values(), *(vocab[name] for name in UNKNOWN if name in vocab)]] = False
    return SpecialTokens(**ids, is_plain=is_plain, begins_word=_word_beginnings(tokenizer, vocab))


def _word_beginnings(tokenizer: Tokenizer, vocab: dict[str, int]) -> np.ndarray:
    """Marks the ids that begin a word: bool [V]; all of them in a vocabulary without marks."""
    kind = json.loads(tokenizer.definition).get("model", {}).get("type")
    marked = any(token.startswith(BEGINS) for token in vocab)
    begins = np.ones(tokenizer.vocab_size, bool)
    for token, id in vocab.items():
        if kind == "WordPiece":
            begins[id] = not token.startswith(CONTINUES)
        elif marked:
            begins[id] = token.startswith(BEGINS)
    return begins
