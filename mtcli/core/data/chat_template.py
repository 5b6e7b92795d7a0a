"""Finds a tokenizer's chat template and renders conversations by it in a sandbox.

A chat template is a Jinja program that comes with a tokenizer. It is untrusted, so it runs in a
process with limits of time and memory (`sandbox.py`); `chat_program.py` is the code in that
process.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import LossOn
from mtcli.core.config.untrusted import load_json, read_untrusted
from mtcli.core.data.chat_program import ChatProgram, Message, Rendered, TemplateFault
from mtcli.core.data.tokenize import configured_token
from mtcli.core.runtime.sandbox import Sandbox

MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have 30 KB
FILE = "chat_template.jinja"
OLD_FILE = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FIELD = "chat_template"  # of both JSON files
SPECIALS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ChatTemplate:
    """A compiled chat template, in a sandbox."""

    def __init__(self, source: str, names: Mapping[str, str], path: Path = Path(FILE)) -> None:
        """Compiles `source` in a sandbox; `names` are the special tokens, such as eos_token, and
        `path` is the file named in errors. Raises ValueError where `source` is no template, and
        OverLimit."""
        self.source, self.names = source, dict(names)
        self._program = Sandbox(str(path), ChatProgram, source, self.names)

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        loss_on: LossOn = "assistant",
    ) -> Callable[[], list[Rendered]]:
        """Starts to render a conversation that has a message of the assistant.

        The result returns its examples; results must be called in the order of the requests. It
        raises TemplateFault where the template refuses the conversation, or a turn cannot be
        located, and OverLimit.

        Raises ValueError where the conversation is nested too deeply.
        """
        self._program.ask([messages, tools, loss_on])
        return self._examples

    def _examples(self) -> list[Rendered]:
        examples, fault = self._program.answer()
        if fault:
            raise TemplateFault(*fault)
        return [
            Rendered(text, [(first, end) for first, end in spans], turns)
            for text, spans, turns in examples
        ]


def load_chat_template(folder: Path | None, config: Mapping[str, object]) -> ChatTemplate | None:
    """Loads the chat template of a tokenizer with this tokenizer_config.json and, where it has one,
    folder; None where there is no template. As in transformers, a template file takes precedence
    over the config.

    Raises MtcliError where the template cannot be read or is invalid, and OverLimit.
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
    """Returns the special tokens of a tokenizer_config.json by name: bos_token, eos_token and so
    on."""
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
