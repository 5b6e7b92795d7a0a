"""Converts the lines of fine-tuning files into messages, whichever tool they were written for.

| convention | a line |
|---|---|
| OpenAI, TRL | `{"messages": [{"role", "content"}, ...]}`, the content a text or its parts |
| TRL | `{"prompt": [messages], "completion": [messages]}`, with a loss on the completion |
| | `{"prompt": text, "completion": text}` |
| ShareGPT | `{"conversations": [{"from", "value"}, ...]}` |
| Alpaca | `{"instruction", "input", "output"}` |

A line that a tokenizer without a chat template can read also is a pair of texts.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from mtcli.core.config.untrusted import is_text, parse_json, shown
from mtcli.core.data.bad_lines import BadLine

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {  # of ShareGPT's files
    **dict.fromkeys(("human", "user", "input"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "output"), "assistant"
    ),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    "system": "system",
    "function_call": "assistant",
}
# stanford_alpaca's PROMPT_DICT.
ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately "
ALPACA += "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
CONTEXT = ", paired with an input that provides further context"
HINT = 'a line is {"messages": [...]} or {"prompt": ..., "completion": ...}; or as ShareGPT or '
HINT += "Alpaca has it. Plain text is read with data.format = 'tokens'"

Message = dict[str, Any]
Line = Mapping[str, Any]


class ChatLine(NamedTuple):
    """A line as messages; as (prompt, completion), where it is one turn; its tools; and the keys of
    it that were read."""

    messages: list[Message]
    pair: tuple[str, str] | None
    tools: list[Any] | None
    keys: frozenset[str]


def chat_line(line: Line, on_all: bool = False) -> ChatLine:
    """Reads a line by the convention that its keys show; `on_all` says that prompts have a loss.

    Raises BadLine where it has none, or its values do not fit.
    """
    _require_one_answer(line)
    keys = {"tools", "weight"}
    pair = None
    if "messages" in line:
        messages, keys = line["messages"], keys | {"messages"}
    elif "conversations" in line:
        messages, keys = _sharegpt(line), keys | {"conversations", "system"}
    elif "instruction" in line and "output" in line:
        pair = _alpaca(line)
        messages = _alpaca_messages(line, on_all)
        keys |= {"instruction", "input", "output", "system", "history"}
    else:
        keys |= {"prompt", "completion"}
        if isinstance(line.get("prompt"), list):
            messages = _prompt_and_turns(line, on_all)
        else:
            pair = _texts(line, "prompt", "completion")
            messages = _turns(*pair)
    return ChatLine(_messages(messages), pair, _tools(line), frozenset(keys))


def _require_one_answer(line: Line) -> None:
    """Raises BadLine for preference pairs, and for answers that are labelled good or bad."""
    hint = "supervised fine-tuning learns every answer: give the chosen ones alone, as completion"
    if line.keys() & {"chosen", "rejected"}:
        reason = "it is a preference pair (chosen and rejected), and no training on pairs is there"
        raise BadLine("preference pair", reason, hint)
    if isinstance(line.get("label"), bool) and "completion" in line:
        reason = f"its completion is labelled {shown(line['label'])}, as unpaired preferences are"
        raise BadLine("preference label", reason, f"{hint}, without label")


def _texts(line: Line, first: str, second: str) -> tuple[str, str]:
    """Returns the texts under two keys, the second not empty."""
    for name in (first, second):
        if name not in line:
            raise BadLine(f"no {name}", f"it has no {name}; its keys are {shown([*line])}", HINT)
        if not is_text(line[name]):
            raise BadLine(f"no {name}", f"its {name} is {shown(line[name])}, no text", HINT)
    if not line[second]:
        raise BadLine(f"no {second}", f"its {second} is empty")
    return line[first], line[second]


def _turns(prompt: str, completion: str) -> list[Message]:
    roles = (("user", prompt), ("assistant", completion))
    return [{"role": role, "content": text} for role, text in roles]


def _prompt_and_turns(line: Line, on_all: bool) -> list[Any]:
    """Joins TRL's prompt and completion; messages of the prompt have no loss, unless all have."""
    prompt, completion = line["prompt"], line.get("completion")
    if not isinstance(completion, list) or not completion:
        reason = f"its prompt is a list of messages, and its completion {shown(completion)}"
        raise BadLine("no completion", reason, "both are texts, or both lists of messages")
    unweighted = {} if on_all else {"weight": 0.0}
    asked = [one | unweighted if isinstance(one, dict) else one for one in prompt]
    return [*asked, *completion]


