"""Chat templates against transformers: the text, its tokens, and which are the assistant's."""

import json

import pytest
from chats import BUSY, MARKED, PLAIN, REWRITING, talks, tokenizer

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.chat_program import TemplateFault
from mtcli.core.data.chat_template import ChatTemplate, load_chat_template, special_tokens
from mtcli.core.data.tokenize import byte_tokenizer, load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}]
TALKS = [line["messages"] for line in talks(6)]
TALKS.append([*TALKS[1], {"role": "tool", "content": "42"}])
TALKS.append([{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "ends in 🙂"}])


def ours(folder):
    loaded = load_tokenizer(folder)
    return loaded, load_chat_template(folder, loaded.config)


@pytest.mark.parametrize("template", [MARKED, BUSY], ids=["chatml", "busy"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_tokens_and_the_assistant_s_are_those_of_transformers(tmp_path, template, tools):
    theirs = tokenizer(template)
    theirs.save_pretrained(tmp_path)
    loaded, chat = ours(tmp_path)
    for messages in TALKS:
        ((text, spans, _),) = chat.ask(messages, tools)()
        assert text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        wanted = theirs.apply_chat_template(messages, tools=tools, **options)
        ids, counts = loaded.encode_spans(text, spans, [1.0] * len(spans))
        assert ids == wanted["input_ids"]
        assert list(map(int, counts)) == wanted["assistant_masks"]
        assert any(counts) and not all(counts)


def test_without_markers_a_turn_is_what_it_adds_to_its_generation_prompt(tmp_path):
    theirs = tokenizer(PLAIN)
    theirs.save_pretrained(tmp_path)
    _, chat = ours(tmp_path)
    for messages in TALKS[:6]:
        ((text, spans, turns),) = chat.ask(messages)()
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        said = [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
        assert [text[first:end] for first, end in spans] == said
        assert [messages[turn]["role"] for turn in turns] == ["assistant"] * len(said)


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_a_template_is_found_where_transformers_finds_it(tmp_path, where):
    theirs = tokenizer(PLAIN)
    theirs.save_pretrained(tmp_path)
    if where != "chat_template.jinja":
        (tmp_path / "chat_template.jinja").unlink()
        path = tmp_path / "tokenizer_config.json"
        value = [{"name": "rag", "template": "x"}, {"name": "default", "template": PLAIN}]
        table = json.loads(path.read_text()) | {"chat_template": PLAIN}
        path.write_text(json.dumps(table | ({"chat_template": value} if where == "list" else {})))
    assert ours(tmp_path)[1].source == PLAIN


def test_without_a_template_there_is_none(tmp_path):
    tokenizer(None).save_pretrained(tmp_path)
    assert ours(tmp_path)[1] is None


def test_a_file_that_is_no_template_is_refused_by_name(tmp_path):
    tokenizer("{% if %}").save_pretrained(tmp_path)
    with pytest.raises(MtcliError, match=r"chat_template.jinja: its chat template is no Jinja"):
        ours(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(MtcliError, match="chat_template.jinja cannot be read"):
        ours(tmp_path)
    with pytest.raises(MtcliError, match="its chat template is no text of up to"):
        load_chat_template(None, {"chat_template": 7})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system here') }}", "refuses it: no system here"),
        ("{{ ''.__class__.__mro__ }}", "refuses it: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses it: access to attribute 'append'"),
        ("{{ missing.field }}", "refuses it: 'missing' is undefined"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "over 16777216 characters"),
        (
            "{{ messages | length }}",
            "message 1 no certain place: it does not show message 0 just once",
        ),
    ],
)
def test_a_template_that_refuses_escapes_or_never_ends_is_stopped(template, said):
    messages = TALKS[1] + TALKS[1]
    with pytest.raises(TemplateFault, match=said):
        ChatTemplate(template, {}).ask(messages)()


def test_special_tokens_are_read_as_text_or_as_added_tokens():
    config = {"eos_token": {"content": "<e>"}, "bos_token": "<b>", "pad_token": None}
    assert special_tokens(config) == {"eos_token": "<e>", "bos_token": "<b>"}


def test_reasoning_has_every_name_that_templates_read_it_by():
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "", "reasoning": "so"}]
    theirs = tokenizer(source).apply_chat_template(messages, tokenize=False)
    chat = ChatTemplate(source + "{% generation %}{% endgeneration %}", {})
    ((text, _, _),) = chat.ask(messages)()
    assert text == theirs == "soso"


