"""Renders conversations by a chat template and finds the assistant's characters; runs inside the
template's sandbox.

A template runs in Jinja's immutable sandbox, with the environment of transformers (trim_blocks,
lstrip_blocks, loop controls, raise_exception, strftime_now, tojson, special tokens by name), and
gives the same text.

The assistant's characters are those between `{% generation %}` and `{% endgeneration %}`. In a
template without these, turn i is what rendering messages 0 .. i appends to its prompt: messages 0
.. i - 1 and their generation prompt.

Many templates render a turn differently once other turns follow: Qwen3 and gpt-oss drop its
reasoning, Phi-3 ends each rendering with a token. Their conversations are unrolled: turn i becomes
an example of messages 0 .. i, as the template shows them to the model that writes turn i.

Without markers a conversation takes at least two renderings per turn, so one request renders it all
and one answer holds its examples.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:  # pydantic would take the sandbox 0.2 s to import
    from mtcli.core.config.schema import LossOn

MAX_RENDERED = 1 << 24  # characters of one rendering
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")  # <think> and <tool> begin alike, and are two tags
REASONING = ("reasoning_content", "thinking", "reasoning")  # of a message: the standard name first

Message = Mapping[str, Any]
Render = Callable[[Mapping[str, Any]], str]
Conversation = tuple[Sequence[Message], Sequence[Any] | None, "LossOn"]  # messages, tools, loss_on


class Rendered(NamedTuple):
    """An example's text, the assistant's spans of characters [first, end), and the numbers of the
    messages that have a span."""

    text: str
    spans: list[tuple[int, int]]
    turns: list[int]


class TemplateFault(Exception):
    """The reason why a template does not render a conversation; the template's own words where it
    refuses."""

    def __init__(self, reason: str, hint: str = "mend the template") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


# The examples of a conversation, and no fault; or none, and the reason and hint of a TemplateFault.
Answer = tuple[list[Rendered], tuple[str, str] | None]


class ChatProgram:
    """A compiled chat template."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """Compiles `source`; `names` are the special tokens, such as eos_token. Raises ValueError
        where `source` is no template."""
        self.names = names
        self.mark = f"\0{uuid4().hex}\0"  # that no text of a conversation has
        self.probe = f"\ue000{uuid4().hex}"  # nor does it begin as any
        self.is_marked = GENERATION.search(source) is not None
        self._render = _compiled(source, self.mark)

    def __call__(self, conversation: Conversation) -> Answer:
        """Renders a conversation. A fault is part of the answer, because an error raised here would
        reach the caller as text, without its hint."""
        try:
            return self._examples(*conversation), None
        except TemplateFault as fault:
            return [], (fault.reason, fault.hint)

    def _examples(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, loss_on: "LossOn"
    ) -> list[Rendered]:
        """Returns the examples of a conversation: one, or one per turn where the template renders
        turns differently once others follow. With a loss on the last turn alone, the conversation
        ends there; with one on all, it is one example, as the template shows it."""
        messages = [self._shown(_with_reasoning(message)) for message in messages]
        if loss_on == "all":
            text = self._text(messages, tools).replace(self.mark, "")
            return [Rendered(text, [(0, len(text))], [*range(len(messages))])]
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if loss_on == "last":
            return [self._turn(messages[: turns[-1] + 1], tools)]
        if self.is_marked:
            return [self._marked(messages, tools, turns)]
        whole = self._whole(messages, tools, turns)
        return [whole] if whole else [self._turn(messages[: turn + 1], tools) for turn in turns]

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, turns: list[int]
    ) -> Rendered:
        """Finds the spans between generation markers."""
        parts = self._text(messages, tools).split(self.mark)
        ends = [*accumulate(map(len, parts), initial=0)]
        spans = [(ends[i], ends[i + 1]) for i in range(1, len(parts), 2)]
        return Rendered("".join(parts), spans, turns)

    def _whole(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, turns: list[int]
    ) -> Rendered | None:
        """Finds the spans of all turns for a template without markers; None where a turn is
        rendered differently after its prompt, or once others follow."""
        text, spans = self._text(messages, tools), []
        for turn in turns:
            prompt = self._text(messages[:turn], tools, add_generation_prompt=True)
            answered = self._text(messages[: turn + 1], tools)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                return None
            spans.append((len(prompt), len(answered)))
        return Rendered(text, spans, turns)

    def _turn(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Rendered:
        """Renders the example whose last message, the assistant's, has the only span."""
        turn = len(messages) - 1
        if self.is_marked:
            text, spans, _ = self._marked(messages, tools, [turn])
            earlier, said, _ = self._marked(messages[:turn], tools, [])
            if [text[a:b] for a, b in spans[: len(said)]] != [earlier[a:b] for a, b in said]:
                message = f"marks other text of messages before {turn} than without it"
                raise TemplateFault(f"the chat template {message}")
            return Rendered(text, spans[len(said) :], [turn])
        prompt = self._text(messages[:turn], tools, add_generation_prompt=True)
        text = self._text(messages, tools)
        if not text.startswith(prompt):
            prompt, completion = self._placed(messages, tools, prompt, text)
            text = prompt + completion
        return Rendered(text, [(len(prompt), len(text))], [turn])

    def _placed(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: str, text: str
    ) -> tuple[str, str]:
        """Returns the last message's prompt and rendering, where the rendering `text` does not
        begin with `prompt`.

        Either the two render earlier messages differently (Mistral 7B v0.3 drops the system message
        once the assistant has answered): then the prompt is what the model gets. Or the prompt ends
        with text that no turn has (DeepSeek-R1's "<think>"): then it ends where the two differ. A
        probe in place of the message before tells where that message ends in both.
        """
        turn = len(messages) - 1
        if not turn:
            raise _unplaced(turn, "its generation prompt is no part of it")
        *earlier, asked, last = messages

        def behind(*said: Message, probes: int = 1, add_generation_prompt: bool = False) -> str:
            shown = self._text([*earlier, self._probed(asked), *said], tools, add_generation_prompt)
            if shown.count(self.probe) != probes:
                raise _unplaced(turn, f"it does not show message {turn - probes % 2} just once")
            return shown.partition(self.probe)[2]

        opened, added = behind(add_generation_prompt=True), behind(last)
        if not (prompt.endswith(opened) and text.endswith(added)):
            raise _unplaced(turn, f"what it writes there depends on message {turn - 1}")
        if added.startswith(opened):
            return prompt, added.removeprefix(opened)
        # what any turn begins with: no text that begins as the prompt ends is taken for the prompt
        plain = self._probed({"role": last["role"], "content": last.get("content")})
        shared = _common(opened, added, behind(plain, probes=2))
        if len(shared) <= len(_common(opened, behind())):
            raise _unplaced(turn, "it begins otherwise than its generation prompt")
        return prompt.removesuffix(opened) + shared, added.removeprefix(shared)

    def _shown(self, message: Message) -> Message:
        """Joins the parts of a content into one text, unless the template reads parts itself."""
        content = message.get("content")
        if not isinstance(content, list) or self._reads_parts:
            return message
        return {**message, "content": "".join(part["text"] for part in content)}

    @cached_property
    def _reads_parts(self) -> bool:
        """Says whether the template shows the text of a part, rather than the list of parts."""
        parts = [{"type": "text", "text": self.probe}]
        try:
            shown = self._text([{"role": "user", "content": parts}], None)
        except TemplateFault:
            return False
        return self.probe in shown and re.search(r"[\"']type[\"']", shown) is None

    def _probed(self, message: Message) -> Message:
        """Replaces a message's content by the probe, in the same form."""
        said: Any = self.probe
        if isinstance(message.get("content"), list):
            said = [{"type": "text", "text": said}]
        return {**message, "content": said}

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


def _unplaced(turn: int, why: str) -> TemplateFault:
    return TemplateFault(
        f"the chat template leaves message {turn} no certain place: {why}",
        "put {% generation %} and {% endgeneration %} around what it writes of the assistant's",
    )


def _common(*texts: str) -> str:
    """Returns the common prefix of texts, less a tag that is open where they part."""
    return OPEN_TAG.sub("", commonprefix(texts))


def _compiled(source: str, mark: str) -> Render:
    """Compiles a template whose generation blocks are rendered between `mark`s."""
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
            raise TemplateFault(f"the chat template refuses it: {message}") from None
        if length > MAX_RENDERED:
            raise TemplateFault(f"the chat template writes over {MAX_RENDERED} characters")
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


def _with_reasoning(message: Message) -> Message:
    """Copies a message's reasoning to every name that templates read it by."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encodes JSON without Jinja's escapes of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
