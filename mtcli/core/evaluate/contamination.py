"""Finds items that a training corpus contained, by the report of `mtcli curate`.

The report lists, by task, the n-grams of task texts that were found in documents, common phrases
included. An item with one of them in its prompt or choices is contaminated; accuracies are then
reported for clean and contaminated items, as in GPT-3 (arXiv:2005.14165, section 4) and MT-NLG.
"""

import re
from collections.abc import Iterable
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_text, load_json

WORD = re.compile(r"\w+")
HINT = "the report.json of `mtcli curate`, with its stage decontaminate"
FIELD = "--contaminated"


def read_ngrams(path: str) -> frozenset[tuple[str, ...]]:
    """Reads the n-grams of a report, as words. Raises MtcliError where it is no report."""
    table = load_json(path, HINT, HINT, field=FIELD)
    tasks = table.get("contamination") if isinstance(table, dict) else None
    if not isinstance(tasks, dict):
        raise wrong(f"{path} lists no contamination", HINT, FIELD)
    reports = [task for task in tasks.values() if isinstance(task, dict)]
    shown = [row for task in reports for row in _list(task, "shown") if isinstance(row, dict)]
    ngrams = [ngram for table in (*reports, *shown) for ngram in _list(table, "ngrams")]
    if not all(map(is_text, ngrams)):
        raise wrong(f"{path}: one of {len(ngrams)} n-grams is no text", HINT, FIELD)
    return frozenset(words for words in map(_words, ngrams) if words)


def is_contaminated(texts: Iterable[str], ngrams: frozenset[tuple[str, ...]]) -> bool:
    """Says whether a text contains one of the n-grams."""
    sizes = {len(ngram) for ngram in ngrams}
    for words in map(_words, texts):
        for size in sizes:
            if any(words[at : at + size] in ngrams for at in range(len(words) - size + 1)):
                return True
    return False


def _words(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text.lower()))


def _list(table: dict[str, Any], key: str) -> list[Any]:
    value = table.get(key)
    return value if isinstance(value, list) else []
