"""Real tasks by `mtcli eval` and by lm-eval's own command words: figures and times side by side.

    MTCLI_TEST_DATA=... python benchmarks/bench_eval_tasks.py [--limit 200] [--markdown FILE]

A random-init GPT-2 (d256 L4, GPT-2's own tokenizer, 1,024 tokens) reads the first --limit items of
LAMBADA, articles of RACE-high and PAGE words of WikiText-103 times as many, in float32. Each is a
process of its own, timed from its start to its end; lm-eval reads the same rows by its own YAML
files, in batches of 16. Of WikiText mtcli computes the paper's perplexity as well, here in windows
that overlap by nothing. Ends with 1 where figures differ.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from arguments import Arguments, data_folder, threads, write_rows
from progress import each, say
from runs import python

from mtcli.core.evaluate.tasks.wikitext import split_pages

DATA = Path(os.environ.get("MTCLI_TEST_DATA", "."))
# Of each task: its data, lm-eval's YAML file, and the figure's names in our JSON and in lm-eval's
TASKS = {
    "lambada": (
        "lambada/lambada_test.jsonl",
        "lambada/lambada_openai.yaml",
        {"perplexity": "perplexity"},
    ),
    "race": ("race/test", "race/race.yaml", {"high": "acc"}),
    "wikitext103": (
        "wikitext-103/wiki.test.tokens",
        "wikitext/wikitext.yaml",
        {"word_perplexity": "word_perplexity"},
    ),
}
PAGE = 250  # words of WikiText that are one item of the others


def main() -> None:
    parser = Arguments(__doc__, needs=("lm_eval", "transformers"), limit=2)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--threads", type=int, default=threads())
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(json.dumps(theirs(*args.worker, args.limit)))
    lines = ["| task | figure | mtcli | lm-eval | mtcli, s | lm-eval, s | times |"]
    lines += ["|---|---|---|---|---|---|---|"]
    rows = []
    if data_folder("gpt2-bpe", *(data for data, *_ in TASKS.values())) is None:
        why = "MTCLI_TEST_DATA names no folder with gpt2-bpe and the tasks' data"
        say(why)
        return write_rows(args.json, {"skipped": why})
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for task in each(list(TASKS)[: 1 if args.tiny else None]):
            data, _, names = TASKS[task]
            (figure,) = names
            command = ["-m", "mtcli", "eval", folder, "--task", f"{task}={DATA / data}"]
            items = args.limit * (PAGE if task == "wikitext103" else 1)
            command += ["--limit", str(items)]
            command += ["--overlap", "1024"] if task == "wikitext103" else []
            command += ["--set", "train.precision=fp32"]
            found, seconds = timed([*command, "--json", "-"], args.threads)
            ours = found["tasks"][task][figure]
            command = [__file__, "--worker", task, folder, "--limit", str(args.limit)]
            reference, others = timed(command, args.threads)
            if abs(ours - reference) > 1e-4 * abs(reference):
                sys.exit(f"{task}: {figure} is {ours} and lm-eval's {reference}")
            rows.append({"task": task, "figure": figure, "mtcli": ours, "lm-eval": reference})
            rows[-1] |= {"mtcli_s": seconds, "lm-eval_s": others}
            lines += [
                f"| {task} | {figure} | {ours:,.4f} | {reference:,.4f} | {seconds:.1f} "
                f"| {others:.1f} | {others / seconds:.1f} |"
            ]
            say(lines[-1])
    write_rows(args.json, rows)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def make_model(folder: Path) -> None:
    """A Hugging Face folder of a random GPT-2 with its real tokenizer."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    files = (str(DATA / "gpt2-bpe" / name) for name in ("vocab.json", "merges.txt"))
    tokenizer = ByteLevelBPETokenizer(*files)
    file = str(folder / "tokenizer.json")
    tokenizer.save(file)
    fast = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=4, n_head=4, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(folder)


def timed(command: list[str], threads: int) -> tuple:
    """(the JSON that a Python command prints last, its seconds)."""
    environ = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    begin = time.perf_counter()
    said = python(*command, env=environ)
    text = said if "mtcli" in command else said.splitlines()[-1]
    return json.loads(text), time.perf_counter() - begin


def theirs(task: str, model: str, limit: int) -> float:
    """lm-eval's figure of its own task on the local rows."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    _, file, names = TASKS[task]
    (metric,) = names.values()
    backend = HFLM(pretrained=model, dtype="float32", batch_size=16, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "test.jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(task, limit)))
        config = dict(load_yaml(Path(lm_eval.__file__).parent / "tasks" / file))
        config |= {"dataset_path": "json", "dataset_name": None, "tag": None, "test_split": "test"}
        config |= {"validation_split": None, "training_split": None}
        config |= {"dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": folder}}
        found = lm_eval.simple_evaluate(
            backend,
            tasks=[config],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
    return found["results"][config["task"]][f"{metric},none"]


def rows_of(task: str, limit: int) -> list[dict]:
    """The rows as lm-eval's data set on the hub has them."""
    path = DATA / TASKS[task][0]
    if task == "lambada":
        return [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    if task == "wikitext103":
        words = path.read_text().strip().split(" ")[: limit * PAGE]
        return [{"page": page} for page in split_pages(" ".join(words))]
    rows = []
    for file in sorted((path / "high").iterdir(), key=lambda file: int(file.stem))[:limit]:
        row = json.loads(file.read_text())
        found = zip(row["questions"], row["options"], row["answers"], strict=True)
        problems = [{"question": q, "options": o, "answer": a} for q, o, a in found]
        rows.append({"article": row["article"], "problems": str(problems)})
    return rows


if __name__ == "__main__":
    main()
