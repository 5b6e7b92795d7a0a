"""Time that limits of time and memory on a stranger's templates cost a normal file.

A template is rendered in a process of its own (`core/runtime/sandbox.py`), which is sent each line
as JSON. What it is compared with renders the same lines in the process that reads them. Both read
the whole file, to tokens, the sandbox's start included. They run in turn. Both the clock's time is
told, where the sandbox has a core of its own, and that of processors, user and system, of the two:
  chats     conversations of some 300 tokens, by the template of Qwen2.5
  last      the same, with a loss on the last turn alone
  marked    the same, by a template that marks what the assistant writes
  items     rows of HellaSwag, by the task's own templates
The goal is 10 % of the clock's time for each.

    python benchmarks/bench_template_limits.py [--lines 20000] [--repeats 5] [--json FILE]
"""

import argparse
import json
import random
import resource
import shutil
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

from arguments import Arguments, write_rows
from progress import in_turn, say

from mtcli.core.data import chat_template
from mtcli.core.data.conversations import ExampleTokenizer, read_examples
from mtcli.core.data.tokenize import load_tokenizer, train_tokenizer
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.tasks import items
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task
from mtcli.core.runtime.sandbox import Sandbox

GOAL = 1.10
WITH, WITHOUT = "with limits", "without"
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'SYSTEM' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("SYSTEM", SYSTEM)
MARKED = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"""
TEMPLATES = {"chats": QWEN, "last": QWEN, "marked": MARKED}


def main():
    parser = Arguments(__doc__, lines=50, repeats=1, cases=["chats"])
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[*TEMPLATES, "items"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), args.lines)
        rows = [measure(case, args.repeats, Path(folder)) for case in args.cases]
    write_rows(args.json, rows)


def measure(case, repeats, folder):
    """Prints and returns a case's seconds, and the median ratio of pairs, by each measure."""
    runs = {WITH: [], WITHOUT: []}
    read(case, WITHOUT, folder)  # imports, and what is compiled once
    for contender in in_turn(runs, repeats):
        runs[contender].append(read(case, contender, folder))
    row = {"case": case}
    for number, measured in enumerate(("clock", "processors")):
        seconds = {name: [run[number] for run in taken] for name, taken in runs.items()}
        ratios = [a / b for a, b in zip(seconds[WITH], seconds[WITHOUT], strict=True)]
        row[measured] = {"seconds": seconds, "ratio": median(ratios)}
        medians = ", ".join(f"{median(times):.2f} s {name}" for name, times in seconds.items())
        text = f"{case:7} {measured:10} {medians}: {median(ratios):.3f}"
        text += f" ({min(ratios):.3f} to {max(ratios):.3f})"
        if measured == "clock":
            text += f"; goal {GOAL:.2f} {'met' if median(ratios) <= GOAL else 'MISSED'}"
        say(text)
    return row


def read(case, contender, folder):
    """Reads a case's file to tokens; returns the clock's seconds, and the processors'."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    cache = folder / "talks.jsonl.cache"
    with patched(Sandbox if contender == WITH else Unlimited):
        start, before = time.perf_counter(), used()
        if case == "items":
            options = TaskOptions(1024)
            prepare_task(load_task("hellaswag"), folder, eval_tokenizer(tokenizer), options)
        else:
            loss_on = "last" if case == "last" else "assistant"
            template = chat_template.ChatTemplate(TEMPLATES[case], {})
            tokenize = ExampleTokenizer(tokenizer, template, 8192, False, loss_on)
            read_examples(folder / "talks.jsonl", tokenize, "")
            del template, tokenize  # which ends the sandbox, whose time then counts
        seconds = time.perf_counter() - start, used() - before
    shutil.rmtree(cache, ignore_errors=True)
    return seconds


@contextmanager
def patched(sandbox):
    """Has chat templates and tasks render in such a sandbox."""
    with patch.object(chat_template, "Sandbox", sandbox), patch.object(items, "Sandbox", sandbox):
        yield


def used():
    """The seconds of a processor of this process and of those that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Unlimited:
    """Stands in for a Sandbox: the same program, called in this process."""

    def __init__(self, _name, build, *arguments):
        self._work, self._requests = build(*arguments), deque()

    def ask(self, request):
        self._requests.append(request)
        return 1

    def answer(self):
        return self._work(self._requests.popleft())


def write_files(folder, count):
    """Writes talks, rows of HellaSwag, and a tokenizer of the words that these are made of."""
    draw = random.Random(1)
    source = Path(random.__file__).read_text() + Path(argparse.__file__).read_text()
    words = [word for word in source.split() if "[" not in word]  # the task drops what is in them

    def text(least, most):
        size = draw.randint(least, most)
        first = draw.randrange(len(words) - size)
        return " ".join(words[first : first + size])

    def talk(number):
        messages = [{"role": "system", "content": text(5, 25)}] if number % 3 == 0 else []
        for _ in range(draw.choice((1, 1, 2, 3))):
            messages.append({"role": "user", "content": text(5, 60)})
            messages.append({"role": "assistant", "content": text(20, 150)})
        return {"messages": messages}

    def row(number):
        context = {"ctx_a": text(10, 30), "ctx_b": text(1, 5), "activity_label": text(2, 4)}
        endings = [text(5, 25) for _ in range(4)]
        return context | {"ind": number, "endings": endings, "label": number % 4}

    for name, line in (("talks.jsonl", talk), ("hellaswag_val.jsonl", row)):
        lines = (json.dumps(line(number)) + "\n" for number in range(count))
        (folder / name).write_text("".join(lines))
    train_tokenizer([source], 8192).save(folder / "tokenizer")


if __name__ == "__main__":
    main()
