"""Text to requests, with lm-eval's conventions, so that the numbers are lm-eval's numbers.

Which token stands before an empty context (the prefix), whether a text starts with it, and where a
context ends and its continuation begins: lm-eval's Hugging Face backend decides, and so do we.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtcli.core.evaluate.requests import Ids, Request, request


@dataclass(frozen=True)
class Encoder:
    """A tokenizer as evaluation needs it.

    GPT-2: the prefix is <|endoftext|> and texts do not start with it. Llama: the prefix is <s> and
    every text starts with it.
    """

    encode: Callable[[str], Sequence[int]]  # no special tokens added
    prefix_id: int  # beginning of sequence where the tokenizer has one, else end of text
    prefix_text: str = ""  # what prefix_id decodes to
    starts_with_prefix: bool = False  # whether the tokenizer puts prefix_id before every text

    def plain(self, text: str) -> Ids:
        """The ids of `text` [n] with nothing added."""
        return np.array(self.encode(text), np.int64)

    def text(self, text: str) -> list[int]:
        """The ids of `text` as the tokenizer gives them by default, prefix included if it adds one.

        A text that spells out the prefix does not get it twice.
        """
        spelled = bool(self.prefix_text) and text.startswith(self.prefix_text)
        before = [self.prefix_id] if self.starts_with_prefix and not spelled else []
        return before + list(self.encode(text))

    def requests(self, context: str, continuations: Sequence[str]) -> list[Request]:
        """One request per continuation of one context.

        Trailing spaces of the context go to the continuation; the boundary is where the context
        alone ends, in tokens. After an empty context comes the prefix token, once.
        """
        stripped = context.rstrip()
        if not stripped:
            return [self._alone(context + continuation) for continuation in continuations]
        spaces, head = context[len(stripped) :], self.text(stripped)
        wholes = [self.text(stripped + spaces + continuation) for continuation in continuations]
        return [request(head, whole[len(head) :]) for whole in wholes]

    def _alone(self, continuation: str) -> Request:
        ids = list(self.encode(continuation))
        if ids and ids[0] == self.prefix_id:
            return request(ids[:1], ids[1:])
        return request([self.prefix_id], ids)
