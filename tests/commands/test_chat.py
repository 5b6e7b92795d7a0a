"""`mtcli generate --chat`: prompts as transformers renders them, and a talk on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from chats import BUSY, MARKED, REWRITING, save_model, tokenizer
from command_line import mtcli

from mtcli.core.config.errors import MtcliError, visible
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.inference.chat import ChatPrompts

SYSTEM, QUESTION, COUNT = "Be brief, 日本.", "2 + 2?", 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, transformers' model, its tokenizer)."""
    folder = tmp_path_factory.mktemp("model")
    made = save_model(folder, max_position_embeddings=512)
    return folder, made, tokenizer()


def reply_of(model, made, messages, count=COUNT):
    """transformers' greedy reply."""
    text = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = made(text, add_special_tokens=False, return_tensors="pt").input_ids
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    new = found[0, ids.shape[1] :].tolist()
    ends = [new.index(id) for id in model.generation_config.eos_token_id if id in new]
    return made.decode(new[: min(ends, default=None)])


def asked(text, *earlier):
    return [*earlier, {"role": "user", "content": text}]


@pytest.mark.parametrize("system", [None, SYSTEM])
def test_a_prompt_is_a_users_turn_by_the_folders_template(model, system):
    folder, theirs, made = model
    flags = ["--system", system] if system else []
    words = ["--chat", "--prompt", QUESTION, "--prompt", "no", "--max-tokens", COUNT, *flags]
    done = mtcli("generate", folder, *words, "--json", "-")
    assert done.returncode == 0, done.stderr
    first = [{"role": "system", "content": system}] if system else []
    expected = [reply_of(theirs, made, asked(text, *first)) for text in (QUESTION, "no")]
    generated = json.loads(done.stdout)["generated"]
    assert [one["text"] for one in generated] == expected
    assert [one["prompt"] for one in generated] == [QUESTION, "no"]


def test_templates_with_marks_and_rules_render_as_in_transformers(tmp_path):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b"},
        {"role": "user", "content": "c"},
    ]
    for number, template in enumerate([MARKED, BUSY, *REWRITING.values()]):
        made = tokenizer(template)
        made.save_pretrained(tmp_path / str(number))
        chat = ChatPrompts(load_tokenizer(tmp_path / str(number)), tmp_path / str(number))
        for messages in (talk, talk[:1]):
            expected = made.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert chat.text(messages) == expected
            assert chat.encode(expected) == made(expected, add_special_tokens=False).input_ids
        assert chat.text(talk[:2], False) == made.apply_chat_template(
            talk[:2], tokenize=False, continue_final_message=True
        )
    refused = [*talk, {"role": "system", "content": "late"}]
    chat = ChatPrompts(load_tokenizer(tmp_path / "1"), tmp_path / "1")
    with pytest.raises(MtcliError, match="the system speaks first") as caught:
        chat.text(refused)
    assert caught.value.code == 2 and caught.value.problems[0].hint


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words, folder="."):
        self.handle, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mtcli", *map(str, words)],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=folder,
            env=os.environ | {"TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def until(self, pattern, seconds=120.0):
        """The output up to a pattern, which is taken from it."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.handle], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.handle, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    raise AssertionError(self.seen + self.process.stderr.read().decode()) from None
        found, self.seen = self.seen[: match.start()], self.seen[match.end() :]
        return found.replace("\r\n", "\n")

    def type(self, text):
        os.write(self.handle, text.encode())

    def reply(self, line):
        """The answer to a line, without the line's echo."""
        self.type(f"{line}\n")
        self.until(re.escape(line) + r"\r\n")
        return self.until(r"\r\n> ")


@pytest.fixture
def talk(model, tmp_path):
    started = []

    def begin(*words):
        words = ("generate", model[0], "--chat", *words)
        started.append(Terminal(*words, folder=tmp_path))
        started[-1].until("Ctrl-D ends\r\n> ")
        return started[-1]

    yield begin
    for terminal in started:
        terminal.process.kill()
        terminal.process.wait()
        terminal.process.stderr.close()
        os.close(terminal.handle)


def shown(text):
    return visible(text).replace("\r\n", "\n")


def test_a_talk_has_a_history_that_is_saved_and_reset(model, talk, tmp_path):
    _, theirs, made = model
    terminal = talk("--system", SYSTEM, "--max-tokens", COUNT)
    messages = [{"role": "system", "content": SYSTEM}]
    for line in ("one", "two"):
        messages = asked(line, *messages)
        reply = reply_of(theirs, made, messages)
        assert terminal.reply(line) == shown(reply)
        messages.append({"role": "assistant", "content": reply})
    assert terminal.reply("/save talk.jsonl") == "wrote talk.jsonl"
    assert json.loads((tmp_path / "talk.jsonl").read_text()) == {"messages": messages}
    assert "error: there is no /what" in terminal.reply("/what")
    assert "error: no file is named" in terminal.reply("/save")
    terminal.type("/reset\n")
    terminal.until(r"/reset\r\n> ")
    expected = reply_of(theirs, made, asked("two", {"role": "system", "content": SYSTEM}))
    assert terminal.reply("two") == shown(expected)
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_stops_a_reply_and_the_talk_goes_on(model, talk, tmp_path):
    ends = model[1].generation_config.eos_token_id
    terminal = talk(*[word for id in ends for word in ("--logit-bias", f"{id}=-1000")])
    terminal.type("one\n")
    terminal.until(r"one\r\n.")  # a first character of the reply
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until(r"\r\n> ")
    terminal.reply("/save talk.jsonl")
    (_, reply) = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert reply["role"] == "assistant" and 0 < len(reply["content"]) < 480
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_flags_of_files_have_no_use_in_a_talk(model, tmp_path):
    words = ("generate", model[0], "--chat", "--n", "2", "--output", "o.jsonl")
    terminal = Terminal(*words, folder=tmp_path)
    assert terminal.process.wait(120) == 2
    errors = terminal.process.stderr.read().decode()
    terminal.process.stderr.close()
    os.close(terminal.handle)
    assert "--n: it is of texts for prompts, and a talk has none" in errors
    assert "--output: it is of texts" in errors
