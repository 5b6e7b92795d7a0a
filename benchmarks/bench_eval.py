"""C10: items per second of `mtcli eval` and of lm-eval's Hugging Face backend on one JSON task.

200 questions of 4 endings (about 75 and 23 tokens), after none or --shots 8 solved ones, the same
for all; random-init GPT-2 (d256 L4, or --size 124m),
vocabulary 50257. Each run is a process of its own, in turn (mtcli, lm-eval, tuned lm-eval, mtcli,
...), and times lm-eval's evaluator from the first request to the metrics: imports, loading and a
warm-up are left out. Picks and log-likelihoods are compared first. "tuned" gives lm-eval our
allocator settings and fast fp32.
On a machine that others use too, --threads 1 and the processor time tell more than the wall clock.

    python benchmarks/bench_eval.py [--shots 8] [--size 124m] [--dtype bf16] [--repeats 5]
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from arguments import Arguments, threads, write_rows
from progress import in_turn, say
from runs import answer

SIZES = {"tiny": (256, 4, 4), "124m": (768, 12, 12)}  # width, layers, heads
# Of a log-likelihood of up to 100 nats; in proportion for a larger one, as float32 rounds it.
# per 100 nats; rounding grows with depth: the 12 layers of 124m have shown 1.3e-4 in float32
TOLERANCE = {
    ("tiny", "fp32"): 1e-4,
    ("124m", "fp32"): 3e-4,
    ("tiny", "bf16"): 0.5,
    ("124m", "bf16"): 0.5,
}
TASK = """task: bench
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}{train}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}]
"""
# lm-eval draws others for each item where it is not told to take the first ones.
SHOTS = """training_split: train
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: {shots}
"""


def main():
    arguments = parse()
    if arguments.worker:
        return work(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), arguments)
        runs = {name: [] for name in arguments.contenders}
        for name in in_turn(runs, arguments.repeats):
            runs[name].append(found := spawn(name, folder, arguments))
            say(f"{name:14} {found['seconds']:8.2f} s {found['cpu_seconds']:8.2f} cpu s")
    difference = compare(runs, TOLERANCE[arguments.size, arguments.dtype])
    report(runs, difference, arguments)


def parse():
    parser = Arguments(
        __doc__,
        needs=("lm_eval", "transformers"),
        items=8,
        repeats=1,
        contenders=["mtcli", "lm-eval"],
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=threads())
    parser.add_argument("--contenders", nargs="+", default=["mtcli", "lm-eval", "lm-eval tuned"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_inputs(folder, arguments):
    """A Hugging Face folder with a tokenizer, and the task with its rows."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from mtcli.core.data.tokenize import train_tokenizer

    words = Path(os.__file__).with_name("argparse.py").read_text().split()
    train_tokenizer([" ".join(words)], 1024).save(folder / "model")
    width, layers, heads = SIZES[arguments.size]
    torch.manual_seed(0)
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [
        {
            "question": " ".join(draw.choices(words, k=draw.randint(20, 40))),
            "choices": [" ".join(draw.choices(words, k=draw.randint(5, 13))) for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(arguments.items + arguments.shots)
    ]
    shots, rows = rows[: arguments.shots], rows[arguments.shots :]
    for name, part in (("train", shots), ("rows", rows)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    train = f", train: {folder / 'train.jsonl'}" if shots else ""
    task = TASK.format(rows=folder / "rows.jsonl", train=train)
    task += SHOTS.format(shots=arguments.shots) if shots else ""
    (folder / "task.yaml").write_text(task)


def spawn(name, folder, arguments):
    """One run in a new process: seconds, processor seconds, [[log-likelihood] * 4] per item."""
    from mtcli.core.runtime.launch import ALLOCATOR

    env = os.environ | ({} if name == "lm-eval" else ALLOCATOR)
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder}/cache"}
    env |= {"OMP_NUM_THREADS": str(arguments.threads)}
    words = ["--folder", folder, "--dtype", arguments.dtype, "--threads", arguments.threads]
    return answer(__file__, "--worker", name, *words, env=env)


def work(arguments):
    import logging

    logging.disable(logging.WARNING)
    if arguments.worker == "mtcli":
        import torch

        from mtcli.core.runtime.launch import bring_up

        with bring_up("cpu", 600.0) as runtime:
            torch.set_num_threads(arguments.threads)  # bring_up takes all cores
            return measure(ours(arguments, runtime), arguments.folder)
    return measure(theirs(arguments), arguments.folder)


def ours(arguments, runtime):
    from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
    from mtcli.core.evaluate.harness import HarnessModel
    from mtcli.core.evaluate.packing import BATCH_TOKENS
    from mtcli.core.inference.model import open_model

    overrides = [f"train.precision={arguments.dtype}"]
    opened = open_model(str(arguments.folder / "model"), overrides, runtime)
    return HarnessModel(opened.scorer, eval_tokenizer(opened.tokenizer), BATCH_TOKENS["cpu"])


def theirs(arguments):
    import torch
    from lm_eval.models.huggingface import HFLM

    if arguments.worker.endswith("tuned"):
        torch.set_float32_matmul_precision("medium")
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype]
    folder = str(arguments.folder / "model")
    return HFLM(pretrained=folder, dtype=dtype, batch_size=16, device="cpu")


def measure(model, folder):
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.tasks import TaskManager

    evaluator.add_env_info = lambda results: (
        results
    )  # asks pip and git: a second, whoever evaluates
    manager = TaskManager(include_path=str(folder), include_defaults=False)

    def evaluate(limit):
        return simple_evaluate(
            model, tasks=["bench"], task_manager=manager, limit=limit, bootstrap_iters=0
        )

    evaluate(4)  # warm-up: allocator, thread pool, the data set's cache
    start, start_cpu = perf_counter(), process_time()
    found = evaluate(None)
    seconds = {"seconds": perf_counter() - start, "cpu_seconds": process_time() - start_cpu}
    results = [[r[0][0] for r in sample["resps"]] for sample in found["samples"]["bench"]]
    print(json.dumps(seconds | {"results": results}))


def compare(runs, tolerance):
    """The largest difference per 100 nats; ends the benchmark where answers differ."""
    expected, worst = runs["lm-eval"][0]["results"], 0.0
    for name, found in runs.items():
        for ours, theirs in zip(found[0]["results"], expected, strict=True):
            pairs = zip(ours, theirs, strict=True)
            worst = max(worst, *(abs(a - b) / max(1.0, abs(b) / 100) for a, b in pairs))
            best = sorted(theirs)[-2:]
            if ours.index(max(ours)) != theirs.index(best[1]) and best[1] - best[0] > tolerance:
                sys.exit(f"{name} picks another ending: {ours} against {theirs}")
    if worst > tolerance:
        sys.exit(f"log-likelihoods differ by {worst:.2e}, more than {tolerance:.0e}")
    return worst


def report(runs, difference, arguments):
    print(
        f"{arguments.size} {arguments.dtype}, {arguments.shots} shots, {arguments.items} items x "
        f"4 endings, "
        f"{arguments.threads} threads, {arguments.repeats} repeats; "
        f"log-likelihoods within {difference:.1e} per 100 nats"
    )
    print(f"{'':14} {'min s':>8} {'median s':>9} {'cpu s':>8} {'items/s':>8} {'mtcli is':>9}")
    rows = {}
    for name, found in runs.items():
        times = [run["seconds"] for run in found]
        row = {
            "min_seconds": min(times),
            "median_seconds": median(times),
            "min_cpu_seconds": min(run["cpu_seconds"] for run in found),
            "items_per_second": arguments.items / min(times),
        }
        row |= {f"{k}_ratio": row[k] / rows.get("mtcli", row)[k] for k in list(row)[:3]}
        rows[name] = row
        print(
            f"{name:14} {min(times):8.2f} {median(times):9.2f} {row['min_cpu_seconds']:8.2f} "
            f"{row['items_per_second']:8.1f} {row['min_seconds_ratio']:8.2f}x"
        )
    settings = {
        key: getattr(arguments, key) for key in ("size", "dtype", "shots", "items", "threads")
    }
    result = {"row": "C10", **settings, "difference": difference, "runs": rows}
    write_rows(arguments.json, result)


if __name__ == "__main__":
    main()
