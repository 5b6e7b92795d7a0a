"""Tokenizers of the kinds that families publish, against transformers: the ids of texts and talks,
which tokens are the assistant's, where a prompt ends, and what is decoded."""

import json
from pathlib import Path

import pytest
from family_tokenizers import KINDS, TEXT, make

from mtcli.core.data.chat_template import load_chat_template
from mtcli.core.data.conversations import ExampleTokenizer, read_examples
from mtcli.core.data.tokenize import load_tokenizer

TEXTS = [
    TEXT,
    "",
    " ",
    "  two",
    "x  \n\n y",
    " a",
    "a ",
    "日本🙂é",
    "<bos>a</s>",
    "▁a",
    "\t1 2\r\n",
]
TURNS = [
    ("user", "What is 1 + 1?"), ("assistant", " It's 2. 🙂"),
    ("user", "  Sure?\n"), ("assistant", "Yes,\n\nI am.  "),
]  # fmt: skip
TALK = [{"role": role, "content": content} for role, content in TURNS]
SYSTEM = {"role": "system", "content": "Be brief, 日本."}
PARAMETERS = {"type": "object", "properties": {"b": {"type": "array", "items": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
THOUGHT = [*TALK[:3], TALK[3] | {"reasoning_content": "so\nso", "thinking": "so\nso"}]
PARTS = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]
LINES = {
    "parts": {"messages": PARTS},
    "plain": {"messages": TALK},
    "system": {"messages": [SYSTEM, *TALK]},
    "tools": {"messages": TALK, "tools": TOOLS},
    "thought": {"messages": THOUGHT},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """By kind: transformers' tokenizer, and its folder."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: (make(root / kind, kind), root / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_transformers_and_so_is_the_text_back(tokenizers, kind):
    theirs, folder = tokenizers[kind]
    ours = load_tokenizer(folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids, text
        if not theirs.bos_token or not text.startswith(theirs.bos_token):  # else once alone
            assert ours.encode_prompt(text) == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
        assert theirs.unk_token_id is None or theirs.unk_token_id not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_goes_on_with_the_prompt(tokenizers, kind):
    theirs, folder = tokenizers[kind]
    ours = load_tokenizer(folder)
    ids = ours.encode_prompt("The capital of France is Paris.\n\n  def x 日本")
    for cut in range(1, len(ids)):
        before, whole = theirs.decode(ids[:cut]), theirs.decode(ids)
        if "�" not in before:  # the bytes of one letter on both sides
            assert before + ours.decode_after(ids[:cut], ids[cut:]) == whole


def expected(theirs, messages, tools):
    """(ids, mask) of the examples of a talk: all turns of it where each is what it adds to its
    prompt, also once others follow, else one a turn; by transformers' texts and offsets."""
    options = {"tools": tools, "tokenize": False}
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole, spans, examples = theirs.apply_chat_template(messages, **options), [], []
    for turn in turns:
        prompt = theirs.apply_chat_template(messages[:turn], add_generation_prompt=True, **options)
        said = theirs.apply_chat_template(messages[: turn + 1], **options)
        assert said.startswith(prompt)
        spans.append((len(prompt), len(said)))
        examples.append((said, spans[-1:]))
        if not whole.startswith(said):
            whole = None
            break
    if whole is None:
        examples = []
        for turn in turns:
            prompt = theirs.apply_chat_template(
                messages[:turn], add_generation_prompt=True, **options
            )
            said = theirs.apply_chat_template(messages[: turn + 1], **options)
            examples.append((said, [(len(prompt), len(said))]))
    else:
        examples = [(whole, spans)]
    for text, counted in examples:
        encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        inside = [
            any(a < last and first < b for first, last in counted)
            for a, b in encoded.offset_mapping
        ]
        yield encoded.input_ids, list(map(float, inside))


# Templates of Gemma and Mistral also show contents that are lists of parts.
CASES = [(k, n) for k in KINDS for n in LINES if n != "parts" or k.startswith(("gemma", "mistral"))]


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_talks_have_transformers_tokens_and_the_assistant_s_are_counted(
    tokenizers, tmp_path, kind, line
):
    theirs, folder = tokenizers[kind]
    loaded = load_tokenizer(folder)
    template = load_chat_template(folder, loaded.config)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(LINES[line]) + "\n")
    encoder = ExampleTokenizer(loaded, template, 1000, False, "assistant")
    examples = read_examples(Path(path), encoder, "data.train")
    bounds = [0, *examples.ends.tolist()]
    found = [
        (examples.tokens[a:b].tolist(), examples.weights[a:b].tolist())
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    wanted = list(expected(theirs, LINES[line]["messages"], LINES[line].get("tools")))
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    assert [mask for _, mask in found] == [mask for _, mask in wanted]
    assert all(0 < sum(mask) < len(mask) for _, mask in found)
    bos = theirs.bos_token_id
    assert bos is None or all(ids.count(bos) <= 1 for ids, _ in found)
