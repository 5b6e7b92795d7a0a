"""A conversation on a terminal: the user's lines and the model's streamed replies, in turn."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mtcli.core.config.errors import MtcliError, visible, wrong
from mtcli.core.inference.chat import ChatPrompts
from mtcli.core.inference.generate import Ends, Generator, TextRequest, TextState
from mtcli.core.inference.model import OpenModel
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.runtime.atomic_writes import aside

USAGE = "/reset begins anew, /save FILE writes the conversation, Ctrl-C stops a reply, Ctrl-D ends"


class Talk:
    """A conversation with a model: its messages so far."""

    def __init__(
        self, model: OpenModel, sampling: Sampling, ends: Ends, system: str | None = None
    ) -> None:
        """Loads the chat template. Raises MtcliError where there is none."""
        self.tokenizer, self.sampling, self.ends = model.require_tokenizer(), sampling, ends
        self.chat = ChatPrompts(self.tokenizer, model.checkpoint.tokenizer_folder)
        self.generator = Generator(model.scorer)
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = [*self.first]

    def run(self, read: Callable[[], str] = input) -> None:
        """Reads lines until their end, and answers each."""
        _print(f"{USAGE}\n")
        while True:
            _print("> ")  # not by input(), which asks on stderr
            try:
                line = read().strip()
            except KeyboardInterrupt:
                _print("\n")
                continue
            except EOFError:
                _print("\n")
                return
            if line:
                self._answer_or_tell(line)

    def _answer_or_tell(self, line: str) -> None:
        try:
            command, _, name = line.partition(" ")
            if command == "/reset":
                self.messages = [*self.first]
            elif command == "/save":
                self._save(name.strip())
            elif command.startswith("/"):
                raise wrong(f"there is no {command}", USAGE)
            else:
                self._answer(line)
        except MtcliError as error:
            _print(f"{error}\n")

    def _save(self, name: str) -> None:
        """Writes the messages as a line of fine-tuning data."""
        if not name:
            raise wrong("no file is named", "/save FILE")
        try:
            with aside(name) as path:
                text = json.dumps({"messages": self.messages}, ensure_ascii=False)
                path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise wrong(f"{name} cannot be written: {error.strerror}", "another name") from None
        _print(f"wrote {name}\n")

    def _answer(self, line: str) -> None:
        """Streams the reply to a line; Ctrl-C ends it there. A line that fails is forgotten."""
        messages = [*self.messages, {"role": "user", "content": line}]
        ids = self.chat.encode(self.chat.text(messages))
        decode = partial(self.tokenizer.decode_after, ids)
        shown = _Shown(max(map(len, self.ends.stops), default=1) - 1)
        reply = ""

        def watch(text: TextState) -> None:
            nonlocal reply
            reply = decode(text.ids) if text.result is None else text.result.text
            shown.show(reply, text.result is not None)

        number = len(self.messages)
        request = TextRequest(ids, self.ends, self.sampling, decode, number)
        try:
            for _ in self.generator.run([request], watch):
                pass
        except KeyboardInterrupt:
            shown.show(reply, True)
        _print("\n")
        self.messages = [*messages, {"role": "assistant", "content": reply}]


class _Shown:
    """The part of a reply that is on the terminal."""

    def __init__(self, held: int) -> None:
        """`held` characters at the end may be of a stop string, and wait."""
        self.held, self.length = held, 0

    def show(self, reply: str, is_whole: bool) -> None:
        """Prints what is new, without half of a character or stop string."""
        end = len(reply) if is_whole else len(reply.rstrip("\ufffd")) - self.held
        if end > self.length:
            _print(reply[self.length : end])
            self.length = end


def _print(text: str) -> None:
    sys.stdout.write(visible(text))
    sys.stdout.flush()
