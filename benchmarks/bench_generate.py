"""Tokens per second of `generate`, transformers, ctranslate2 and llama.cpp, side by side.

Random-init models: GPT-2 124M, or --size 1.1b (TinyLlama's shape), from one Hugging Face folder.
Prompts of --prompt-tokens are continued greedily by --tokens each, --prompts of them together.
Each run is a process of its own, in turn, and times one call after a warm-up: prompts are read in
it, imports and loading are left out. Texts are compared first. The floor beside each is the time
that one core takes to read the weights of all GEMMs once for each new token. ctranslate2 and
llama-cpp-python are left out where they are not installed; the latter's Python continues one text
at a time, and its int8 is q8_0. On a machine that others use too, --threads 1 and the processor
time tell more than the wall clock.

    python benchmarks/bench_generate.py [--size 1.1b] [--prompts 1 8 64] [--repeats 5]
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from arguments import Arguments, lacking, threads, write_rows
from progress import in_turn, say
from runs import answer

# Of each contender: the package that it needs.
PACKAGES = {"mtcli": "mtcli", "transformers": "transformers", "ctranslate2": "ctranslate2"}
PACKAGES |= {"llama.cpp": "llama_cpp"}
CONTENDERS = ("mtcli fp32", "mtcli bf16", "mtcli int8", "transformers fp32", "transformers bf16")
CONTENDERS += ("ctranslate2 fp32", "ctranslate2 int8")
CONTENDERS += ("llama.cpp fp32", "llama.cpp bf16", "llama.cpp int8")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8_float32"}
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # of a weight
BANDWIDTH_BYTES = 512 << 20  # read to measure it


def main():
    arguments = parse()
    if arguments.worker:
        return work(arguments)
    missing = lacking({name: PACKAGES[name.split()[0]] for name in arguments.contenders})
    names = [name for name in arguments.contenders if name not in missing]
    rows = [{"contender": name, "skipped": why} for name, why in missing.items()]
    with tempfile.TemporaryDirectory() as folder:
        numbers = make_model(Path(folder), arguments)
        for count in arguments.prompts:
            runs = {name: [] for name in names if count == 1 or not name.startswith("llama.cpp")}
            for name in in_turn(runs, arguments.repeats):
                runs[name].append(found := spawn(name, count, folder, arguments))
                say(f"{name:18} {found['seconds']:8.2f} s {found['cpu_seconds']:8.2f} cpu s")
            rows += report(runs, count, numbers, arguments)
    names = ("size", "prompt_tokens", "tokens", "threads", "repeats")
    settings = {name: getattr(arguments, name) for name in names}
    write_rows(arguments.json, {**settings, "numbers": numbers, "runs": rows})


def parse():
    tiny = {"size": "tiny", "prompts": [3], "tokens": 4, "prompt_tokens": 5, "repeats": 1}
    tiny["contenders"] = ("mtcli fp32", "mtcli int8", "transformers fp32")
    parser = Arguments(__doc__, needs=("transformers",), **tiny)
    parser.add_argument("--size", choices=("tiny", "124m", "1.1b"), default="124m")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=threads())
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(folder, arguments):
    """Saves a Hugging Face folder; returns how many numbers the weights of its GEMMs have."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    if arguments.size == "1.1b":
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
        config = LlamaConfig(vocab_size=32000, **sizes, **heads, initializer_range=0.05)
    else:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2} if arguments.size == "tiny" else {}
        config = GPT2Config(**sizes, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    # a word for each id, as ctranslate2 takes words
    words = WordLevel({f"t{id}": id for id in range(config.vocab_size)}, unk_token="t0")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    tokenizer.save_pretrained(folder / "model")
    (folder / "weights").mkdir()  # without a tokenizer, as GGUF has no such one
    for name in ("config.json", "model.safetensors"):
        (folder / "weights" / name).hardlink_to(folder / "model" / name)
    tables = [id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
    head = model.get_output_embeddings().weight
    return sum(p.numel() for p in {id(p): p for p in [*matrices, head]}.values())


def spawn(name, count, folder, arguments):
    """One run in a new process: its seconds and processor seconds, and its texts."""
    from mtcli.core.runtime.launch import ALLOCATOR

    env = os.environ | (ALLOCATOR if name.startswith("mtcli") else {})
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    words = ["--folder", folder, "--prompts", count, "--threads", arguments.threads]
    words += ["--tokens", arguments.tokens, "--prompt-tokens", arguments.prompt_tokens]
    return answer(__file__, "--worker", name, *words, env=env)


def work(arguments):
    draw, (count,) = random.Random(0), arguments.prompts
    prompts = [[draw.randrange(1024) for _ in range(arguments.prompt_tokens)] for _ in range(count)]
    name, weights = arguments.worker.split()
    contenders = {"mtcli": ours, "transformers": transformers, "ctranslate2": ctranslate2}
    (contenders | {"llama.cpp": llama_cpp})[name](weights, prompts, arguments)


def measure(generate):
    """Prints the times of one call after a warm-up, and its texts."""
    generate()
    start, start_cpu = perf_counter(), process_time()
    texts = generate()
    seconds = {"seconds": perf_counter() - start, "cpu_seconds": process_time() - start_cpu}
    print(json.dumps(seconds | {"texts": texts}))


def ours(weights, prompts, arguments):
    import torch

    from mtcli.core.inference.generate import Ends, Generator, TextRequest
    from mtcli.core.inference.model import open_model
    from mtcli.core.runtime.launch import bring_up

    with bring_up("cpu", 600.0) as runtime:
        torch.set_num_threads(arguments.threads)  # bring_up takes all cores
        folder = str(arguments.folder / "model")
        model = open_model(folder, [], runtime, weights=weights).scorer
        ends = Ends(arguments.tokens)
        requests = [TextRequest(ids, ends, number=n) for n, ids in enumerate(prompts)]

        def generate():
            ended = sorted(Generator(model).run(requests), key=lambda text: text.index)
            return [text.ids for text in ended]

        measure(generate)


def transformers(weights, prompts, arguments):
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(arguments.folder / "model")
    dtype = getattr(torch, DTYPES[weights])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor(prompts)
    count = {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens}
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def generate():
        texts = model.generate(ids, **count, **options)
        return texts[:, ids.shape[1] :].tolist()

    measure(generate)


def ctranslate2(weights, prompts, arguments):
    from ctranslate2 import Generator
    from ctranslate2.converters import TransformersConverter

    folder = arguments.folder / f"ctranslate2-{weights}"
    if not folder.exists():
        TransformersConverter(str(arguments.folder / "model")).convert(str(folder))
    options = {"intra_threads": arguments.threads, "inter_threads": 1}
    model = Generator(str(folder), device="cpu", compute_type=DTYPES[weights], **options)
    words = [[f"t{id}" for id in ids] for ids in prompts]
    count = {"max_length": arguments.tokens, "min_length": arguments.tokens}

    def generate():
        found = model.generate_batch(words, **count, include_prompt_in_result=False)
        return [text.sequences_ids[0] for text in found]

    measure(generate)


def llama_cpp(weights, prompts, arguments):
    from llama_cpp import Llama

    from mtcli.core.checkpoint.opening import open_checkpoint
    from mtcli.core.convert.gguf.write import plan_gguf, to_gguf

    file = arguments.folder / f"{weights}.gguf"
    if not file.exists():
        source = open_checkpoint(arguments.folder / "weights")
        dtype = {"int8": "q8_0"}.get(weights, weights)
        to_gguf(source, file, plan_gguf(source, None, dtype), verify=False)
    (ids,), counts = prompts, arguments.prompt_tokens + arguments.tokens
    threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
    model = Llama(str(file), n_ctx=counts, verbose=False, **threads)

    def generate():
        model.reset()
        texts = model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
        return [[next(texts) for _ in range(arguments.tokens)]]

    measure(generate)


def report(runs, count, numbers, arguments):
    """Prints the rows of some prompts, each with its floor; returns them. Ends the benchmark where
    texts in fp32 begin with other tokens."""
    first = next(iter(runs.values()))[0]["texts"]
    rate, rows = bandwidth(), []
    print(f"{count} prompts, {rate / 1e9:.1f} GB/s")
    print(f"{'':18} {'tokens/s':>9} {'cpu ms':>8} {'floor ms':>9} {'alike':>6}  (a token each)")
    for name, found in runs.items():
        texts, weights = found[0]["texts"], name.split()[1]
        if any(len(text) != arguments.tokens for text in texts):
            sys.exit(f"{name} has texts of {sorted(set(map(len, texts)))} tokens")
        if weights == "fp32" and [text[0] for text in texts] != [text[0] for text in first]:
            sys.exit(f"{name} begins with other tokens than {next(iter(runs))}")
        same = [
            a == b for x, y in zip(texts, first, strict=True) for a, b in zip(x, y, strict=True)
        ]
        row = {
            "contender": name,
            "prompts": count,
            "tokens_per_second": count * arguments.tokens / min(run["seconds"] for run in found),
            "cpu_ms": 1e3 * min(run["cpu_seconds"] for run in found) / arguments.tokens,
            "floor_ms": 1e3 * numbers * BYTES[weights] / rate,
            "bytes_per_second": rate,
            "alike": sum(same) / len(same),
        }
        rows.append(row)
        print(
            f"{name:18} {row['tokens_per_second']:9.1f} {row['cpu_ms']:8.2f} "
            f"{row['floor_ms']:9.2f} {row['alike']:6.1%}"
        )
    return rows


def bandwidth():
    """The bytes that one core reads in a second of its time: the best of 5 sums."""
    import torch

    torch.set_num_threads(1)
    x, best = torch.ones(BANDWIDTH_BYTES // 4), 1e9
    for _ in range(5):
        start = process_time()
        x.sum()
        best = min(best, process_time() - start)
    return BANDWIDTH_BYTES / best


if __name__ == "__main__":
    main()
