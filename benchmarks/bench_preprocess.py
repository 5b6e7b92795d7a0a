"""C1: MB of text per second from JSON lines to .bin and .idx, beside the field's tools.

Contenders run in turn, each run a process of its own on the same two cores:
  mtcli               `mtcli preprocess`: reads, encodes, writes, syncs and hashes
  gigatoken           its `encode_files` alone: ids in memory, nothing written
  tokenizers          `encode_batch` alone, on all threads
  Megatron            the loop of its preprocess_data.py: a Pool of workers that encode a document
                      at a time with the Hugging Face tokenizer, megatron-core's builder writing
"command" is the wall clock of the whole process; "work" begins after imports (and, but for mtcli,
after loading the tokenizer); "cpu" is the processor time of the whole process and its workers, per
core, which others on the machine do not slow as much. The slow two get the first --slow-mb of the
corpus. The corpus is the standard library's source, over and
over, every copy's words changed by a suffix so that it is not the same text again.

    MTCLI_TEST_DATA=... python benchmarks/bench_preprocess.py [--mb 50] [--repeats 5] [--json FILE]
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from arguments import Arguments, lacking, write_rows
from progress import in_turn, say
from runs import mtcli

WORKERS = 2
CLOCKS = ("command", "work", "cpu")
GOALS = {"gigatoken": 0.8, "Megatron": 20.0}
SLOW = ("tokenizers", "Megatron")


def main():
    parser = Arguments(__doc__, mb=1, slow_mb=1, repeats=1, contenders=["mtcli", "tokenizers"])
    parser.add_argument("--mb", type=int, default=50)
    parser.add_argument("--slow-mb", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tokenizer", help="default: MTCLI_TEST_DATA/gpt2-bpe, else one trained here"
    )
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS])
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])
    if args.child:
        name, corpus, output, tokenizer = args.child
        print(json.dumps(CONTENDERS[name](corpus, output, tokenizer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    show(rows)
    write_rows(args.json, rows)


def measure(args, folder):
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    sizes = {"large": write_corpus(large, args.mb), "small": write_corpus(small, args.slow_mb)}
    tokenizer = make_tokenizer(args.tokenizer, folder)
    missing = lacking({"gigatoken": "gigatoken", "Megatron": "megatron"})
    if "Megatron" not in missing:
        check_equal(folder, small, tokenizer)
    runs = {name: [] for name in args.contenders if name not in missing}
    for name in in_turn(runs, args.repeats):
        corpus = small if name in SLOW else large
        runs[name].append(spawn(name, corpus, folder / "out", tokenizer))
        mb = sizes["small" if name in SLOW else "large"] / 1e6
        say(f"{name:12} {mb / runs[name][-1]['command']:8.1f} MB/s")
    rows = {}
    for name, found in runs.items():
        mb = sizes["small" if name in SLOW else "large"] / 1e6
        rows[name] = {"mb": mb}
        for clock in CLOCKS:
            seconds = [run[clock] for run in found]
            rows[name][clock] = {"best": mb / min(seconds), "median": mb / median(seconds)}
    return rows | {name: {"skipped": why} for name, why in missing.items()}


def write_corpus(path, megabytes):
    """Returns the bytes of text; every line is a document."""
    from mtcli.core.data.sources import find_sources

    written, copy = 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while True:
            for source in find_sources(["stdlib"]).sources:
                text = Path(source.path).read_text(encoding="utf-8")
                if copy:
                    text = re.sub(r"(\w{7,})", rf"\g<1>{copy}", text)
                text = f"# {copy} {source.path}\n{text}"
                file.write(json.dumps({"text": text}) + "\n")
                written += len(text.encode())
                if written >= megabytes * 1e6:
                    return written
            copy += 1


def make_tokenizer(spec, folder):
    from mtcli.core.data.tokenize import load_tokenizer

    data = os.environ.get("MTCLI_TEST_DATA")
    if spec or data:
        load_tokenizer(spec or f"{data}/gpt2-bpe").save(folder / "tokenizer")
    else:
        mtcli("preprocess", "stdlib", "--tokenizer", "train:16384", "--output", folder / "t")
        (folder / "t.tokenizer").rename(folder / "tokenizer")
    return folder / "tokenizer"


def check_equal(folder, corpus, tokenizer):
    """Our files, read by megatron-core, hold the ids of the Megatron loop's, byte for byte."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for name in ("mtcli", "Megatron"):
        spawn(name, corpus, folder / name, tokenizer)
    ours, theirs = (IndexedDataset(str(folder / name)) for name in ("mtcli", "Megatron"))
    assert len(ours) == len(theirs) > 0
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    for suffix in (".bin", ".idx"):
        left, right = ((folder / f"{name}{suffix}").read_bytes() for name in ("mtcli", "Megatron"))
        assert left == right, suffix
    print(f"equal outputs: {len(ours)} documents, .bin and .idx the same bytes\n")