def test_the_end_of_document_of_our_own_tokenizers_is_a_token_in_a_template(tmp_path):
    from transformers import AutoTokenizer

    loaded = byte_tokenizer()
    loaded.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    loaded, chat = ours(tmp_path)
    ((text, spans, _),) = chat.ask(TALKS[1])()
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALKS[1])["input_ids"]
    ids, counts = loaded.encode_spans(text, spans, [1.0] * len(spans))
    assert ids == theirs and ids[-1] == loaded.eod_id == 256 and counts[-1]


def said(role, content, **more):
    return {"role": role, "content": content, **more}


TWO = [said("user", "Hi"), said("assistant", "<b>Hé"), said("user", "So?"), said("assistant", "y")]
SYSTEM = said("system", "Be brief.")
REASON = {"reasoning_content": "so", "thinking": "so"}
REASONED = [TWO[0], TWO[1] | REASON, TWO[2], TWO[3] | REASON]
PARTING = {"DeepSeek-R1": "<|end|>", "Gemma 4": "<turn|>\n"}  # behind what no prompt has


def oracle(name, messages, tools=None):
    """(prompt, completion) of the last message, by transformers; where the prompt goes on with what
    no turn has, by what the template writes of a turn."""
    theirs = tokenizer(REWRITING[name])
    options = {"tools": tools, "tokenize": False}
    whole = theirs.apply_chat_template(messages, **options)
    prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    if name in PARTING:
        assert not whole.startswith(prompt)
        turn = messages[-1]["content"] + PARTING[name]
        assert whole.endswith(turn)
        return whole.removesuffix(turn), turn
    assert whole.startswith(prompt)
    return prompt, whole.removeprefix(prompt)


@pytest.mark.parametrize("name", REWRITING)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("messages", [TWO, REASONED, [*TWO, TWO[0]]], ids=["", "reasoned", "open"])
def test_what_a_template_shows_otherwise_later_is_an_example_a_turn(name, tools, messages):
    names = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    chat = ChatTemplate(REWRITING[name], names)
    wanted = [(*oracle(name, messages[:end], tools), [end - 1]) for end in (2, 4)]
    if name == "Mistral v0.3" and not tools:  # which then shows all turns alike
        ((text, spans, turns),) = chat.ask(messages, tools)()
        assert turns == [1, 3] and text.startswith("".join(wanted[1][:2]))
        assert [text[a:b] for a, b in spans] == [completion for _, completion, _ in wanted]
    else:
        found = chat.ask(messages, tools)()
        assert [(t[:a], t[a:b], turn) for t, ((a, b),), turn in found] == wanted
        assert all(example.spans[0][1] == len(example.text) for example in found)
    ((text, ((first, end),), turns),) = chat.ask(messages, tools, "last")()
    assert (text[:first], text[first:end], turns) == wanted[1] and end == len(text)


def test_a_system_s_message_that_an_answer_hides_is_in_the_prompt_as_the_model_gets_it():
    chat = ChatTemplate(REWRITING["Mistral v0.3"], {"eos_token": "</s>", "bos_token": "<s>"})
    first, second = chat.ask([SYSTEM, *TWO])()
    assert first.text == "<s>[INST] Be brief.\n\nHi[/INST] <b>Hé</s>"
    assert second.text == "<s>[INST] Hi[/INST] <b>Hé</s>[INST] Be brief.\n\nSo?[/INST] y</s>"
    for example, answer in ((first, " <b>Hé</s>"), (second, " y</s>")):
        ((begin, end),) = example.spans
        assert example.text[begin:end] == answer
    assert chat.ask([SYSTEM, *TWO], loss_on="last")() == [second]
    with pytest.raises(TemplateFault, match="Only user and assistant roles are supported!"):
        chat.ask([*TWO, said("tool", "4")], loss_on="assistant")()


