"""Opens tokens as `mtcli preprocess` writes them, memory-mapped, a document at a time."""

from collections.abc import Sequence
from os import PathLike
from typing import overload

import numpy as np

from mtcli.core.config.arguments import path, whole
from mtcli.core.config.errors import wrong
from mtcli.core.data.indexed import Indexed, tokenizer_folder
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer
from mtcli.core.library.argument_names import naming_arguments


class TokenData(Sequence[np.ndarray]):
    """The documents of a dataset: `data[i]` is the tokens [length] of one, a view of the file."""

    def __init__(self, prefix: str | PathLike[str]) -> None:
        """Raises MtcliError for a missing file, and for an index that does not describe it."""
        with naming_arguments("prefix"):
            self._indexed = Indexed(path("prefix", prefix, "data/a"))

    def __repr__(self) -> str:
        counts = f"{len(self):,} documents, {len(self.tokens):,} tokens"
        return f"<TokenData {self._indexed.prefix}: {counts}>"

    def __len__(self) -> int:
        return len(self._indexed.documents) - 1

    @overload
    def __getitem__(self, document: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, document: slice) -> list[np.ndarray]: ...
    def __getitem__(self, document: int | slice) -> np.ndarray | list[np.ndarray]:
        numbers = range(len(self))[document]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        first, end = (int(bound) for bound in self._indexed.documents[numbers : numbers + 2])
        count = self._indexed.tokens_of(range(first, end))
        at = int(self._indexed.pointers[first]) // self.dtype.itemsize if count else 0
        return self.tokens[at : at + count]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of all documents back to back [num_tokens], memory-mapped."""
        return self._indexed.tokens

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a token in the file: uint16 below 65,500 ids, else int32."""
        return self._indexed.dtype

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the tokens. Raises MtcliError where it is not beside them."""
        folder = tokenizer_folder(self._indexed.prefix)
        if folder is None:
            name = f"{self._indexed.prefix}.tokenizer"
            raise wrong(f"there is no {name}", "preprocess writes it beside the tokens")
        return load_tokenizer(folder)

    def text(self, document: int) -> str:
        """The text of a document, its special tokens included."""
        number = whole("document", document, -len(self), len(self) - 1, 0)
        return self.tokenizer.decode(self[number].tolist())
