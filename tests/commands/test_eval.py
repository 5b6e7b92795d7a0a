"""`mtcli eval` end to end: Hugging Face folders in, transformers' numbers out, on any layout."""

import json
import math
import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from command_line import launched, mtcli
from eval_data import make_data, path_of, piqa
from marks import slow_cases
from ranks import run_ranks
from tokenizers import ByteLevelBPETokenizer

from mtcli.core.data.tokenize import byte_tokenizer

POSITIONS = 64
PASSAGES = ["The cat sat on the mat", "A dog ran. It hid and\n\n then it ate", "one two"]
WIKI = (
    " = A title = \n \n Some words , and others ; and so on . \n = Next = \n More @-@ words \n" * 3
)
ARTICLE = {
    "article": "A cat sat on a mat.",
    "questions": ["Who sat?", "It sat on  _  ."],
    "options": [["a cat", "a dog", "a man", "a hen"], ["a mat", "a bed", "sand", "the floor"]],
    "answers": ["A", "A"],
}


def make_model(family, vocab_size=257, positions=POSITIONS):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    end = {"bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size, n_positions=positions, n_embd=16, n_layer=2, n_head=2,
            initializer_range=0.4, **end,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=positions,
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4,
        **end,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    """Of a family: (folder with model/ and the three tasks' data, the transformers model)."""
    return cache(lambda family: _make_case(tmp_path_factory.mktemp(family), family))


@pytest.fixture(params=["gpt2", "llama"])
def case(request, make_case):
    """One case for each family."""
    return make_case(request.param)


@pytest.fixture
def folder(make_case):
    """The folder of the GPT-2 case."""
    return make_case("gpt2")[0]


def _make_case(folder, family):
    model = make_model(family)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save(folder / "model")
    rows = [json.dumps({"text": text}) for text in PASSAGES]
    (folder / "lambada.jsonl").write_text("\n".join(rows))
    (folder / "wiki.test.tokens").write_text(WIKI)
    for level in ("high", "middle"):
        (folder / "race" / level).mkdir(parents=True)
        (folder / "race" / level / "1.txt").write_text(json.dumps(ARTICLE))
    return folder, model


def tasks_of(folder):
    return [
        f"lambada={folder}/lambada.jsonl",
        f"race={folder}/race",
        f"wikitext103={folder}/wiki.test.tokens",
    ]


@torch.no_grad()
def logprobs(model, ids):
    """[len(ids) - 1] log-probabilities of every token but the first, and whether each is best."""
    logits = model(torch.tensor([ids[:-1]])).logits[0].double()
    targets = torch.tensor(ids[1:])
    found = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
    return found.tolist(), (logits.argmax(-1) == targets).tolist()


def continuation(model, context, text):
    """log P(text | context), both cut from the left to the model's positions."""
    ids, count = list((context + text).encode()), len(text.encode())
    return sum(logprobs(model, ids[-(POSITIONS + 1) :])[0][-count:])


def expected_wikitext(model, overlap):
    text = WIKI.strip()
    for old, new in ((" , ", ", "), (" ; ", "; "), (" . ", ". "), (" @-@ ", "-")):
        text = text.replace(old, new)
    ids = list(text.replace(" \n", "\n").replace("\n ", "\n").encode())
    nll, done = 0.0, 0
    while done < len(ids) - 1:
        start = max(0, done + overlap - POSITIONS)
        piece = ids[start : start + POSITIONS + 1]
        fresh = start + len(piece) - 1 - done
        nll -= sum(logprobs(model, piece)[0][-fresh:])
        done += fresh
    return nll, len(ids), len(WIKI.strip().split(" "))


def test_a_hugging_face_folder_has_the_numbers_of_transformers(case, tmp_path):
    folder, model = case
    flags = [flag for task in tasks_of(folder) for flag in ("--task", task)]
    out = tmp_path / "out.json"
    done = mtcli("eval", folder / "model", *flags, "--overlap", 10, "--json", out)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    nll, num_tokens, num_original = expected_wikitext(model, overlap=10)
    wiki = result["tasks"]["wikitext103"]
    assert (wiki["num_tokens"], wiki["num_original_tokens"]) == (num_tokens, num_original)
    assert wiki["nll_sum"] == pytest.approx(nll, rel=1e-5)
    assert wiki["perplexity"] == pytest.approx(math.exp(nll / num_original), rel=1e-3)
    lambada = result["tasks"]["lambada"]
    pairs = [(text.rsplit(None, 1)[0], " " + text.rsplit(None, 1)[1]) for text in PASSAGES]
    nll = -sum(continuation(model, context, word) for context, word in pairs)
    assert lambada["perplexity"] == pytest.approx(math.exp(nll / 3), rel=1e-3)
    assert lambada["total"] == 3
    question = "Article: A cat sat on a mat.\n\nQuestion: Who sat?\nAnswer: a cat\nIt sat on  _  ."
    sums = [continuation(model, question, f" {choice}") for choice in ARTICLE["options"][1]]
    race = result["tasks"]["race"]
    assert race["accuracy"] == race["high"] == race["middle"] == float(sums[0] == max(sums))
    assert race["total"] == 2
    assert result["checkpoint"] == f"{folder}/model"
    assert result["model"]["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert result["layout"] == {"world": 1, "tp": 1, "pp": 1, "dp": 1}
    assert "wikitext103" in done.stdout and "perplexity" in done.stdout
    assert f"{folder}/model: " in done.stderr and "2 items, 8 requests" in done.stderr
    assert done.stderr.rstrip().endswith(f"wrote {out}")


LAYOUTS = {
    "tp=2": (2, ["parallel.tp=2"]),
    "pp=2": (2, ["parallel.pp=2"]),
    "dp=2": (2, []),
    "tp=2 pp=2": (4, ["parallel.tp=2", "parallel.pp=2"]),
    "grid of 2 x 2": (4, ["parallel.tp=4", "parallel.tp_mode=2d"]),
    "rows of 2 and dp=2": (4, ["parallel.tp=2", "parallel.tp_mode=2d", "parallel.tp_rows=2"]),
}


def evaluate(runtime, folder, overrides, tasks, limit=None):
    """The reports of the tasks, on this rank."""
    from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
    from mtcli.core.evaluate.journal import Journal
    from mtcli.core.evaluate.tasks.registry import Evaluation, parse_tasks, task_runs
    from mtcli.core.evaluate.tasks.task import TaskOptions
    from mtcli.core.inference.model import open_model

    opened = open_model(str(folder / "model"), overrides, runtime)
    options = TaskOptions(opened.scorer.max_seq_len, limit, overlap=20)
    about = eval_tokenizer(opened.tokenizer), options, 256, Journal(None, "")
    jobs = task_runs(parse_tasks(tasks), Evaluation(opened.scorer, *about))
    return [job.run(lambda done: None) for job in jobs]


def approx(report):
    """The report's numbers up to 1e-5, and all else as it is."""
    numbers = {k: v for k, v in report.items() if isinstance(v, float)}
    return report | {key: pytest.approx(value, rel=1e-5) for key, value in numbers.items()}


@pytest.mark.parametrize(
    "layout",
    [
        "tp=2 pp=2",
        *slow_cases(
            "a layout of two families, 1 s", *(name for name in LAYOUTS if name != "tp=2 pp=2")
        ),
    ],
)
def test_every_rank_of_any_layout_has_the_same_answers(case, layout):
    world, overrides = LAYOUTS[layout]
    (alone,) = run_ranks(1, evaluate, case[0], [], tasks_of(case[0]))
    for reports in run_ranks(world, evaluate, case[0], overrides, tasks_of(case[0])):
        for report, expected in zip(reports, alone, strict=True):
            assert report == approx(expected)


def score_after_shots(runtime, folder, overrides):
    """Each item's log-likelihoods of piqa after shots, on this rank, and the prefixes read."""
    from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
    from mtcli.core.evaluate.packing import plan, run
    from mtcli.core.evaluate.tasks.choice import prepare_task
    from mtcli.core.evaluate.tasks.task import TaskOptions
    from mtcli.core.evaluate.tasks.task_file import load_task
    from mtcli.core.inference.model import open_model

    opened = open_model(str(folder / "model"), overrides, runtime)
    options = TaskOptions(opened.scorer.max_seq_len, shots=5, shots_per="task")
    encoder = eval_tokenizer(opened.tokenizer)
    prepared = prepare_task(load_task("piqa"), folder / "piqa", encoder, options)
    planned = plan(opened.scorer, prepared.requests, 160)
    scores = run(opened.scorer, planned)
    lengths = [planned.length(index) for index in range(len(planned.prefixes))]
    return [score.logprob for score in scores], lengths, prepared.requests


@pytest.fixture(scope="module")
def shots_folder(tmp_path_factory):
    """The llama of 384 positions, and piqa."""
    folder = tmp_path_factory.mktemp("shots")
    model = make_model("llama", positions=384)
    model.save_pretrained(folder / "model")
    byte_tokenizer().save(folder / "model")
    (folder / "piqa").mkdir()
    piqa(folder / "piqa", random.Random(0), 24)
    return folder, model


@pytest.mark.parametrize(
    "layout",
    ["tp=2 pp=2", "tp=4 tp_mode=2d", *slow_cases("1 s", "dp=2 tp=2")],
)
def test_shots_that_are_read_once_change_no_score_on_any_layout(layout, shots_folder):
    folder, model = shots_folder
    overrides = [f"parallel.{one}" for one in layout.split() if not one.startswith("dp")]
    for sums, lengths, requests in run_ranks(4, score_after_shots, folder, overrides):
        assert len(lengths) > 1 and max(lengths) > 100
        for found, one in zip(sums, requests, strict=True):
            ids = one.tokens.tolist()
            expected = sum(logprobs(model, ids)[0][-one.num_targets :])
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", *slow_cases("50,257 ids, 5 s", "llama")])
def test_the_real_files_have_the_numbers_of_transformers(family, tmp_path):
    if "MTCLI_TEST_DATA" not in os.environ:
        pytest.skip("MTCLI_TEST_DATA names no folder with wikitext-103, lambada, race, gpt2-bpe")
    data, model = Path(os.environ["MTCLI_TEST_DATA"]), make_model(family, 50257)
    model.save_pretrained(tmp_path / "model")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "model" / name).write_bytes((data / "gpt2-bpe" / name).read_bytes())
    bpe = ByteLevelBPETokenizer(*(f"{data}/gpt2-bpe/{n}" for n in ("vocab.json", "merges.txt")))
    tasks = [f"lambada={data}/lambada", f"wikitext103={data}/wikitext-103", f"race={data}/race"]
    (reports,) = run_ranks(1, evaluate, tmp_path, [], tasks, 10)

    def score(context, text):
        ids = bpe.encode(context).ids + bpe.encode(text).ids
        return sum(logprobs(model, ids[-(POSITIONS + 1) :])[0][-len(bpe.encode(text).ids) :])

    nll = -sum(score(context, word) for context, word in real_passages(data))
    assert reports[0]["nll_sum"] == pytest.approx(nll, rel=1e-5)
    ids = bpe.encode(real_beginning(data)).ids
    assert reports[1]["nll_sum"] == pytest.approx(-sum(logprobs(model, ids)[0]), rel=1e-5)
    right = 0
    for question, options, answer in real_questions(data):
        sums = [score(question, f" {option}") for option in options]
        right += sums.index(max(sums)) == answer
    assert (reports[2]["correct"], reports[2]["total"]) == (right, 20)


def real_passages(data):
    lines = (data / "lambada/lambada_test.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    for text in (json.loads(line)["text"].strip() for line in lines):
        word = text.split()[-1]
        yield text[: text.rfind(word)].strip(), f" {word}"


def real_beginning(data):
    """The first 10 words of WikiText-103's test file, detokenised by hand."""
    text = (data / "wikitext-103/wiki.test.tokens").read_text(encoding="utf-8").strip()
    assert text.split(" ")[:5] == ["=", "Robert", "Boulter", "=", "\n"]
    return "= Robert Boulter =\n\nRobert Boulter is an"


def real_questions(data):
    """The first 10 articles of each level, which have one question each."""
    for level in ("high", "middle"):
        files = sorted((data / "race/test" / level).iterdir(), key=lambda file: int(file.stem))
        for row in (json.loads(file.read_text(encoding="utf-8")) for file in files[:10]):
            (question,), (options,), (answer,) = row["questions"], row["options"], row["answers"]
            yield f"Article: {row['article']}\n\n{question}", options, "ABCD".index(answer)


def test_workers_print_once_and_json_alone_goes_to_stdout(folder):
    flags = ["--nproc", 2, "--set", "parallel.tp=2", "--device", "cpu", "--json", "-"]
    done = mtcli("eval", folder / "model", "--task", tasks_of(folder)[0], *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["layout"] == {"world": 2, "tp": 2, "pp": 1, "dp": 1}
    assert result["tasks"]["lambada"]["total"] == 3
    assert done.stderr.count("parameters") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--task", "lambda={folder}"], "there is no task 'lambda'"),
        (["--task", "race={folder}/none"], "race: {folder}/none does not exist"),
        ([], "no task is given, at least 1 is needed"),
        (["--task", "race={folder}", "--json", "no/x.json"], "there is no folder 'no'"),
        (["--task", "race={folder}/model"], "{folder}/model holds 0 RACE articles"),
        (["--task", "race={folder}/race", "--limit", "0"], "--limit"),
    ],
)
def test_wrong_input_is_refused_without_a_traceback(folder, flags, message):
    done = mtcli("eval", folder / "model", *(f.format(folder=folder) for f in flags))
    assert done.returncode == 2 and done.stdout == ""
    assert message.format(folder=folder) in done.stderr
    assert "Traceback" not in done.stderr


def test_all_that_is_wrong_is_told_at_once_and_as_json(folder, tmp_path):
    target = tmp_path / "answer.json"
    flags = ["--task", "lambda=x", "--set", "train.steps=-1", "--set", "parallel.pp=3"]
    done = mtcli("eval", folder / "model", *flags, "--json", target)
    told = json.loads(target.read_text())
    assert (done.returncode, told["ok"]) == (2, False)
    fields = [problem["field"] for problem in told["problems"]]
    assert fields[:2] == ["--task", "train.steps"] and "parallel.pp" in fields[2:]


def test_every_bad_file_is_told_at_once(folder, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    tasks = ["--task", f"lambada={tmp_path}/empty.jsonl", "--task", f"race={tmp_path}"]
    done = mtcli("eval", folder / "model", *tasks)
    assert done.returncode == 2
    assert "empty.jsonl is empty: 0 bytes" in done.stderr
    assert f"{tmp_path} holds 0 RACE articles" in done.stderr


def test_a_word_that_the_model_cannot_read_is_refused_by_its_task(folder, tmp_path):
    texts = [*PASSAGES, "a word of " + 80 * "b"]
    path = tmp_path / "lambada.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    done = mtcli("eval", folder / "model", "--task", f"lambada={path}")
    assert done.returncode == 2
    assert "error: lambada: request 3 scores 81 tokens, the model reads 64" in done.stderr


def test_workers_refuse_a_layout_once_and_name_the_nearest_legal_ones(folder):
    flags = ["--nproc", 2, "--device", "cpu", "--set", "parallel.cp=2", "--set", "parallel.pp=2"]
    done = launched("eval", folder / "model", "--task", tasks_of(folder)[0], *flags)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("cp=2: evaluation and generation hold whole sequences") == 1
    assert done.stderr.count("tp*cp*pp = 1*2*2 = 4 does not divide the world of 2 ranks") == 1
    nearest = "\n\nhint: the nearest legal layouts on 2 ranks:\n  --set parallel.cp=1   tp=1 pp=2"
    assert nearest in done.stderr


def test_a_checkpoint_without_a_tokenizer_asks_for_one(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / "model" / name).read_bytes())
    flags = ["--task", tasks_of(folder)[0], "--json", "-"]
    done = mtcli("eval", bare, *flags)
    assert done.returncode == 2
    assert f"the checkpoint {bare} holds no tokenizer" in done.stderr
    done = mtcli("eval", bare, *flags, "--tokenizer", "bytes")
    assert json.loads(done.stdout)["tasks"]["lambada"]["total"] == 3, done.stderr


TASKS = ["piqa", "boolq", "winogrande", "hellaswag", "race_h", "anli_r1", "hans", "wic"]


def test_two_checkpoints_are_evaluated_with_shots_and_compared(tmp_path):
    make_data(tmp_path / "data", 6)
    for name in ("one", "two"):
        make_model("gpt2", positions=768).save_pretrained(tmp_path / name)
        byte_tokenizer().save(tmp_path / name)
    tasks = [word for t in TASKS for word in ("--task", f"{t}={path_of(tmp_path / 'data', t)}")]
    for name in ("one", "two"):
        flags = ["--shots", 2, "--json", tmp_path / f"{name}.json", "--device", "cpu"]
        done = mtcli("eval", tmp_path / name, *tasks, *flags)
        assert done.returncode == 0, done.stderr
        assert f"wrote {tmp_path}/{name}.items.jsonl" in done.stderr
    result = json.loads((tmp_path / "one.json").read_text())
    assert set(result["tasks"]) == set(TASKS) and result["items"] == "one.items.jsonl"
    assert {"lm_eval", "mtcli"} <= set(result["versions"])
    for report in result["tasks"].values():
        assert {"accuracy", "interval", "total", "shots_mean"} <= set(report)
    assert "accuracy_per_byte" in result["tasks"]["piqa"]
    done = mtcli("eval", "--compare", tmp_path / "one.json", tmp_path / "two.json", "--json", "-")
    found = json.loads(done.stdout)["tasks"]
    assert {report["verdict"] for report in found.values()} == {"tied"}
    assert found["piqa"]["total"] == 6 and "accuracy_per_token" in found["piqa"]
    done = mtcli("eval", "--compare", tmp_path / "one.json", tmp_path / "two.json")
    assert "tied" in done.stdout and "Holm" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no checkpoint is given"),
        (["--compare", "a.json", "b.json"], "a.json cannot be read"),
        (["x", "--compare", "a", "b", "--shots", 2], "CHECKPOINT is of an evaluation"),
    ],
)
def test_without_a_checkpoint_two_results_are_needed(flags, message):
    done = mtcli("eval", *flags)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
