"""C4: millions of tokens per second from .bin and .idx to int64 batches, one thread.

All read the same uint16 file, T = 1024, batches of 16, page cache warm, shuffled samples that cross
document boundaries where they must. The clock is the thread's processor time, which others on the
machine do not slow as much. Contenders run in turn, --repeats times:
  mtcli         Batches.batch
  Megatron      megatron-core's GPTDataset, item by item, its tokens and labels put in one array
  gather        one 2-D numpy gather of T + 1 tokens at random places: knows nothing of documents
mtcli and Megatron must give the same tokens first.

    python benchmarks/bench_samples.py [--samples 8000] [--repeats 5] [--json FILE]
"""

import os
import tempfile
from pathlib import Path
from statistics import median
from time import thread_time

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402
from arguments import Arguments, lacking, write_rows
from progress import in_turn, say  # noqa: E402

from mtcli.core.data.indexed import write_index  # noqa: E402
from mtcli.core.data.loader import Batches  # noqa: E402

SEQ_LEN, BATCH, SEED = 1024, 16, 1234
GOALS = {"Megatron": 8.0, "gather": 0.5}
GOAL_MTOK = 300


def main():
    parser = Arguments(__doc__, samples=256, tokens=300_000, repeats=1)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder) / "data")
    show(rows)
    write_rows(args.json, rows)


def measure(args, prefix):
    random = np.random.default_rng(0)
    lengths = random.lognormal(6.5, 1.0, args.tokens // 1100).astype(int) + 1  # mean 1,100 tokens
    random.integers(0, 50257, lengths.sum(), np.uint16).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.dtype("<u2"), lengths)
    ours = Batches([str(prefix)], "1", "train", args.samples, SEQ_LEN, SEED)
    contenders = {
        "mtcli": lambda start: ours.batch(start, BATCH),
        "gather": gather(prefix, random),
    }
    missing = lacking({"Megatron": "megatron"})
    if not missing:
        theirs = megatron(prefix, args.samples)
        for i in range(200):
            assert (ours.batch(i, 1)[0] == joined(theirs[i])).all(), i
        print(f"equal outputs: 200 samples of {SEQ_LEN + 1} tokens\n")
        contenders["Megatron"] = lambda start: np.stack(
            [joined(theirs[start + i]) for i in range(BATCH)]
        )
    runs = {name: [] for name in contenders}
    for name in in_turn(contenders, args.repeats):
        count = args.samples if name != "Megatron" else args.samples // 8
        began = thread_time()
        for start in range(0, count - BATCH + 1, BATCH):
            contenders[name](start)
        tokens = count // BATCH * BATCH * (SEQ_LEN + 1)
        runs[name].append(tokens / 1e6 / (thread_time() - began))
        say(f"{name:10}{runs[name][-1]:10.0f} Mtok/s")
    rows = {name: {"best": max(found), "median": median(found)} for name, found in runs.items()}
    return rows | {name: {"skipped": why} for name, why in missing.items()}


def joined(item):
    return np.concatenate([item["tokens"].numpy(), item["labels"].numpy()[-1:]])


def megatron(prefix, samples):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokens:
        eod, pad, vocab_size, unique_identifiers = 0, -1, None, {"class": "Tokens"}

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LEN,
        split="1,0,0",
        tokenizer=Tokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    data = IndexedDataset(str(prefix))
    indices = np.arange(len(data), dtype=np.int32)
    return GPTDataset(data, str(prefix), indices, samples, Split.train, config)


def gather(prefix, random):
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r")
    starts = random.integers(0, len(tokens) - SEQ_LEN - 1, (1 << 16))
    offsets = np.arange(SEQ_LEN + 1)

    def batch(start):
        return tokens[starts[start : start + BATCH, None] + offsets].astype(np.int64)

    return batch


def show(rows):
    print(f"{'':10}{'best':>10}{'median':>10}  Mtok/s   mtcli is (best)")
    ours = rows["mtcli"]["best"]
    for name, row in rows.items():
        if "skipped" in row:
            continue
        row["ratio"] = ours / row["best"]
        goal = f" (goal {GOALS[name]:g})" if name in GOALS else f"    (goal {GOAL_MTOK} Mtok/s)"
        speeds = f"{row['best']:10.0f}{row['median']:10.0f}"
        print(f"{name:10}{speeds}           {row['ratio']:6.2f} x{goal}")


if __name__ == "__main__":
    main()
