"""Compiles a task's templates and expressions: Jinja, in its immutable sandbox.

A task file may come from a stranger, so nothing in it reaches Python's own objects. A name that a
row does not have is an error, and never an empty text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]
Text = Callable[[Fields], str]
Value = Callable[[Fields], Any]
MAX_RENDERED = 1 << 20  # characters of one text


class Templates:
    """The Jinja environment of task files; its filters are Jinja's and `regex_replace`."""

    def __init__(self) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._undefined = jinja2.Undefined
        self._environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        self._environment.filters["regex_replace"] = _regex_replace

    def text(self, source: str) -> Text:
        """Compiles a template. Raises ValueError where it is none, as its result does for a row
        that it cannot render."""
        template = _tried(lambda: self._environment.from_string(source))

        def render(fields: Fields) -> str:
            rendered: str = _tried(lambda: template.render(fields))
            if len(rendered) > MAX_RENDERED:
                raise ValueError(f"{len(rendered)} characters, and {MAX_RENDERED} are the most")
            return rendered

        return render

    def value(self, source: str) -> Value:
        """Compiles an expression, whose result is any value; raises as `text` does."""
        expression = _tried(
            lambda: self._environment.compile_expression(source, undefined_to_none=False)
        )

        def compute(fields: Fields) -> Any:
            computed = _tried(lambda: expression(**fields))
            if isinstance(computed, self._undefined):
                _tried(lambda: str(computed))  # raises, and says what it is
            return computed

        return compute


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # a template is a program: any of its errors
        raise ValueError(str(error) or type(error).__name__) from None


def _regex_replace(text: str, pattern: str, replacement: str) -> str:
    return re.sub(pattern, replacement, text)
