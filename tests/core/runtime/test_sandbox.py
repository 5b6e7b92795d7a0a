"""Programs of strangers: each ends within its limits, and its process with its parent."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mtcli.core.data.chat_program import ChatProgram
from mtcli.core.data.chat_template import ChatTemplate
from mtcli.core.runtime import sandbox
from mtcli.core.runtime.sandbox import OverLimit, Sandbox

LOOPS = "".join(f"{{% for i{n} in range(9) %}}" for n in range(20)) + "{% endfor %}" * 20
DOUBLING = "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
ECHO = "{{ messages[0].content }}{% generation %}{% endgeneration %}"
PARENT = """
import sys
from mtcli.core.data.chat_program import ChatProgram
from mtcli.core.runtime import sandbox
sandbox.SECONDS = 0.5
made = sandbox.Sandbox("them", ChatProgram, sys.argv[1], {})
print(made._process.pid, flush=True)
made.ask([[], None, "assistant"])
print(made.answer(), flush=True)
sys.stdin.read()
"""


def talk(content):
    return [{"role": "user", "content": content}]


def text_of(answer):
    (example,) = answer()
    return example.text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, "takes over 0.5 s of processor time"),
        ("{{ 3 ** (9 ** 8) }}", "takes over 0.5 s of processor time"),
        (DOUBLING + "{% endfor %}", "takes over 128 MiB of memory"),
        ("{{ '%2000000000d' % 1 }}", "takes over 128 MiB of memory"),
        ("{{ 'a' * 10 ** 9 }}", "takes over 128 MiB of memory"),
        ("{{ [0] * 10 ** 9 }}", "takes over 128 MiB of memory"),
    ],
)
def test_a_template_that_never_ends_or_fills_the_memory_is_ended(template, said, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "MAX_BYTES", 128 << 20)
    with pytest.raises(OverLimit, match=f"^their/own.jinja {said}$"):
        ChatTemplate(template, {}, Path("their/own.jinja")).ask(talk("a"))()


@pytest.mark.parametrize("template", ["x", LOOPS], ids=["idle", "busy"])
def test_the_process_ends_with_its_parent(template):
    command = [sys.executable, "-c", PARENT, template]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        if template == "x":
            assert parent.stdout.readline() == b"[[['x', [], []]], None]\n"
        assert process.is_running()
        parent.kill()
    process.wait(20)


def test_the_process_ends_with_what_it_was_made_for():
    made = Sandbox("them", ChatProgram, ECHO, {})
    process = made._process
    del made
    assert process.returncode == -signal.SIGKILL  # which a busy one does not outlive either


def test_a_process_that_dies_is_told_by_its_signal():
    made = Sandbox("them.jinja", ChatProgram, ECHO, {})
    made._process.kill()
    made.ask([talk("a"), None, "assistant"])
    with pytest.raises(OverLimit, match=r"them.jinja ends the process .* with exit code -9"):
        made.answer()


def test_answers_come_in_the_order_of_requests_however_large_they_are():
    made, texts = ChatTemplate(ECHO, {}), [f"{n}" * 50_000 for n in range(9)]
    answers = [made.ask(talk(text)) for text in texts[:6]]
    found = [text_of(answers[0])]
    answers += [made.ask(talk(text)) for text in texts[6:]]
    assert found + [text_of(answer) for answer in answers[1:]] == texts


def test_halves_of_a_surrogate_pair_stay_apart():
    assert text_of(ChatTemplate(ECHO, {}).ask(talk("\ud83d\ude42\n🙂"))) == "\ud83d\ude42\n🙂"


def test_a_request_that_json_cannot_hold_is_refused():
    made, deep = Sandbox("them", ChatProgram, ECHO, {}), []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="it is nested too deeply"):
        made.ask([deep, None, "assistant"])


def test_no_module_of_the_current_folder_is_imported(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(tmp_path)
    assert text_of(ChatTemplate(ECHO, {}).ask(talk("a"))) == "a"
