"""The fine-tuning step on CPU beside transformers + peft on the same packed batches.

Contenders take turns, each run a process of its own: "peft" as it comes, "peft-tuned" with our
allocator variables and torch's `medium` products as well, "peft-padded" the same examples padded to
the longest of a batch. All start from the same weights; the losses of the first step are compared.
Ratios are of seconds, and of processor seconds, which other work on the machine changes less.

    python benchmarks/bench_fine_tune.py                # LoRA of all linear layers, rank 8
    python benchmarks/bench_fine_tune.py --rank 0       # all weights
    python benchmarks/bench_fine_tune.py --seq 256      # 8 rows of 256 tokens for 2 of 1,024
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from arguments import Arguments, threads, write_rows
from progress import in_turn, say
from runs import answer

LAYERS, HIDDEN, HEADS, FFN, VOCAB = 4, 256, 4, 1024, 8192
LR, BETAS, CLIP, ALPHA = 2e-4, (0.9, 0.95), 1.0, 16.0
WIDTHS = (10, 8, 10, 9, 12, 9)
CONTENDERS = ("ours", "peft", "peft-tuned", "peft-padded")


def main() -> None:
    args = parse()
    if args.child:
        print(json.dumps(run_child(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        prepare(Path(folder), args.seq)
        found = {name: [] for name in args.contenders}
        for name in in_turn(args.contenders, args.repeats):
            found[name].append(spawn(args, name))
            say(f"{name:12} {min(found[name][-1]['seconds']):.3f} s a step")
    show(args, found)
    write_rows(args.json, found)


def parse() -> argparse.Namespace:
    parser = Arguments(
        __doc__,
        needs=("transformers", "peft"),
        repeats=1,
        steps=1,
        seq=64,
        tokens=256,
        contenders=["ours", "peft"],
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; 0 trains all weights")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(folder: Path, seq: int) -> None:
    """A Llama-shaped folder with a tokenizer of bytes, and prompts of log-normal lengths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mtcli.core.data.tokenize import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": seq}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "hf")
    byte_tokenizer().save(folder / "hf")
    draw = random.Random(0)
    with open(folder / "my.jsonl", "w") as file:
        for _ in range(600):
            length = min(seq - 2, int(draw.lognormvariate(4.6, 0.8)) + 8)
            text = "".join(draw.choices("abcdefgh ijklm\nopqrstu", k=length))
            file.write(
                json.dumps({"prompt": text[: length // 2], "completion": text[length // 2 :]})
            )
            file.write("\n")


def spawn(args: argparse.Namespace, name: str) -> dict:
    from mtcli.core.runtime.launch import ALLOCATOR

    env = os.environ | (ALLOCATOR if name in ("ours", "peft-tuned") else {})
    flags = ("folder", "rank", "seq", "tokens", "steps")
    words = [f"--{flag}={getattr(args, flag)}" for flag in flags]
    return answer(__file__, "--child", name, *words, env=env)


def show(args: argparse.Namespace, found: dict[str, list[dict]]) -> None:
    what = f"LoRA of rank {args.rank}" if args.rank else "all weights"
    print(
        f"\n{what}: {LAYERS} layers of {HIDDEN}, V {VOCAB}, {rows(args)} rows of {args.seq}, fp32, "
        f"{os.cpu_count()} cores, {args.repeats} runs of {args.steps} steps"
    )
    heads = ("step best", "median", "tokens/s", "ours/it", "processor", "loss")
    print(" " * 12 + "".join(f"{head:>{n}}" for head, n in zip(heads, WIDTHS, strict=True)))
    best = {name: per_token(runs, "seconds") for name, runs in found.items()}
    busy = {name: per_token(runs, "busy") for name, runs in found.items()}
    for name, runs in found.items():
        every = sorted(s for run in runs for s in run["seconds"])
        print(
            f"{name:12}{every[0]:9.3f}s{every[len(every) // 2]:7.3f}s{1 / best[name]:10,.0f}"
            f"{best[name] / best['ours']:9.2f}{busy[name] / busy['ours']:12.2f}"
            f"{runs[0]['loss']:9.4f}"
        )
    losses = [runs[0]["loss"] for name, runs in found.items() if name != "peft-padded"]
    assert max(losses) - min(losses) < 1e-3, f"the first losses differ: {losses}"


def per_token(runs: list[dict], kind: str) -> float:
    """The least seconds of a step by the tokens of its examples."""
    return min(s / t for run in runs for s, t in zip(run[kind], run["tokens"], strict=True))


def run_child(args: argparse.Namespace) -> dict:
    import torch

    from mtcli.core.runtime.launch import set_matmul

    torch.set_num_threads(threads())
    if args.child == "ours":
        set_matmul("fast")
    elif args.child == "peft-tuned":
        torch.set_float32_matmul_precision("medium")
    step = ours(args) if args.child == "ours" else theirs(args)
    seconds, busy, tokens, losses = [], [], [], []
    for number in range(args.steps + 1):  # the first warms up
        start, worked = perf_counter(), process_time()
        loss, count = step(number)
        if number:
            seconds.append(perf_counter() - start)
            busy.append(process_time() - worked)
            tokens.append(count)
        losses.append(loss)
    return {"seconds": seconds, "busy": busy, "tokens": tokens, "loss": losses[0]}


def config(args: argparse.Namespace):
    from mtcli.core.checkpoint.fine_tuning import source_of
    from mtcli.core.config.loading import load_config

    settings = [
        f"data.train={args.folder}/my.jsonl",
        f"batch.seq_len={args.seq}",
        f"batch.global_batch_size={rows(args)}",
        "batch.micro_batch_size=1",
        f"optimizer.lr={LR}",
        "optimizer.schedule=constant",
        f"lora.rank={args.rank}",
        "train.device=cpu",
        "train.steps=1000",
    ]
    return load_config(source_of(f"{args.folder}/hf"), settings)


def opened(args: argparse.Namespace):
    """(trainer, loader) of ours; the loader gives everybody's batches."""
    import torch

    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.training.loader import open_loader
    from mtcli.core.training.state import load_weights, starting_point
    from mtcli.core.training.step import Trainer

    run = config(args)
    trainer = Trainer(run, Runtime(0, 1, 0, 1, torch.device("cpu")))
    load_weights(trainer, starting_point(run, trainer.groups.world).checkpoint)
    return trainer, open_loader(run, trainer.groups)


def rows(args: argparse.Namespace) -> int:
    """Rows of a step."""
    return args.tokens // args.seq


def batch_rows(args: argparse.Namespace, number: int) -> range:
    """The rows of a global batch."""
    return range(number * rows(args), (number + 1) * rows(args))


def examples_of(data, of_step: range) -> list:
    """The numbers of the examples of each row."""
    return [data.epochs.items(row) for row in of_step]


def real_tokens(data, of_step: range) -> int:
    """Tokens of examples in rows: those that fill rows up are none."""
    return sum(int(data.lengths[examples].sum()) for examples in examples_of(data, of_step))


def ours(args: argparse.Namespace):
    trainer, loader = opened(args)

    def step(number: int) -> tuple[float, int]:
        of_step = batch_rows(args, number)
        return trainer.train_step(loader).loss, real_tokens(loader.batches, of_step)

    return step


def theirs(args: argparse.Namespace):
    import torch
    from transformers import AutoModelForCausalLM

    _, loader = opened(args)
    data = loader.batches
    model = AutoModelForCausalLM.from_pretrained(f"{args.folder}/hf").train()
    if args.rank:
        from peft import LoraConfig, get_peft_model

        names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        lora = LoraConfig(r=args.rank, lora_alpha=ALPHA, target_modules=names)
        model = get_peft_model(model, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    batches = padded if args.child == "peft-padded" else packed

    def step(number: int) -> tuple[float, int]:
        of_step = batch_rows(args, number)
        total, weight = 0.0, float(data.loss_weights(of_step.start, len(of_step)).sum())
        for inputs, labels, weights in batches(data, of_step):
            logits = model(**inputs, use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            loss = (losses * weights.flatten()).sum() / weight
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total, real_tokens(data, of_step)

    return step


def packed(data, of_step: range):
    """A row at a time, as ours: positions and a mask of its documents."""
    import torch

    for row in of_step:
        tokens, documents = (torch.from_numpy(f(row, 1)) for f in (data.batch, data.documents))
        of = documents[:, :-1]
        seq = of.shape[1]
        causal = torch.ones(seq, seq, dtype=torch.bool).tril()
        mask = ((of[:, :, None] == of[:, None, :]) & causal)[:, None]
        begins = torch.cat([torch.ones_like(of[:, :1]), (of[:, 1:] != of[:, :-1]).int()], 1).bool()
        at = torch.arange(seq)[None]
        positions = at - torch.where(begins, at, 0).cummax(1).values
        inputs = {"input_ids": tokens[:, :-1], "attention_mask": mask, "position_ids": positions}
        yield inputs, tokens[:, 1:], torch.from_numpy(data.loss_weights(row, 1))


def padded(data, of_step: range):
    """The same examples, as many in a batch as fill a row on average, padded to its longest."""
    import torch

    by_row = examples_of(data, of_step)
    examples = [int(example) for row in by_row for example in row]
    random.Random(of_step.start).shuffle(examples)
    size = max(1, len(examples) // len(by_row))
    for first in range(0, len(examples), size):
        part = examples[first : first + size]
        longest = max(int(data.lengths[e]) for e in part)
        tokens = torch.zeros(len(part), longest, dtype=torch.int64)
        weights, mask = torch.zeros(len(part), longest), torch.zeros_like(tokens)
        for i, example in enumerate(part):
            found, length = data.examples[data.source[example]], int(data.lengths[example])
            end = int(found.ends[data.number[example]])
            tokens[i, :length] = torch.from_numpy(found.tokens[end - length : end].copy())
            weights[i, :length] = torch.from_numpy(found.weights[end - length : end].copy())
            mask[i, :length] = 1
        inputs = {"input_ids": tokens[:, :-1], "attention_mask": mask[:, :-1]}
        yield inputs, tokens[:, 1:], weights[:, 1:]


if __name__ == "__main__":
    main()
