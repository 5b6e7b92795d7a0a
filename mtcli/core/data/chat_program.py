"""Renders conversations by the source of a chat template: what runs in the template's sandbox.

A template sees what transformers shows it (trim_blocks, lstrip_blocks, loop controls,
raise_exception, strftime_now, tojson, special tokens by name), and gives the same text.

The assistant's characters are those between `{% generation %}` and `{% endgeneration %}`. In a
template without these, turn i is what rendering messages 0 .. i adds to messages 0 .. i - 1 and
their generation prompt.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any
from uuid import uuid4

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 1 << 24  # characters of one conversation
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = Mapping[str, Any]
Conversation = tuple[Sequence[Message], Sequence[Any] | None]  # its messages and tools
Span = tuple[int, int]  # the first character and the end
Render = Callable[[Mapping[str, Any]], str]


class ChatProgram:
    """A compiled chat template."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """`names` are the special tokens, such as eos_token. Raises ValueError where `source` is no
        template."""
        self.names = names
        self.mark = f"\0{uuid4().hex}\0"  # that no text of a conversation has
        self.is_marked = GENERATION.search(source) is not None
        self._render = _compiled(source, self.mark)

    def __call__(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Renders a conversation: its text, and the assistant's spans in it. Raises ValueError
        where the template refuses it, or shows an assistant's turn otherwise once other messages
        follow it."""
        messages, tools = conversation
        parts = self._text(messages, tools).split(self.mark)
        text = "".join(parts)
        if not self.is_marked:
            return text, list(self._turns(text, messages, tools))
        ends = [*accumulate(map(len, parts), initial=0)]
        return text, [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]

    def _turns(
        self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> Iterator[Span]:
        """The spans of a template without generation markers."""
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:turn], tools, add_generation_prompt=True)
            after = self._text(messages[: turn + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template shows message {turn} otherwise once others follow it, and "
                    "has no {% generation %} markers"
                )
            yield len(before), len(after)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        return self._render(
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self.names,
            }
        )


def _compiled(source: str, mark: str) -> Render:
    """Compiles a template; what it renders between generation markers stands between `mark`s."""
    try:
        template = _environment(mark).from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # of Jinja's or Python's compiler: over 20 nested loops
        raise ValueError(f"its chat template is no Jinja template: {error}") from None

    def render(values: Mapping[str, Any]) -> str:
        parts, length = [], 0
        try:
            for part in template.generate(**values):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDERED:
                    break
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: any of its errors
            message = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {message}") from None
        if length > MAX_RENDERED:
            raise ValueError(f"the chat template writes over {MAX_RENDERED} characters")
        return "".join(parts)

    return render


def _environment(mark: str) -> ImmutableSandboxedEnvironment:
    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return f"{mark}{caller()}{mark}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
