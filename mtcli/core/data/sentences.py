"""Splits text into sentences by punctuation; joined, they are the text again."""

import re

# What ends with a dot and ends no sentence, in lower case.
# fmt: off
ABBREVIATIONS = frozenset([
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "capt", "lt", "sgt", "hon", "st", "mt",
    "jr", "sr", "vs", "etc", "e.g", "i.e", "cf", "al", "fig", "eq", "no", "vol", "pp", "ca",
    "approx", "inc", "ltd", "co", "corp", "dept", "univ", "jan", "feb", "mar", "apr", "jun", "jul",
    "aug", "sep", "sept", "oct", "nov", "dec", "u.s", "u.k", "u.n", "a.m", "p.m",
])
# fmt: on
END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*(?=\s)"  # Latin scripts have a space after
    r"|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\uff09]*"  # Chinese and Japanese have none
    r"|[\u0964\u061f\u06d4](?=\s)"  # Hindi, Arabic, Urdu
    r"|\n[ \t]*\n"  # a blank line ends a paragraph
)
WORD = re.compile(r"([\w.]+)\.\Z")


def split_sentences(text: str) -> list[str]:
    """Splits a text into sentences, each with the space before it.

    A dot does not end a sentence after an abbreviation or a single capital, nor before a lower-case
    letter.
    """
    cuts = [0]
    for match in END.finditer(text):
        is_blank = not text[cuts[-1] : match.end()].strip()
        if not is_blank and not _ends_inside(text, match) and text[match.end() :].strip():
            cuts.append(match.end())
    sentences = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return sentences if text.strip() else []


def _ends_inside(text: str, match: re.Match[str]) -> bool:
    """Says whether the matched punctuation is within a sentence."""
    if match[0][0] not in ".!?\u2026":
        return False
    after = text[match.end() : match.end() + 40].lstrip()
    if after[:1].islower():
        return True
    if match[0] != ".":
        return False
    word = WORD.search(text[max(0, match.start() - 20) : match.end()])
    return word is not None and (
        word[1].lower() in ABBREVIATIONS or (len(word[1]) == 1 and word[1].isupper())
    )