@pytest.mark.parametrize("content", ["<think", "<t>", "think>\n", "<", "a</think>b", ""])
def test_no_text_that_begins_as_the_prompt_ends_is_taken_for_the_prompt(content):
    chat = ChatTemplate(REWRITING["DeepSeek-R1"], {"bos_token": "<s>"})
    talk = [said("user", "Hi"), said("assistant", content)]
    ((text, ((first, end),), _),) = chat.ask(talk)()
    assert text == "<s><|User|>Hi<|Assistant|>" + content.split("</think>")[-1] + "<|end|>"
    assert text[:first] == "<s><|User|>Hi<|Assistant|>" and end == len(text)


@pytest.mark.parametrize("tag", ["<tool>", "<text>"], ids=["of a call", "of any turn"])
def test_a_tag_that_begins_as_the_prompt_s_is_the_turn_s(tag):
    source = "{% for m in messages %}{% if m.role != 'user' %}<A>{% endif %}"
    source += f"{{% if m.tool_calls %}}{tag}{{% elif m.role != 'user' %}}<text>{{% endif %}}"
    source += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    chat = ChatTemplate(source + "{% if add_generation_prompt %}<A><think>{% endif %}", {})
    asked = said("user", [{"type": "text", "text": "Hi"}])
    ((text, ((first, end),), _),) = chat.ask([asked, said("assistant", [], tool_calls=[{}])])()
    assert (text[:first], text[first:end]) == ("Hi<A>", tag)


@pytest.mark.parametrize(
    ("shown", "prompt", "talk", "why"),
    [
        ("<{{ m.content }}>", "?", TWO[1:2], "message 0 .*: its generation prompt is no part"),
        ("{{ m.content }};", ">", TWO[:2], "message 1 .*: it begins otherwise than its generation"),
        ("{{ m.content }}{{ m.content }}", ">", TWO[:2], "it does not show message 0 just once"),
        ("{{ m.content if m.role == 'user' }}<A>", "<A><b>", TWO[:2], "message 1 just once"),
        (
            "{{ m.content }}", "{{ '<a>' if messages[0].content == 'Hi' else '<b>' }}", TWO[:2],
            "what it writes there depends on message 0",
        ),
    ],
)  # fmt: skip
def test_a_turn_without_a_certain_place_is_refused_by_its_number(shown, prompt, talk, why):
    source = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    chat = ChatTemplate(source + f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}", {})
    for loss_on in ("assistant", "last"):
        with pytest.raises(TemplateFault, match=why) as caught:
            chat.ask(talk, loss_on=loss_on)()
        assert "{% generation %}" in caught.value.hint


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "unmarked"])
def test_the_last_turn_alone_is_what_comes_behind_its_prompt(template):
    chat, theirs = ChatTemplate(template, {}), tokenizer(PLAIN)
    for messages in (TWO, [SYSTEM, *TWO, TWO[0]]):
        until = messages[: 4 + (messages[0] is SYSTEM)]
        ((text, ((first, end),), turns),) = chat.ask(messages, loss_on="last")()
        assert text == theirs.apply_chat_template(until, tokenize=False)
        prompt = theirs.apply_chat_template(until[:-1], tokenize=False, add_generation_prompt=True)
        assert (text[:first], turns) == (prompt, [len(until) - 1])
        assert text[first:end] == "y<|im_end|>" + "\n" * (template is PLAIN)


def test_markers_that_move_are_refused_of_the_last_turn_alone():
    source = (
        "{% for m in messages %}{% generation %}{{ loop.length }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(TemplateFault, match="marks other text of messages before 3 than without"):
        ChatTemplate(source, {}).ask(TWO, loss_on="last")()
