"""LAMBADA (arXiv:1606.06031): predict the last word of a passage, on the raw test set.

Strict, as Megatron-LM counts (algorithms.md 1.3): the last whitespace-separated word, with the
space before it, must be the argmax at every one of its tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from mtcli.core.config.untrusted import is_text, parse_json
from mtcli.core.data.text_files import bad_line, read_text
from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.requests import Score
from mtcli.core.evaluate.tasks.task import (
    PreparedTask,
    Report,
    TaskOptions,
    exp,
    find_file,
)


def prepare_lambada(path: Path, encoder: Encoder, options: TaskOptions) -> PreparedTask:
    """Prepares one request per passage of a JSONL file (or folder with one) of {"text": ...}.

    Raises MtcliError naming file and line of the first bad row.
    """
    file = find_file(path, "*.jsonl")
    lines = enumerate(read_text(file).split("\n"), start=1)
    passages = [_passage(file, number, line) for number, line in lines if line.strip()]
    passages = passages[: options.limit]
    requests = [
        encoder.requests(context, [" " + word])[0] for context, word in map(split_last, passages)
    ]
    return PreparedTask(len(passages), requests, report_lambada)


def split_last(text: str) -> tuple[str, str]:
    """Splits a passage into the text before its last word, stripped, and that word."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), word


def report_lambada(scores: Sequence[Score]) -> Report:
    """Reports accuracy and the target words' perplexity: e to the mean negative log-likelihood."""
    total, correct = len(scores), sum(score.is_greedy for score in scores)
    nll = -sum(score.logprob for score in scores)
    return {
        "accuracy": correct / total,
        "perplexity": exp(nll / total),
        "correct": correct,
        "total": total,
        "nll_sum": nll,
    }


def _passage(path: Path, number: int, line: str) -> str:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        raise bad_line(path, number, f"not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise bad_line(path, number, f"not JSON: {error}") from error
    text = row.get("text") if isinstance(row, dict) else None
    if not is_text(text) or not text.strip():
        raise bad_line(path, number, 'no "text", which must be a string with at least one word')
    return text
