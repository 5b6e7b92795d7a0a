"""Text to token arrays, as fast as can be proven right."""

import json
from collections.abc import Callable, Sequence

import numpy as np

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.data.tokenizer_limits import no_panics

SAMPLE_BYTES = 1 << 14  # of the corpus, encoded both ways before gigatoken is used
# What fast tokenizers get wrong: space runs, contractions, digits, scripts, emoji, controls.
HARD_TEXTS = (
    "I'll don't WE'VE it's 's 'S 12345 1,234.5 3\u00bd\n\n\n  x \t y  \r\n\r\n z \u00a0\u2003w",
    "na\u00efve \u00dcn\u00efcode \ufb01 \u2460\u2461 \u2167 e\u0301 \u200b\ufeff\x00\x1f \ud55c",
    "\u4e2d\u6587\u5b57\uff0c\u65e5\u672c\u8a9e \u0627\u0644\u0639\u0631 \u0939\u093f\u0928\u094d",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U00010348\U0001d4d0",
    '    def f(x):\n\t\treturn x**2  # ==> {"a": [1, 2]} <|x|> http://a.b/c?d=e_f&g \\ ---- ____',
    "",
    " ",
    "\n \n",
)

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def make_encode(tokenizer: Tokenizer, sample: str) -> tuple[str, Encode]:
    """The fastest encoder whose ids are `tokenizers`' own, and its name.

    gigatoken (Rust, optional) is 30 to 60 times as fast, and is taken only after it gave the same
    ids for `sample` and for texts that are hard to cut.
    """
    if tokenizer.is_bytes:
        return "bytes", _encode_bytes
    fast = _gigatoken(tokenizer)
    if fast is not None:
        texts = [sample[:SAMPLE_BYTES], *HARD_TEXTS, *_specials(tokenizer)]
        if _agree(fast, tokenizer, texts):
            return "gigatoken", fast
    return "tokenizers", _Backend(tokenizer)


def _agree(fast: Encode, tokenizer: Tokenizer, texts: list[str]) -> bool:
    try:
        pairs = zip(fast(texts), tokenizer.encode_all(texts), strict=True)
        return all(np.array_equal(one, other) for one, other in pairs)
    except MtcliError:  # a text that either fails on
        return False


def is_cuttable(tokenizer: Tokenizer) -> bool:
    """Whether long texts may be encoded in parts (`documents._safe_cut`) with the same ids."""
    if tokenizer.is_bytes:
        return True
    backend = tokenizer.backend
    if backend.normalizer is not None or backend.pre_tokenizer is None:
        return False
    words = json.loads(backend.pre_tokenizer.__getstate__())
    return (
        words["type"] == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space")
        and not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content))
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class _Backend:
    """`tokenizers`, in this process alone: the workers are the parallelism."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int64) for ids in self.tokenizer.encode_all(texts)]


class _Gigatoken:
    """gigatoken, text by text: its batches cost an import of 0.3 s and are no faster."""

    def __init__(self, definition: str) -> None:
        from gigatoken import Tokenizer as Fast

        self.definition = definition
        with no_panics("gigatoken does not know the tokenizer"):
            self.backend = Fast.from_json(definition).backend

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        with no_panics("the tokenizer fails on a text"):
            return [self.backend.encode(text) for text in texts]

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return _Gigatoken, (self.definition,)


def _gigatoken(tokenizer: Tokenizer) -> Encode | None:
    try:
        return _Gigatoken(tokenizer.definition)
    except ModuleNotFoundError:  # an optional extra
        return None
    except MtcliError:  # a kind of tokenizer that it does not know
        return None


def _specials(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return [f"a{token.content} b {token.content}\n" for token in added]