def spawn(name, corpus, output, tokenizer):
    if name == "mtcli":
        command = [
            "-m",
            "mtcli",
            "preprocess",
            corpus,
            "--output",
            output,
            "--force",
            "--json",
            "-",
        ]
        command += ["--tokenizer", tokenizer, "--workers", str(WORKERS)]
    else:
        command = [__file__, "--child", name, corpus, output, tokenizer]
    began, before = perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    wall = perf_counter() - began
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"command": wall, "work": json.loads(done.stdout)["seconds"], "cpu": used}


def run_gigatoken(corpus, output, tokenizer):
    import awkward  # noqa: F401 (loaded before the clock, as gigatoken itself is)
    import gigatoken

    fast = gigatoken.Tokenizer(str(Path(tokenizer) / "tokenizer.json"))
    source = gigatoken.JsonlFileSource([corpus], field="text")
    began = perf_counter()
    ids = fast.encode_files(source)
    return {"seconds": perf_counter() - began, "documents": len(ids)}


def run_tokenizers(corpus, output, tokenizer):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    began = perf_counter()
    backend.encode_batch(texts)
    return {"seconds": perf_counter() - began, "documents": len(texts)}


class Encoder:
    """As in Megatron's tools/preprocess_data.py: the tokenizer is loaded once in every worker."""

    def __init__(self, tokenizer):
        self.folder = tokenizer

    def initializer(self):
        from transformers import AutoTokenizer

        Encoder.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def encode(self, line):
        text = json.loads(line)["text"]
        ids = Encoder.tokenizer(text)["input_ids"]
        return [*ids, Encoder.tokenizer.eos_token_id], len(line)


def run_megatron(corpus, output, tokenizer):
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import AutoTokenizer

    vocab = len(AutoTokenizer.from_pretrained(tokenizer))
    dtype = np.uint16 if vocab < 65500 else np.int32
    began = perf_counter()
    encoder = Encoder(tokenizer)
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=dtype)
    with (
        open(corpus, encoding="utf-8") as file,
        multiprocessing.Pool(WORKERS, initializer=encoder.initializer) as pool,
    ):
        for ids, _ in pool.imap(encoder.encode, file, 32):
            builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{output}.idx")
    return {"seconds": perf_counter() - began}


CONTENDERS = {
    "mtcli": None,
    "gigatoken": run_gigatoken,
    "tokenizers": run_tokenizers,
    "Megatron": run_megatron,
}


def show(every):
    rows = {name: row for name, row in every.items() if "skipped" not in row}
    print(f"{'MB/s':12}{'MB':>5} " + "".join(f"{clock:>10} best{'median':>8}" for clock in CLOCKS))
    for name, row in rows.items():
        speeds = (f"{row[clock]['best']:15.1f}{row[clock]['median']:8.1f}" for clock in CLOCKS)
        print(f"{name:12}{row['mb']:5.0f} " + "".join(speeds))
    print("\nmtcli, times as fast (best of each)")
    for name, row in rows.items():
        row["ratio"] = {c: rows["mtcli"][c]["best"] / row[c]["best"] for c in CLOCKS}
        goal = f"   goal {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:18}" + "".join(f"{row['ratio'][c]:15.2f}{'':8}" for c in CLOCKS) + goal)


if __name__ == "__main__":
    main()
