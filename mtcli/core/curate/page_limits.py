"""Limits the cost of one page of a crawl: its decompressed size, its depth, the attributes of a
tag, and its processor time.

The extractors' time grows with the square of a page's depth and of a tag's attributes; jusText's,
with the square of the number of paragraphs. 20,000 nested tags took 53 s and 128,000 attributes 29
s, in C code that no signal interrupts; a page within the limits takes up to 0.4 s.
"""

import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mtcli.core.data.documents import HELD_BYTES

MAX_BYTES = HELD_BYTES  # of a page, once inflated
MAX_DEPTH = 4000  # elements open at once; browsers nest at most 512
MAX_ATTRIBUTES = 1000  # of a tag
MAX_SECONDS = 20.0  # of a page, of a processor
TAG = re.compile(rb"<(?:!--|(/?)([a-zA-Z][^\s/>]*))")
RAW = (b"script", b"style", b"textarea", b"title", b"xmp", b"iframe", b"noembed", b"noframes")
RAW_END = {name: re.compile(b"</" + name, re.IGNORECASE) for name in RAW}
# No elements that hold others, and elements whose end tags are mostly left out.
FLAT = frozenset(
    b"area base br col embed hr img input link meta param source track wbr html head body p li dt"
    b" dd option optgroup tr td th thead tbody tfoot colgroup caption rt rp".split()
)
# As HTML's tokenizer splits a tag. Each part is possessive, so a page is read once.
ATTRIBUTE = (
    rb"[\s/]*+[^\s/>][^\s/>=]*+"
    rb"(?:\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s>\"'][^\s>]*+))?+"
)
ATTRIBUTES = re.compile(
    rb"<!--.*?(?:-->|\Z)"  # in no comment, and in no raw text
    rb"|<(?:(?P<raw>%b)(?=[\s/>])|[a-z])[^\s/>]*+"
    % b"|".join(RAW)
    + rb"(?:%b){0,%d}+(?P<more>%b)?+" % (ATTRIBUTE, MAX_ATTRIBUTES, ATTRIBUTE)
    + rb"(?(raw).*?(?:</(?P=raw)|\Z))",
    re.IGNORECASE | re.DOTALL,
)
SCOPES = frozenset((b"table", b"object", b"template", b"applet", b"marquee"))


class TooSlow(Exception):
    """A page that took more than MAX_SECONDS."""


def require_readable(html: bytes) -> None:
    """Raises ValueError for a page that is too deep, or has a tag with too many attributes."""
    if depth_of(html) > MAX_DEPTH:
        raise ValueError(f"a page of more than {MAX_DEPTH:,} nested elements")
    if has_many_attributes(html):
        raise ValueError(f"a page with a tag of more than {MAX_ATTRIBUTES:,} attributes")


def depth_of(html: bytes) -> int:  # noqa: C901, PLR0912 - one pass of a tokenizer
    """Returns the most elements that are open at once, at most MAX_DEPTH + 1; 0 for a page of few
    tags.

    An end tag closes one element of its own scope, so misnested elements may count longer than a
    parser keeps them open.
    """
    html = html.replace(b"\0", b"")  # of UTF-16
    if html.count(b"<") <= MAX_DEPTH:
        return 0
    scopes: list[tuple[bytes, Counter[bytes]]] = [(b"", Counter())]
    place, deepest, depth = 0, 0, 0
    while (tag := TAG.search(html, place)) and deepest <= MAX_DEPTH:
        place = tag.end()
        name = (tag[2] or b"").lower()
        if not name:  # a comment
            place = html.find(b"-->", place)
            if place < 0:
                break
        elif name in FLAT:
            continue
        elif not tag[1]:
            if name in RAW_END:
                if not (end := RAW_END[name].search(html, place)):
                    break
                place = end.end()
                continue
            depth, deepest = depth + 1, max(deepest, depth + 1)
            if name in SCOPES:
                scopes.append((name, Counter()))
            else:
                scopes[-1][1][name] += 1
        elif name in SCOPES:
            if name in (opened for opened, _ in scopes):
                while (closed := scopes.pop())[0] != name:
                    depth -= 1 + closed[1].total()
                depth -= 1 + closed[1].total()
        elif scopes[-1][1][name]:
            scopes[-1][1][name] -= 1
            depth -= 1
    return deepest


def has_many_attributes(html: bytes) -> bool:
    """Says whether a tag has more than MAX_ATTRIBUTES."""
    html = html.replace(b"\0", b"")  # of UTF-16
    return any(tag["more"] is not None for tag in ATTRIBUTES.finditer(html))


@contextmanager
def time_limit(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raises TooSlow in a block that takes more processor time, in the main thread only.

    Raises it again after as long, where the interpreter ignored it, as in a finalizer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TooSlow

    previous_handler = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous_handler)
