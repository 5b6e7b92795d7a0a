"""`mtcli generate` for files of prompts: transformers' texts, written as they end, and resumed."""

import json
import math
import os
import signal

import pytest
import torch
from command_line import mtcli, start

from mtcli.core.data.tokenize import byte_tokenizer
from mtcli.core.inference.prompts import TextsFile

LINES = ["The cat", "one", "a longer prompt than the others", "x", "The cat sat on"]
COUNT = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder of a GPT-2 of bytes, transformers' greedy texts after `LINES`, its model)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    made = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.4, eos_token_id=256)).eval()
    made.save_pretrained(folder)
    byte_tokenizer().save(folder)
    texts = []
    for line in LINES:
        ids = torch.tensor([list(line.encode())])
        options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 256}
        found = made.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        texts.append(bytes(found[ids.shape[1] :].tolist()).decode(errors="replace"))
    return folder, texts, made


def generate(model, *flags, **options):
    return mtcli("generate", model, "--max-tokens", COUNT, *flags, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("flags", [[], ["--nproc", "2", "--set", "parallel.tp=2"]], ids=str)
def test_a_file_of_lines_becomes_a_file_of_texts(model, tmp_path, flags):
    folder, texts, _ = model
    (tmp_path / "p.txt").write_text("\n".join(LINES[:2]) + "\n\n" + "\r\n".join(LINES[2:]) + "\n")
    done = generate(folder, "--prompts", "p.txt", "--output", "o.jsonl", *flags, folder=tmp_path)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert "wrote o.jsonl" in done.stderr
    found = sorted(lines_of(tmp_path / "o.jsonl"), key=lambda line: line["index"])
    assert found == [
        {
            "prompt": line,
            "text": text,
            "num_tokens": COUNT,
            "finish_reason": "max_tokens",
            "index": n,
        }
        for n, (line, text) in enumerate(zip(LINES, texts, strict=True))
    ]


def test_fields_of_json_lines_are_carried_to_every_sample(model, tmp_path):
    folder, texts, _ = model
    rows = [{"id": f"é{n}", "prompt": line, "more": [n, None]} for n, line in enumerate(LINES)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--prompts", "p.jsonl", "--output", "o.jsonl", "--n", "2", "--json", "-"]
    done = generate(folder, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = lines_of(tmp_path / "o.jsonl")
    assert len(found) == 2 * len(LINES)
    for line in found:
        expected = {
            "text": texts[line["index"]],
            "num_tokens": COUNT,
            "finish_reason": "max_tokens",
        }
        at = {"index": line["index"], "sample": line["sample"]}
        assert line == rows[line["index"]] | expected | at
    generated = json.loads(done.stdout)["generated"]
    assert [(one["id"], one["sample"]) for one in generated] == [
        (row["id"], k) for row in rows for k in range(2)
    ]


def killed(rank):
    """Ends the process as a kill does, once three texts are written and half of a line."""
    add, seen = TextsFile.add, []

    def failing(self, record):
        if len(seen) == 3:
            self._file.write(b'{"prompt": "half')
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(record)
        add(self, record)

    TextsFile.add = failing


def test_a_killed_run_goes_on_and_writes_nothing_twice(model, tmp_path):
    folder, _, _ = model
    (tmp_path / "p.txt").write_text("\n".join(LINES))
    words = ["--prompts", "p.txt", "--n", "2", "--temperature", "1", "--seed", "5"]
    whole = generate(folder, *words, "--output", "whole.jsonl", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    words += ["--output", "o.jsonl", "--cache-gib", "1e-6"]
    done = generate(folder, *words, folder=tmp_path, fault=killed)
    assert done.returncode == -9
    assert (tmp_path / "o.jsonl").read_text().count("\n") == 3
    refused = generate(folder, *words, folder=tmp_path)
    assert refused.returncode == 2 and "--output: o.jsonl exists, with " in refused.stderr
    assert "--resume goes on with it" in refused.stderr
    started = (tmp_path / "o.jsonl").read_text().splitlines()[:3]
    done = generate(folder, *words, "--resume", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.jsonl").read_text().splitlines()[:3] == started
    key = lambda line: (line["index"], line["sample"])  # noqa: E731
    found = sorted(lines_of(tmp_path / "o.jsonl"), key=key)
    assert found == sorted(lines_of(tmp_path / "whole.jsonl"), key=key), "not one twice"
    again = generate(folder, *words, "--resume", folder=tmp_path)
    assert again.returncode == 0 and len(lines_of(tmp_path / "o.jsonl")) == 2 * len(LINES)


def test_two_runs_do_not_write_one_file(model, tmp_path):
    file = TextsFile(str(tmp_path / "o.jsonl"))
    done = generate(model[0], "--prompt", "a", "--output", "o.jsonl", folder=tmp_path)
    file.close()
    assert done.returncode == 2 and "another run is writing o.jsonl" in done.stderr


def test_a_file_of_other_prompts_is_not_resumed(model, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(LINES))
    for line in (
        {"prompt": "The dog", "text": "", "index": 0},
        {"prompt": "The cat", "text": "", "index": 0, "sample": 1},
        {"prompt": "The cat", "text": "", "index": 5},
        {"prompt": "The cat", "text": ""},
        ["The cat"],
    ):
        (tmp_path / "o.jsonl").write_text(json.dumps(line) + "\n")
        words = ["--prompts", "p.txt", "--output", "o.jsonl", "--resume"]
        done = generate(model[0], *words, folder=tmp_path)
        assert done.returncode == 2 and "o.jsonl: line 1 is not of these prompts" in done.stderr
        assert "hint: " in done.stderr


def test_log_probabilities_are_those_of_the_model(model):
    folder, _, theirs = model
    flags = ["--prompt", LINES[0], "--logprobs", "2", "--json", "-"]
    (one,) = json.loads(generate(folder, *flags).stdout)["generated"]
    ids = [*LINES[0].encode(), *[token["id"] for token in one["logprobs"]]]
    with torch.no_grad():
        logs = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert len(one["logprobs"]) == COUNT
    for position, token in enumerate(one["logprobs"], len(LINES[0]) - 1):
        assert token["logprob"] == pytest.approx(float(logs[position, token["id"]]), rel=1e-4)
        values, best = logs[position].topk(2)
        assert [top["id"] for top in token["top"]] == best.tolist()
        assert [top["logprob"] for top in token["top"]] == pytest.approx(values.tolist(), rel=1e-4)
        assert token["token"] == bytes([token["id"]]).decode(errors="replace")


def test_a_bias_and_a_penalty_change_greedy_texts_as_transformers_do(model):
    folder, texts, theirs = model
    ids = torch.tensor([list(LINES[0].encode())])
    first = texts[0].encode()[0]
    options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 256}
    options |= {"repetition_penalty": 1.4, "sequence_bias": {(first,): -9.0}}
    found = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    expected = bytes(found.tolist()).decode(errors="replace")
    flags = ["--repetition-penalty", "1.4", "--logit-bias", f"{first}=-9", "--json", "-"]
    done = generate(folder, "--prompt", LINES[0], *flags)
    assert json.loads(done.stdout)["generated"][0]["text"] == expected != texts[0]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("p.csv", "a", "--prompts: p.csv is not a file of prompts that is known by its suffix"),
        ("p.txt", "\n \n", "--prompts: p.txt has 0 prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n[]\n', "line 2 has no text as its prompt"),
        ("p.jsonl", '{"prompt": "a"}\n[]\n', "p.jsonl: line 2 is no JSON object"),
        ("p.jsonl", '{"prompt": "a", "index": 3}\n', "line 1 has a field index"),
        ("p.jsonl", '{"prompt": "a"', "--prompts: p.jsonl: line 1 "),
        ("p.txt", None, "--prompts: p.txt cannot be read"),
    ],
)
def test_bad_files_of_prompts_are_refused(model, tmp_path, file, text, message):
    if text is not None:
        (tmp_path / file).write_text(text)
    done = generate(model[0], "--prompts", file, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--prompt: no prompt is given"),
        (["--prompt", "a", "--resume"], "--resume: there is no file to go on with"),
        (["--prompt", "a", "--system", "b"], "--system: it is a message of a conversation"),
        (["--prompt", "a", "--chat"], "has no chat template"),
        (["--prompt", "a", "--min-p", "0.1"], "--min-p: temperature=0 takes the likeliest"),
        (["--prompt", "a", "--logit-bias", "x=1"], "--logit-bias: x=1 is no ID=VALUE"),
        (["--prompt", "a", "--logit-bias", "1=nan"], "--logit-bias: 1=nan is no ID=VALUE"),
        (
            ["--prompt", "a", "--logit-bias", "257=1"],
            "the id 257 is not among the vocabulary's 257",
        ),
        (["--prompt", "a", "--output", "o.txt"], "--output: it does not write .txt"),
        (["--prompt", "a", "--n", "0"], "--n"),
    ],
    ids=str,
)
def test_flags_that_say_nothing_are_refused(model, tmp_path, flags, message):
    done = generate(model[0], *flags, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "hint: " in done.stderr


def test_prompts_that_do_not_fit_are_named_all_at_once(model, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": ""}\n{"prompt": "a"}\n{"prompt": "%s"}' % ("b" * 65)
    )
    done = generate(model[0], "--prompts", "p.jsonl", folder=tmp_path)
    assert done.returncode == 2
    for index, length in ((0, 0), (2, 65)):
        said = f"the prompt with index {index} has {length} tokens and the model takes 1 to 64"
        assert said in done.stderr


def test_an_output_that_cannot_be_opened_is_named(model, tmp_path):
    done = generate(model[0], "--prompt", "a", "--output", "/proc/o.jsonl", folder=tmp_path)
    assert done.returncode == 2 and "--output: /proc/o.jsonl cannot be" in done.stderr
    assert "hint: " in done.stderr and "unexpected" not in done.stderr


def test_progress_has_tokens_in_a_second(model, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(LINES))
    done = start(
        "generate", model[0], "--prompts", "p.txt", "--output", "o.jsonl", folder=tmp_path,
        fault=show_often,
    ).ended()  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = [line for line in done.stderr.splitlines() if line.startswith("generate ")][-1]
    assert last.split()[1:4] == ["5/5", "percent", "100.0"]
    assert last.split()[-1] == "tokens/s" and math.isfinite(float(last.split()[-2]))


def show_often(rank):
    import mtcli.core.runtime.progress as progress

    progress.LINE_SECONDS = 0.0


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_weights_are_kept_as_they_are_asked_for(model, tmp_path, weights):
    from mtcli.core.inference.generate import Ends, Generator, TextRequest
    from mtcli.core.inference.model import open_model
    from mtcli.core.runtime.launch import Runtime

    folder, texts, _ = model
    (tmp_path / "p.txt").write_text("\n".join(LINES))
    words = ("--prompts", "p.txt", "--weights", weights, "--json", "-")
    done = generate(folder, *words, folder=tmp_path)
    found = [one["text"] for one in json.loads(done.stdout)["generated"]]
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    opened = open_model(str(folder), [], runtime, weights=weights)
    decode = opened.require_tokenizer().decode
    ends = Ends(COUNT)
    requests = [TextRequest(list(s.encode()), ends, decode=decode) for s in LINES]
    ended = sorted(Generator(opened.scorer).run(requests), key=lambda text: text.index)
    assert found == [text.result.text for text in ended]
    kept = "fp32" if weights == "fp32" else f"fp32, {weights} weights"
    assert opened.facts()["model"]["precision"] == kept
    assert weights != "fp32" or found == texts


def test_weights_of_two_precisions_are_refused(model):
    words = ("--prompt", "x", "--weights", "int8", "--set", "train.precision=bf16")
    done = generate(model[0], *words)
    assert done.returncode == 2 and done.stdout == ""
    assert "--weights: weights=int8 are multiplied by float32 activations" in done.stderr
    assert "hint: leave --weights or --set train.precision out" in done.stderr
