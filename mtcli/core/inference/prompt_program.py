"""Renders conversations as prompts by a chat template; runs inside the template's sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtcli.core.data.chat_program import ChatProgram, TemplateFault

Message = Mapping[str, Any]


class PromptProgram(ChatProgram):
    """A compiled chat template that renders prompts."""

    def __call__(self, request: tuple[Sequence[Message], bool]) -> tuple[str, str]:  # type: ignore[override]
        """Renders messages, with the beginning of the assistant's turn if asked for, else up to the
        end of the last message's text, which goes on. Returns (text, reason why there is none)."""
        messages, opens_turn = request
        try:
            text = self._text(messages, None, add_generation_prompt=opens_turn)
        except TemplateFault as fault:
            return "", fault.reason
        text = text.replace(self.mark, "")
        if not opens_turn:
            last = messages[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)]
        return text, ""
