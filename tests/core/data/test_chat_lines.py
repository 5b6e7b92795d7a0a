"""Lines of every convention: the messages they become, against these messages written by hand."""

import json

import pytest
from chats import MARKED, PLAIN, tokenizer, write_lines
from test_conversations import read, unpacked

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.bad_lines import BadLine
from mtcli.core.data.chat_lines import chat_line
from mtcli.core.data.chat_template import ChatTemplate


def said(role, content, **others):
    return {"role": role, "content": content} | others


HI, YES, BYE, OH = said("user", "Hi"), said("assistant", "Yes?"), said("user", "Bye"), "Oh"
ADD = {"name": "add", "arguments": {"a": 1}}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
ALPACA = {"instruction": "Add them.", "input": "1 and 2", "output": "3"}
LINES = [
    ({"conversations": SHAREGPT}, [HI, YES]),
    ({"conversations": SHAREGPT, "system": "Be brief."}, [said("system", "Be brief."), HI, YES]),
    ({"conversations": [SHAREGPT[0], SHAREGPT[1] | {"weight": 0.5}]}, [HI, YES | {"weight": 0.5}]),
    ({"conversations": [HI, YES]}, [HI, YES]),
    (
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": json.dumps(ADD)}]},
        [HI, said("assistant", "", tool_calls=[{"type": "function", "function": ADD}])],
    ),
    (
        {"conversations": [*SHAREGPT, {"from": "observation", "value": "4"}, SHAREGPT[1]]},
        [HI, YES, said("tool", "4"), YES],
    ),
    (ALPACA, [said("user", "Add them.\n1 and 2"), said("assistant", "3")]),
    (ALPACA | {"input": ""}, [said("user", "Add them."), said("assistant", "3")]),
    (
        ALPACA | {"input": "", "history": [["Hi", "Yes?"]], "system": "Sum."},
        [said("system", "Sum."), HI | {"weight": 0.0}, YES | {"weight": 0.0},
         said("user", "Add them."), said("assistant", "3")],
    ),
    ({"prompt": [HI, YES, BYE], "completion": [said("assistant", OH)]},
     [*(one | {"weight": 0.0} for one in (HI, YES, BYE)), said("assistant", OH)]),
    ({"prompt": "Hi", "completion": "Yes?"}, [HI, YES]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "messages"), LINES, ids=str)
def test_a_line_of_any_convention_becomes_these_messages(line, messages):
    chat = chat_line(line)
    assert chat.messages == messages and line.keys() <= chat.keys


def test_tools_are_a_list_or_its_json():
    tools = [{"type": "function", "function": ADD}]
    for form in (tools, json.dumps(tools)):
        assert chat_line({"messages": [HI, YES], "tools": form}).tools == tools
    assert chat_line({"messages": [HI, YES], "tools": ""}).tools is None


