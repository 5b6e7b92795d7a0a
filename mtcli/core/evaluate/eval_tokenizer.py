"""Encodes text as requests, with the conventions of lm-eval's Hugging Face backend, for equal
results.

They define the token before an empty context (the prefix), whether a text starts with it, and where
a context ends and its continuation begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtcli.core.config.errors import wrong
from mtcli.core.data.tokenize import Tokenizer, configured_token
from mtcli.core.data.tokenizer_limits import no_panics
from mtcli.core.evaluate.loglikelihood import Ids, Request, request


@dataclass(frozen=True)
class EvalTokenizer:
    """A tokenizer with the conventions of evaluation.

    GPT-2: the prefix is <|endoftext|> and texts do not start with it. Llama: the prefix is <s> and
    every text starts with it.
    """

    encode: Callable[[str], Sequence[int]]  # no special tokens added
    prefix_id: int  # beginning of sequence where the tokenizer has one, else end of text
    prefix_text: str = ""  # what prefix_id decodes to
    starts_with_prefix: bool = False  # whether the tokenizer puts prefix_id before every text
    decode: Callable[[Sequence[int]], str] = str  # of generated text

    def plain(self, text: str) -> Ids:
        """Returns the ids of `text` [n] with nothing added."""
        return np.array(self.encode(text), np.int64)

    def text(self, text: str) -> list[int]:
        """Returns the ids of `text` as the tokenizer gives them by default, prefix included if it
        adds one.

        A text that spells out the prefix does not get it twice.
        """
        spelled = bool(self.prefix_text) and text.startswith(self.prefix_text)
        prefix = [self.prefix_id] if self.starts_with_prefix and not spelled else []
        return prefix + list(self.encode(text))

    def requests(self, context: str, continuations: Sequence[str]) -> list[Request]:
        """Builds one request per continuation of a context.

        Trailing spaces of the context move to the continuation, which begins at the number of
        tokens that the context alone has. After an empty context comes the prefix token, once.
        """
        stripped = context.rstrip()
        if not stripped:
            texts = [list(self.encode(context + continuation)) for continuation in continuations]
            prefix = [self.prefix_id]
            return [request(prefix, ids[1:] if ids[:1] == prefix else ids) for ids in texts]
        spaces, head = context[len(stripped) :], self.text(stripped)
        joined = [self.text(stripped + spaces + continuation) for continuation in continuations]
        return [request(head, ids[len(head) :]) for ids in joined]


def eval_tokenizer(tokenizer: Tokenizer) -> EvalTokenizer:
    """Wraps `tokenizer` as lm-eval's Hugging Face backend would.

    The prefix is the beginning-of-sequence token where there is one, else the end-of-document one.
    Raises MtcliError where the tokenizer has neither.
    """
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    with no_panics("the tokenizer's template fails"):
        added = tokenizer.backend.encode("", add_special_tokens=True).ids[:1]  # Llama's: <s>
    name = configured_token(tokenizer.config, "bos_token")
    prefix_id = None if name is None else vocab.get(name)
    if prefix_id is None:
        prefix_id = next(iter(added), tokenizer.eod_id)
    if prefix_id is None:
        message = f"the tokenizer has {len(vocab)} tokens, and none that begins or ends a text"
        hint = "name its eos_token or bos_token in tokenizer_config.json"
        raise wrong(message, hint, "--tokenizer")
    # Whether texts start with it is in tokenizer.json alone: transformers 5 heeds no add_bos_token.
    prefix, decode = tokenizer.decode([prefix_id]), tokenizer.decode
    return EvalTokenizer(tokenizer.encode, prefix_id, prefix, added == [prefix_id], decode)
