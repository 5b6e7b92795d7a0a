"""Lines of conversations: which tokens they become, what is refused, and what is kept."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from chats import MARKED, PLAIN, REWRITING, sums, talks, tokenizer, write_lines

from mtcli.core.config.errors import MtcliError
from mtcli.core.data import bad_lines, conversations
from mtcli.core.data.chat_template import load_chat_template
from mtcli.core.data.conversations import ExampleTokenizer, read_examples
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.runtime.sandbox import OverLimit

BAD = {
    b"not json": "it is not JSON",
    b"[1]": "it is no JSON object",
    b'{"prompt": "a"}': "it has no completion",
    b'{"completion": "a"}': "it has no prompt",
    b'{"prompt": "a", "completion": ""}': "its completion is empty",
    b'{"prompt": "a", "completion": 7}': "its completion is 7, no text",
    b'{"prompt": "a", "completion": "\\ud800"}': "no text",
    b'{"messages": []}': "should be a list",
    b'{"messages": [7]}': "message 0 is 7",
    b'{"messages": [{"role": "boss", "content": "a"}]}': "unknown role 'boss'",
    b'{"messages": [{"role": "user", "content": 7}]}': "message 0, the user's, has no content",
    b'{"messages": [{"role": "user", "content": "a"}]}': "no message is the assistant's",
    b'{"prompt": "a", "completion": "b", "tools": 7}': "tools are 7",
    b"\xff\xff": "it is not JSON",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer(MARKED).save_pretrained(path)
    return path


@cache  # a chat template takes a process
def encoder(folder, most=128, skip_bad=False, templated=True, loss_on="assistant"):
    loaded = load_tokenizer(folder)
    template = load_chat_template(folder, loaded.config) if templated else None
    return ExampleTokenizer(loaded, template, most, skip_bad, loss_on)


def read(path, *arguments, **options):
    return read_examples(Path(path), encoder(*arguments, **options), "data.train")


def unpacked(examples):
    bounds = [0, *examples.ends.tolist()]
    for first, end in zip(bounds, bounds[1:], strict=False):
        yield examples.tokens[first:end].tolist(), examples.weights[first:end].tolist()


def test_lines_become_the_tokens_that_transformers_gives(tmp_path, folder):
    lines = [*talks(5), *sums(5)]
    found = list(unpacked(read(write_lines(tmp_path / "a.jsonl", lines), folder)))
    theirs = tokenizer(MARKED)
    for line, (ids, counts) in zip(lines, found, strict=True):
        pair = [{"role": "user", "content": line.get("prompt")}]
        pair.append({"role": "assistant", "content": line.get("completion")})
        wanted = theirs.apply_chat_template(
            line.get("messages", pair), return_dict=True, return_assistant_tokens_mask=True
        )
        assert (ids, counts) == (wanted["input_ids"], wanted["assistant_masks"])


def test_without_a_template_the_completion_and_the_end_of_document_count(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "Hé", "completion": " you"}])
    ((ids, counts),) = unpacked(read(path, folder, templated=False))
    theirs = tokenizer(None)
    end = theirs.eos_token_id
    assert ids == [*theirs("Hé")["input_ids"], *theirs(" you")["input_ids"], end]
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1]
    write_lines(path, talks(1))
    with pytest.raises(MtcliError, match="a.jsonl:1: it has messages, and the tokenizer has no"):
        read(path, folder, templated=False)


FOUR = ("user", "assistant", "user", "assistant")


def talk(first, second=None, **others):
    """A talk of two turns, whose assistant's messages have these keys besides."""
    keys = ({}, first, {}, second or {})
    messages = [
        {"role": role, "content": f"number {i}"} | more
        for i, (role, more) in enumerate(zip(FOUR, keys, strict=True))
    ]
    return {"messages": messages} | others


@pytest.fixture(scope="module", params=["marked", "unmarked"])
def any_folder(request, tmp_path_factory):
    """A tokenizer's folder whose template has generation markers, or has none."""
    path = tmp_path_factory.mktemp(request.param)
    tokenizer({"marked": MARKED, "unmarked": PLAIN}[request.param]).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        (talk({"weight": 0}), 0, 1),
        (talk({"train": False}), 0, 1),
        (talk({"training": False}, {"training": True}), 0, 1),
        (talk({}, {"loss_mask": 0}), 1, 0),
        (talk({"loss_mask": 1}, {"masked": True}), 1, 0),
        (talk({"weight": 0.25}, {"weight": 3}), 0.25, 3),
        (talk({"weight": 0.5}, weight=0.5), 0.25, 0.5),
    ],
    ids=str,
)
def test_a_message_s_weight_is_that_of_its_tokens(tmp_path, any_folder, line, first, second):
    whole = talk({})
    path = write_lines(tmp_path / "a.jsonl", [line, whole])
    (ids, weights), (plain, counts) = unpacked(read(path, any_folder))
    assert ids == plain, "the text is the same"
    changes = [i for i, (a, b) in enumerate(zip([0, *counts], counts, strict=False)) if a != b]
    middle = changes[2]  # where the second turn begins
    assert weights[:middle] == [first * count for count in counts[:middle]]
    assert weights[middle:] == [second * count for count in counts[middle:]]


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """A tokenizer's folder whose template shows a turn otherwise once others follow it."""
    path = tmp_path_factory.mktemp("phi")
    tokenizer(REWRITING["Phi-3"]).save_pretrained(path)
    return path


