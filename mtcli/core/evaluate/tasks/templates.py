"""Renders rows by a task's templates and expressions; runs inside the task's sandbox.

A task file is untrusted, so Jinja's immutable sandbox keeps templates from Python's own objects. A
name that a row lacks is an error, never an empty text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtcli.core.config.untrusted import is_text

Fields = Mapping[str, Any]
Value = Callable[[Fields], Any]
MAX_RENDERED = 1 << 20  # characters of an item
NAMES = ("id", "group", "cluster")  # expressions whose values an item has as texts


class TaskProgram:
    """The compiled templates and expressions of a task; filters are Jinja's and `regex_replace`."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        """Compiles the fields of a TaskFile. Raises ValueError for an invalid template."""
        self._environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        self._environment.filters["regex_replace"] = _regex_replace
        prompt, choices = task["prompt"], task["choices"]
        self.values = {name: self._value(code) for name, code in task["values"].items()}
        self.prompts = self._texts([prompt] if isinstance(prompt, str) else prompt)
        self.choices = self._value(choices) if isinstance(choices, str) else self._texts(choices)
        named = {name: task[name] for name in ("where", "answer", *NAMES)}
        self.named = {name: self._value(code) for name, code in named.items() if code}

    def __call__(self, row: Fields) -> dict[str, Any] | None:
        """Renders the fields of a row's item: texts in lists `prompts` and `choices`, the number
        `answer`, and those of NAMES that the task has; None where `where` does not hold. Raises
        ValueError where the row lacks something."""
        fields = {**row}
        for name, compute in self.values.items():
            fields[name] = compute(fields)
        if "where" in self.named and not self.named["where"](fields):
            return None
        prompts, choices = self.prompts(fields), _tried(lambda: [*self.choices(fields)])
        _require_texts(*prompts, *choices)
        if not choices or not all(choice.strip() for choice in choices):
            raise ValueError(f"one of {len(choices)} choices is empty")
        names = {name: str(self.named[name](fields)) for name in NAMES if name in self.named}
        _require_texts(*names.values())
        answer = None
        if "answer" in self.named:
            num_answers = max(len(prompts), len(choices))
            answer = _answer(self.named["answer"](fields), choices, num_answers)
        return {"prompts": prompts, "choices": choices, "answer": answer, **names}

    def _texts(self, sources: Sequence[str]) -> Value:
        """Compiles templates into a function that returns a list of texts. Raises ValueError for an
        invalid template, as the function does for a row that it cannot render."""
        templates = _tried(lambda: [self._environment.from_string(one) for one in sources])
        return lambda fields: _tried(lambda: [one.render(fields) for one in templates])

    def _value(self, source: str) -> Value:
        """Compiles an expression into a function that returns any value; raises as `_texts`
        does."""
        expression = _tried(
            lambda: self._environment.compile_expression(source, undefined_to_none=False)
        )

        def compute(fields: Fields) -> Any:
            computed = _tried(lambda: expression(**fields))
            if isinstance(computed, jinja2.Undefined):
                _tried(lambda: str(computed))  # raises, and says what it is
            return computed

        return compute


def _answer(value: Any, choices: Sequence[str], num_answers: int) -> int:
    """Returns the number of the right choice, given as a number, as a truth value or as the
    choice's text."""
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    if not isinstance(value, int) or not 0 <= value < num_answers:
        raise ValueError(f"the answer {value!r:.80} is none of {num_answers} choices")
    return int(value)


def _require_texts(*values: Any) -> None:
    """Raises ValueError where a value is not text that UTF-8 can encode, or is too long."""
    for value in values:
        if not is_text(value):
            raise ValueError(f"{value!r:.80} is no text")
    if (length := sum(map(len, values))) > MAX_RENDERED:
        raise ValueError(f"{length} characters, and {MAX_RENDERED} are the most")


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: any of its errors
        raise ValueError(str(error) or type(error).__name__) from None


def _regex_replace(text: str, pattern: str, replacement: str) -> str:
    return re.sub(pattern, replacement, text)
