"""Chat templates against transformers: the text, its tokens, and which are the assistant's."""

import json

import pytest
from chats import BUSY, MARKED, PLAIN, talks, tokenizer

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.chat_template import (
    ChatTemplate,
    load_chat_template,
    special_tokens,
)
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
        text, spans = chat.ask(messages, tools)()
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
        text, spans = chat.ask(messages)()
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        said = [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
        assert [text[first:end] for first, end in spans] == said


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
        ("{{ messages | length }}", "shows message 1 otherwise once others follow it"),
    ],
)
def test_a_template_that_refuses_escapes_or_never_ends_is_stopped(template, said):
    messages = TALKS[1] + TALKS[1]
    with pytest.raises(ValueError, match=said):
        ChatTemplate(template, {}).ask(messages)()


def test_special_tokens_are_read_as_text_or_as_added_tokens():
    config = {"eos_token": {"content": "<e>"}, "bos_token": "<b>", "pad_token": None}
    assert special_tokens(config) == {"eos_token": "<e>", "bos_token": "<b>"}


def test_reasoning_has_every_name_that_templates_read_it_by():
    source = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "", "reasoning": "so"}]
    theirs = tokenizer(source).apply_chat_template(messages, tokenize=False)
    text = ChatTemplate(source + "{% generation %}{% endgeneration %}", {}).ask(messages)().text
    assert text == theirs == "soso"


def test_the_end_of_document_of_our_own_tokenizers_is_a_token_in_a_template(tmp_path):
    from transformers import AutoTokenizer

    loaded = byte_tokenizer()
    loaded.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    loaded, chat = ours(tmp_path)
    text, spans = chat.ask(TALKS[1])()
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALKS[1])["input_ids"]
    ids, counts = loaded.encode_spans(text, spans, [1.0] * len(spans))
    assert ids == theirs and ids[-1] == loaded.eod_id == 256 and counts[-1]
