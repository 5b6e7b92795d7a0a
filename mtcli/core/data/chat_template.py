"""Renders messages as a tokenizer's chat template says, and finds what the assistant wrote.

A chat template is a Jinja program that comes with a tokenizer: untrusted, so it runs in Jinja's
immutable sandbox (`chat_program.py`), and that in a process with limits.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import load_json, read_untrusted
from mtcli.core.data.chat_program import ChatProgram, Message, Span
from mtcli.core.data.tokenize import configured_token
from mtcli.core.runtime.sandbox import Sandbox

MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have 30 KB
FILE = "chat_template.jinja"
OLD_FILE = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FIELD = "chat_template"  # of both JSON files
SPECIALS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
REASONING = ("reasoning_content", "thinking", "reasoning")  # of a message: the standard name first


class Rendered(NamedTuple):
    """A conversation as text, and the assistant's spans in it."""

    text: str
    spans: list[Span]


class ChatTemplate:
    """A compiled chat template, in a sandbox."""

    def __init__(self, source: str, names: Mapping[str, str], path: Path = Path(FILE)) -> None:
        """`names` are the special tokens, such as eos_token; `path` is the file in errors. Raises
        ValueError where `source` is no template, and OverLimit."""
        self.source, self.names = source, dict(names)
        self._program = Sandbox(str(path), ChatProgram, source, self.names)

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> Callable[[], Rendered]:
        """Has a conversation rendered meanwhile. The result returns it, in the order in which they
        were asked for, or raises ValueError where the template refuses it, or shows an assistant's
        turn otherwise once other messages follow it, and OverLimit.

        Raises ValueError where it is nested too deeply."""
        self._program.ask([[_with_reasoning(message) for message in messages], tools])
        return self._rendered

    def _rendered(self) -> Rendered:
        text, spans = self._program.answer()
        return Rendered(text, [(first, end) for first, end in spans])


def load_chat_template(folder: Path | None, config: Mapping[str, object]) -> ChatTemplate | None:
    """The chat template of a tokenizer, whose tokenizer_config.json is `config` and whose folder is
    given where it has one; None where there is none. A file of its own comes before the config's,
    as in transformers.

    Raises MtcliError where it cannot be read or is no template, and OverLimit.
    """
    source: object = config.get(TEMPLATE_FIELD)
    path = (folder or Path()) / TOKENIZER_CONFIG
    for name in (FILE, OLD_FILE):
        if folder and (folder / name).is_file():
            path = folder / name
            source = _read(path)
            break
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
        message = f"{path}: its chat template is no text of up to {MAX_TEMPLATE_BYTES} bytes"
        raise wrong(message, "use another copy", "data.tokenizer")
    try:
        return ChatTemplate(source, special_tokens(config), path)
    except ValueError as error:
        raise wrong(f"{path}: {error}", "use another copy", "data.tokenizer") from None


def special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json by name: bos_token, eos_token and so on."""
    roles = (f"{kind}_token" for kind in SPECIALS)
    return {role: name for role in roles if (name := configured_token(config, role)) is not None}


def _read(path: Path) -> object:
    if path.name == OLD_FILE:
        table = load_json(path, "use another copy", "use another copy", MAX_TEMPLATE_BYTES)
        return table.get(TEMPLATE_FIELD) if isinstance(table, dict) else None
    try:
        return read_untrusted(path, MAX_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise wrong(
            f"{path} cannot be read: {error}", "use another copy", "data.tokenizer"
        ) from None


def _with_reasoning(message: Message) -> Message:
    """A message whose reasoning has every name that templates read it by."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