def _sharegpt(line: Line) -> Any:
    """Renames ShareGPT's keys and speakers; a list of messages by role is returned as it is."""
    said = line["conversations"]
    if not isinstance(said, list):
        return said
    messages = [_said(number, one) for number, one in enumerate(said)]
    return [*_system(line), *messages]


def _said(number: int, said: Any) -> Any:
    if not isinstance(said, dict) or "from" not in said:
        return said
    speaker, text = said["from"], said.get("value")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        reason = f"message {number} is from {shown(speaker)}"
        raise BadLine("unknown role", reason, f"one of {', '.join(SPEAKERS)}")
    message = {key: value for key, value in said.items() if key not in ("from", "value")}
    message |= {"role": role, "content": text}
    return message if speaker != "function_call" else message | _call(number, text)


def _call(number: int, text: Any) -> Message:
    """Reads the call of a function that ShareGPT's files have as JSON."""
    try:
        call = parse_json(text) if is_text(text) else None
    except ValueError:
        call = None
    if not isinstance(call, dict) or not is_text(call.get("name")):
        reason = f"message {number} is a function_call of {shown(text)}"
        raise BadLine("no function", reason, 'JSON such as {"name": "f", "arguments": {}}')
    return {"content": "", "tool_calls": [{"type": "function", "function": call}]}


def _system(line: Line) -> list[Message]:
    """Returns the message of a line's system prompt, where it has one."""
    if not line.get("system"):
        return []
    return [{"role": "system", "content": line["system"]}]


def _alpaca_messages(line: Line, on_all: bool) -> list[Message]:
    """Builds the turns of an Alpaca line as LLaMA-Factory reads them: the input stands on the lines
    behind the instruction. Those of its history have no loss, unless all have."""
    instruction, output = _texts(line, "instruction", "output")
    history = line.get("history") or []
    pairs = [one for one in history if isinstance(one, list)] if isinstance(history, list) else None
    if pairs is None or any(len(one) != 2 or not all(map(is_text, one)) for one in pairs):
        reason = f"its history is {shown(history)}"
        raise BadLine("wrong history", reason, "a list of pairs of texts: [[question, answer]]")
    earlier = [message for pair in pairs for message in _turns(*pair)]
    asked = "\n".join(filter(None, (instruction, line.get("input"))))
    unweighted = {} if on_all else {"weight": 0.0}
    return [*_system(line), *(one | unweighted for one in earlier), *_turns(asked, output)]


def _alpaca(line: Line) -> tuple[str, str]:
    """Builds the prompt that Alpaca was trained with, and the completion."""
    instruction, output = _texts(line, "instruction", "output")
    given = line.get("input") or ""
    if not is_text(given):
        raise BadLine("no input", f"its input is {shown(given)}, no text", HINT)
    section = f"### Input:\n{given}\n\n" if given else ""
    return ALPACA.format(CONTEXT * bool(given), instruction, section), output


def _tools(line: Line) -> list[Any] | None:
    """Returns a line's tools, a list or, where a column needs one type, its JSON."""
    tools = line.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = parse_json(tools) if tools else None
    if tools is not None and not isinstance(tools, list):
        raise BadLine("wrong tools", f"tools are {shown(tools)}, and should be a list")
    return tools


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise BadLine("no messages", f"messages are {shown(messages)}, and should be a list")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            reason = f"message {number} is {shown(message)}, and should be an object"
            raise BadLine("no messages", reason, 'such as {"role": "user", "content": "Hi"}')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            reason = f"message {number} has the unknown role {shown(role)}"
            raise BadLine("unknown role", reason, f"one of {', '.join(ROLES)}")
        if isinstance(content, list):
            _require_text_parts(number, content)
        elif not (is_text(content) or "tool_calls" in message):
            reason = f"message {number}, the {role}'s, has no content"
            raise BadLine("no content", reason, "its content is a text")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadLine("no completion", "no message is the assistant's")
    return messages


def _require_text_parts(number: int, parts: list[Any]) -> None:
    """Raises BadLine unless each part of a content is OpenAI's `{"type": "text", "text": ...}`."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            reason = f"message {number} has a part of type {shown(kind)}"
            raise BadLine("no text", reason, "models of text read parts of type 'text' alone")
        if not is_text(part.get("text")):
            reason = f"message {number} has a part whose text is {shown(part.get('text'))}"
            raise BadLine("no text", reason)
