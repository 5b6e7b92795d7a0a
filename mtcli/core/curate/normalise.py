"""Mends broken Unicode with ftfy, where a cheap test finds that ftfy would change the text.

ftfy reads a few megabytes a second. Most texts are ASCII or intact, which patterns that run in C
find out.
"""

import re
import unicodedata
from collections.abc import Callable

from mtcli.core.curate.batch import Batch, not_ascii
from mtcli.core.curate.config import NormaliseConfig
from mtcli.core.curate.extras import require

# What ftfy mends in ASCII: control characters, \r, which becomes \n, and entities of HTML.
CONTROLS = bytes([*range(9), 11, *range(14, 32), 127, 13])
ENTITY = re.compile("&[a-zA-Z0-9#]{1,24};")
# Line breaks of Unicode, C1 controls, marks of order, halves of pairs, ligatures, letters of full
# or half width. ftfy has a table for each; these ranges hold them and little else.
OTHER = re.compile(
    r"[\x80-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2028\u2029\u206a-\u206f\u3000"
    r"\ud800-\udfff\ufb00-\ufb06\ufeff\ufff9-\uffff\uff01-\uffef]"
)
CURLY = frozenset("\u02bc\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f")
# Characters that alone make no sequence that ftfy takes for mojibake.
HARMLESS = CURLY | frozenset("\xa0\xad\xb7\xb4\u2013\u2014\u2015\u2026\u2022\xab\xbb\xae\xa9\u2122")
FIRST_MARK = "\u0300"  # below it, every text is in NFC
NOT_ASCII = re.compile("[^\x00-\x7f]+")
NEAR = 3  # characters of ASCII beside others that a sequence of mojibake may have


def make_normalise(config: NormaliseConfig) -> Callable[[Batch], None]:
    """Builds the stage that changes texts exactly as ftfy would."""
    fix = make_fix(config.uncurl_quotes)

    def normalise(batch: Batch) -> None:
        changed = False
        for index in batch.alive():
            document = batch.documents[index]
            text = fix(document.text)
            if text is not document.text and text != document.text:
                document.text, changed = text, True
                document.size = len(text) if text.isascii() else len(text.encode())
        if changed:
            batch.changed()

    return normalise


def make_fix(uncurl: bool) -> Callable[[str], str]:
    """Builds a function equal to `ftfy.fix_text`, which calls it only where it would change the
    text."""
    ftfy = require("ftfy", "normalise")
    badness = require("ftfy.badness", "normalise")
    fixes = require("ftfy.fixes", "normalise")
    settings = ftfy.TextFixerConfig(uncurl_quotes=uncurl)
    is_bad = badness.is_bad

    def fix(text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        has_controls = len(data.translate(None, CONTROLS)) != len(data)
        if has_controls or ("&" in text and ENTITY.search(text)):
            return str(ftfy.fix_text(text, settings))
        if text.isascii():
            return text
        non_ascii = not_ascii(data)
        characters = set(non_ascii)
        if not characters <= HARMLESS and (_is_odd(text, non_ascii) or is_bad(_surroundings(text))):
            return str(ftfy.fix_text(text, settings))
        if uncurl:
            for curly in characters & CURLY:
                text = text.replace(curly, fixes.uncurl_quotes(curly))
        return text

    return fix


def _is_odd(text: str, non_ascii: str) -> bool:
    """Says whether non-ASCII characters, or combining marks, are in an unusual form."""
    if OTHER.search(non_ascii) or "\nÃ " in text or "\nÂ " in text:
        return True
    return max(non_ascii) >= FIRST_MARK and not unicodedata.is_normalized("NFC", text)


def _surroundings(text: str) -> str:
    """Extracts the text near non-ASCII characters, which is enough to detect mojibake."""
    spans = (match.span() for match in NOT_ASCII.finditer(text))
    return "\n".join([text[max(0, start - NEAR) : stop + NEAR] for start, stop in spans])