BAD = [
    ({"conversations": [{"from": "boss", "value": "a"}]}, "message 0 is from 'boss'", "human, "),
    ({"conversations": [{"from": "gpt", "value": 7}]}, "message 0, the assistant's, has no", ""),
    ({"conversations": [{"from": "function_call", "value": "add"}]}, "a function_call of 'add'",
     "JSON such as"),
    ({"conversations": 7}, "messages are 7", ""),
    (ALPACA | {"output": ""}, "its output is empty", ""),
    (ALPACA | {"input": 7}, "its input is 7, no text", ""),
    (ALPACA | {"history": [["a"]]}, "its history is", "pairs of texts"),
    ({"prompt": [HI], "completion": "a"}, "a list of messages, and its completion 'a'", "both"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "it is a preference pair", "chosen ones"),
    ({"chosen": [HI, YES], "rejected": [HI, YES]}, "it is a preference pair", "as completion"),
    ({"prompt": "a", "completion": "b", "label": False}, "is labelled false", "without label"),
    ({"messages": [said("user", [{"type": "image_url", "image_url": {"url": "x"}}]), YES]},
     "message 0 has a part of type 'image_url'", "parts of type 'text' alone"),
    ({"messages": [said("user", [{"type": "text"}]), YES]}, "a part whose text is null", ""),
    ({"messages": [said("user", ["a"]), YES]}, "a part of type null", ""),
    ({"text": "a"}, "it has no prompt; its keys are ['text']", "ShareGPT or Alpaca"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason", "hint"), BAD, ids=str)
def test_a_line_of_no_convention_is_bad(line, reason, hint):
    with pytest.raises(BadLine) as told:
        chat_line(line)
    assert reason in told.value.reason and hint in told.value.hint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer(MARKED).save_pretrained(path)
    return path


def test_without_a_template_alpaca_has_its_own_prompt(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", [ALPACA, ALPACA | {"input": ""}])
    theirs = tokenizer(None)
    prompts = [
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "Add them.\n\n### Input:\n1 and 2\n\n### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd them.\n\n### Response:\n",
    ]
    examples = unpacked(read(path, folder, most=512, templated=False))
    for (ids, weights), prompt in zip(examples, prompts, strict=True):
        size = len(theirs(prompt)["input_ids"])
        assert ids == [*theirs(f"{prompt}3")["input_ids"], theirs.eos_token_id]
        assert weights == [0.0] * size + [1.0] * (len(ids) - size)


def test_a_prompt_of_messages_has_no_loss(tmp_path, folder):
    turns = {"prompt": [HI, YES, BYE], "completion": [said("assistant", OH)]}
    whole = {"messages": [HI, YES, BYE, said("assistant", OH)]}
    path = write_lines(tmp_path / "a.jsonl", [turns, whole])
    (ids, weights), (same, counts) = unpacked(read(path, folder))
    last = max(i for i, (a, b) in enumerate(zip(counts, counts[1:], strict=False)) if a < b) + 1
    assert ids == same and weights == [0.0] * last + counts[last:]
    assert sum(weights) == len(b"Oh<|im_end|>") - len("<|im_end|>") + 1


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
def test_a_loss_on_all_counts_every_token_but_the_first(tmp_path, template):
    theirs = tokenizer(template)
    theirs.save_pretrained(tmp_path / "t")
    lines = [
        {"messages": [HI, YES, BYE, said("assistant", OH)]},
        {"prompt": [HI], "completion": [YES], "weight": 0.5},
        ALPACA | {"history": [["Hi", "Yes?"]]},
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    found = list(unpacked(read(path, tmp_path / "t", loss_on="all")))
    for (ids, weights), line, weight in zip(found, lines, (1.0, 0.5, 1.0), strict=True):
        messages = chat_line(line, on_all=True).messages
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        assert weights == [0.0] + [weight] * (len(ids) - 1)
    write_lines(path, [{"messages": [HI, YES | {"weight": 0.5}]}])
    with pytest.raises(MtcliError, match="1 spans of its text have a loss, and 2 messages are in"):
        read(path, tmp_path / "t", loss_on="all")
    write_lines(path, [{"prompt": "Hi", "completion": " you"}])
    ((ids, weights),) = unpacked(read(path, tmp_path / "t", templated=False, loss_on="all"))
    assert weights == [0.0] + [1.0] * (len(ids) - 1)


PARTS = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}"
PARTS += "{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [MARKED, PARTS], ids=["text", "parts"])
def test_parts_of_a_content_go_to_the_templates_that_show_them(template):
    parts = [said(m["role"], [{"type": "text", "text": t} for t in m["content"]])
             for m in (HI, YES)]  # fmt: skip
    ((text, _, _),) = ChatTemplate(template, {}).ask(parts, loss_on="last")()
    shown = "user:Hiassistant:Yes?" if template == PARTS else (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    )  # fmt: skip
    assert text == shown


def test_keys_that_no_convention_reads_are_named(tmp_path, folder):
    lines = [{"conversations": SHAREGPT, "id": 7, "source": "x"}, ALPACA | {"id": 8}]
    found = read(write_lines(tmp_path / "a.jsonl", lines), folder)
    assert found.unread_keys == {"id": 2, "source": 1}
