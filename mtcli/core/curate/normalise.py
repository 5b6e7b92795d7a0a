"""Mends broken Unicode with ftfy, where a cheap test says that ftfy would change something.

ftfy alone reads a few megabytes a second. Most texts are ASCII without anything to mend, or are not
ASCII and whole; both are told by patterns that run in C.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import partial

from mtcli.core.curate.batch import Batch
from mtcli.core.curate.config import NormaliseConfig
from mtcli.core.curate.extras import require

CONTROLS = r"\x00-\x08\x0b\x0e-\x1f\x7f\r"  # what ftfy removes, and \r, which becomes \n
ASCII = re.compile(rf"[{CONTROLS}]|&[a-zA-Z0-9#]{{1,24}};")
# Line breaks of Unicode, C1 controls, marks of order, halves of pairs, ligatures, letters of full
# or half width. ftfy has a table for each; these ranges hold them and little else.
OTHER = re.compile(
    rf"[{CONTROLS}\x80-\x9f\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\u2028\u2029"
    r"\u206a-\u206f\u3000\ud800-\udfff\ufb00-\ufb06\ufeff\ufff9-\uffff\uff01-\uffef]"
    r"|&[a-zA-Z0-9#]{1,24};"
)
CURLY = re.compile("[\u02bc\u2018-\u201b\u201c-\u201f]")


def make_normalise(config: NormaliseConfig) -> Callable[[Batch], None]:
    """The stage: changes the texts that ftfy would change, as ftfy would."""
    fix = make_fix(config.uncurl_quotes)
    return partial(_normalise, fix)


def make_fix(uncurl: bool) -> Callable[[str], str]:
    """Builds `ftfy.fix_text`, asked only where it has something to do."""
    ftfy = require("ftfy", "normalise")
    badness = require("ftfy.badness", "normalise")
    fixes = require("ftfy.fixes", "normalise")
    whole = ftfy.TextFixerConfig(uncurl_quotes=uncurl)
    is_bad, uncurled = badness.is_bad, fixes.uncurl_quotes

    def fix(text: str) -> str:
        if text.isascii():
            return ftfy.fix_text(text, whole) if ASCII.search(text) else text
        if OTHER.search(text) or is_bad(text) or not unicodedata.is_normalized("NFC", text):
            return ftfy.fix_text(text, whole)
        return uncurled(text) if uncurl and CURLY.search(text) else text

    return fix


def _normalise(fix: Callable[[str], str], batch: Batch) -> None:
    changed = False
    for index in batch.alive():
        document = batch.documents[index]
        text = fix(document.text)
        if text is not document.text and text != document.text:
            document.text, changed = text, True
            document.size = len(text) if text.isascii() else len(text.encode())
    if changed:
        batch.changed()
