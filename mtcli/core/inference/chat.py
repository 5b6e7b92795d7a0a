"""Prompts of conversations, by the chat template of a tokenizer's folder."""

from collections.abc import Sequence
from pathlib import Path

from mtcli.core.config.errors import wrong
from mtcli.core.data.chat_template import load_chat_template
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.inference.prompt_program import Message, PromptProgram
from mtcli.core.runtime.sandbox import OverLimit, Sandbox


class ChatPrompts:
    """Renders conversations as the text that a model continues."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None) -> None:
        """Loads the template of a tokenizer's folder. Raises MtcliError where it has none."""
        self.tokenizer = tokenizer
        try:
            template = load_chat_template(folder, tokenizer.config)
            if template is None:
                message = f"{folder or 'the tokenizer'} has no chat template"
                hint = "save one as chat_template.jinja there, or leave --chat out"
                raise wrong(message, hint, "--chat")
            self.source = template.source
            self._program = Sandbox(str(folder), PromptProgram, template.source, template.names)
        except OverLimit as limit:
            raise wrong(str(limit), limit.hint, "--chat") from None

    def text(self, messages: Sequence[Message], opens_turn: bool = True) -> str:
        """Renders messages, each with a role and content, with the beginning of the assistant's
        turn; without `opens_turn` up to the end of the last one's text, which goes on.

        Raises MtcliError where the template refuses them.
        """
        try:
            self._program.ask([messages, opens_turn])
            text, reason = self._program.answer()
        except (OverLimit, ValueError) as error:
            text, reason = "", str(error)
        if reason:
            roles = ", ".join(message["role"] for message in messages)
            raise wrong(reason, f"another order of roles than {roles}, or --system", "--chat")
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Encodes a rendered conversation: its special tokens as such, and none added."""
        return self.tokenizer.encode_spans(text, [], [])[0]


def conversation(text: str, system: str | None) -> list[Message]:
    """The messages of a user's text, after the system's if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]