def unrolled(messages):
    """The tokens and weights of each turn by transformers: the talk up to it, its own counted."""
    theirs = tokenizer(REWRITING["Phi-3"])
    for end in (turn + 1 for turn, m in enumerate(messages) if m["role"] == "assistant"):
        ids = theirs.apply_chat_template(messages[:end])["input_ids"]
        prompt = theirs.apply_chat_template(messages[: end - 1], add_generation_prompt=True)
        size = len(prompt["input_ids"])
        assert ids[:size] == prompt["input_ids"]
        yield ids, [0] * size + [1] * (len(ids) - size)


def test_a_talk_that_is_unrolled_is_an_example_a_turn(tmp_path, phi):
    lines = [*talks(5), *sums(2)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    pairs = (
        line.get("messages")
        or [{"role": "user", "content": line["prompt"]}]
        + [{"role": "assistant", "content": line["completion"]}]
        for line in lines
    )
    wanted = [list(unrolled(messages)) for messages in pairs]
    examples = read(path, phi, most=192)
    assert list(unpacked(examples)) == [example for talk in wanted for example in talk]
    assert examples.lines.tolist() == [1, 2, 2, 3, 4, 4, 5, 6, 7]
    assert examples.turns.tolist() == [2, 1, 3, 1, 2, 4, 1, 1, 1]
    last = read(path, phi, most=192, loss_on="last")
    assert list(unpacked(last)) == [talk[-1] for talk in wanted]
    assert last.lines.tolist() == [1, 2, 3, 4, 5, 6, 7] and not last.shared.any()


def test_what_examples_of_a_talk_begin_alike_with_is_counted(tmp_path, phi, folder):
    path = write_lines(tmp_path / "a.jsonl", [talk({}), *sums(1)])
    examples = read(path, phi)
    (first, _), (second, _), _ = unpacked(examples)
    alike = first.index(tokenizer().eos_token_id)  # the first ends there, and the second goes on
    assert first[:alike] == second[:alike] and len(first) == alike + 1
    assert examples.shared.tolist() == [0, alike, 0]
    assert read(path, folder).shared.tolist() == [0, 0]


def test_a_turn_without_weight_is_no_example_and_a_long_one_makes_its_line_too_long(tmp_path, phi):
    path = write_lines(tmp_path / "a.jsonl", [talk({"weight": 0}, {"weight": 0.5}), talk({})])
    examples = read(path, phi)
    assert (examples.lines.tolist(), examples.turns.tolist()) == ([1, 2, 2], [3, 1, 3])
    (_, weights), _, (ids, counts) = unpacked(examples)
    assert weights == [0.5 * count for count in counts]
    assert len(read(path, phi, most=len(ids))) == 3
    with pytest.raises(MtcliError, match=f"it has {len(ids)} tokens, and batch.seq_len"):
        read(path, phi, most=len(ids) - 1)
    write_lines(path, [talk({}, {"train": False})])
    with pytest.raises(MtcliError, match="no token of it is the assistant's and has a weight"):
        read(path, phi, loss_on="last")


def test_weights_that_are_none_are_bad_lines_and_a_line_of_weight_0_has_nothing_to_learn(
    tmp_path, folder
):
    lines = [
        talk({"weight": -1}), talk({"weight": "1"}), talk({"train": "no"}), talk({}, weight=[1]),
        talk({"weight": 0}, {"weight": 0}), talk({}, weight=0), talk({}),
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(MtcliError) as caught:
        read(path, folder)
    said = [problem.message.partition(": ")[2] for problem in caught.value.problems]
    assert said[:4] == [
        "message 1 has the weight -1", "message 1 has the weight '1'",
        "message 1 has train='no'", "the line has the weight [1]",
    ]  # fmt: skip
    assert said[4:] == ["no token of it is the assistant's and has a weight"] * 2


def test_keys_that_nothing_reads_are_counted_and_named_once(tmp_path):
    moody = MARKED.replace("m['content']", "(m['content'] ~ m.get('mood', ''))")
    tokenizer(moody).save_pretrained(tmp_path)
    lines = [talk({"score": 3, "mood": "!"}, id=7), talk({"score": 1}, source="x"), talk({})]
    examples = read(write_lines(tmp_path / "a.jsonl", lines), tmp_path)
    assert examples.unread_keys == {"score": 2, "id": 1, "source": 1}


def test_every_bad_line_is_named_by_file_and_number_or_counted(tmp_path, folder):
    path, good = tmp_path / "bad.jsonl", json.dumps(next(sums(1))).encode()
    for line, said in BAD.items():
        path.write_bytes(b"\n".join([good, b"", line, good]))
        with pytest.raises(MtcliError) as caught:
            read(path, folder)
        (problem,) = caught.value.problems
        assert problem.message.startswith(f"{path}:3: ") and said in problem.message
        assert "--skip-bad" in problem.hint
        found = read(path, folder, skip_bad=True)
        assert len(found) == 2 and found.lines.tolist() == [1, 4]
        ((count, lines),) = found.skipped_by_kind.values()
        assert (count, lines) == (1, [3])


def test_a_file_of_another_shape_is_not_to_be_left_out_line_by_line(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", [{"question": "a"}] * 3)
    with pytest.raises(MtcliError, match="it has no prompt; its keys are") as caught:
        read(path, folder)
    assert "--skip-bad" not in str(caught.value)


def test_the_first_bad_lines_are_told_at_once_and_the_rest_counted(tmp_path, folder):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"x\n" * 13)
    with pytest.raises(MtcliError) as caught:
        read(path, folder)
    assert [p.message.split(":")[1] for p in caught.value.problems[:10]] == list(
        map(str, range(1, 11))
    )
    assert "3 more lines are bad" in caught.value.problems[10].message
    with pytest.raises(MtcliError, match="has no example: all 13 lines are bad"):
        read(path, folder, skip_bad=True)


def test_an_example_longer_than_the_context_is_reported_not_shortened(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", sums(1))
    ((ids, _),) = unpacked(read(path, folder))
    assert len(read(path, folder, most=len(ids))) == 1
    with pytest.raises(MtcliError) as caught:
        read(path, folder, most=len(ids) - 1)
    (problem,) = caught.value.problems
    assert f"a.jsonl:1: it has {len(ids)} tokens, and batch.seq_len={len(ids) - 1}" in str(problem)


def test_what_a_template_refuses_is_a_bad_line(tmp_path):
    tokenizer("{{ raise_exception('not today') }}").save_pretrained(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", sums(1))
    with pytest.raises(MtcliError, match="a.jsonl:1: the chat template refuses it: not today"):
        read(path, tmp_path)
    tokenizer("{{ messages | length }}").save_pretrained(tmp_path / "unplaced")
    with pytest.raises(MtcliError, match="a.jsonl:1: the chat template leaves message 1 no") as why:
        read(path, tmp_path / "unplaced")
    assert "put {% generation %} and {% endgeneration %} around" in why.value.problems[0].hint


def test_a_template_that_passes_a_limit_names_the_line_and_reads_no_other(tmp_path):
    source = "{% if 'slow' in messages[0].content %}{{ 'a' * 10 ** 9 }}{% endif %}"
    tokenizer(MARKED + source).save_pretrained(tmp_path)
    lines = [*sums(4), {"prompt": "slow", "completion": "b"}, *sums(4)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(OverLimit) as caught:
        read(path, tmp_path, skip_bad=True)
    said = f"{path}:5: {tmp_path}/chat_template.jinja takes over 512 MiB of memory"
    assert str(caught.value) == said


def test_bad_lines_are_told_in_their_order_and_lines_are_begun_ahead_of_them(tmp_path):
    source = "{% if 'no' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    tokenizer(MARKED + source).save_pretrained(tmp_path)
    refused = {"prompt": "no", "completion": "b"}
    path = write_lines(tmp_path / "a.jsonl", [refused, {"prompt": "a"}, refused, *sums(1)])
    found = read(path, tmp_path, skip_bad=True)
    kinds = {"no completion": (1, [2]), "refused by the chat template": (2, [1, 3])}
    assert found.skipped_by_kind == kinds and found.lines.tolist() == [4]
    with pytest.raises(MtcliError) as caught:
        read(path, tmp_path)
    where = [problem.message.partition(": ")[0] for problem in caught.value.problems]
    assert where == [f"{path}:{number}" for number in (1, 2, 3)]


def test_a_line_that_never_ends_is_refused_without_being_read_whole(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(bad_lines, "MAX_LINE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    good = json.dumps(next(sums(1))).encode()
    path.write_bytes(b"y" * 1000 + b"\n" + good + b"\n")
    found = read(path, folder, skip_bad=True)
    assert found.lines.tolist() == [2] and found.skipped_by_kind == {"too long a line": (1, [1])}


def test_what_was_read_of_a_large_file_is_kept_until_it_changes(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(conversations, "WORTH_KEEPING", 1)
    path = write_lines(tmp_path / "a.jsonl", [*talks(5), {"prompt": ""}])
    first = read(path, folder, skip_bad=True)
    monkeypatch.setattr(ExampleTokenizer, "__call__", None)  # what is kept encodes nothing
    again = read(path, folder, skip_bad=True)
    assert all(map(np.array_equal, first, again))
    assert again.skipped_by_kind == {"no completion": (1, [6])}
    changes = ({"most": 127}, {"skip_bad": False}, {"templated": False}, {"loss_on": "last"})
    for change in changes:
        with pytest.raises(TypeError):
            read(path, folder, **({"skip_bad": True} | change))
    write_lines(path, talks(4))
    with pytest.raises(TypeError):
        read(path, folder, skip_bad=True)


def test_a_missing_file_is_named(tmp_path, folder):
    with pytest.raises(MtcliError, match=r"data.train: .*gone.jsonl cannot be read: No such file"):
        read(tmp_path / "gone.jsonl", folder)
