"""BERT's pre-training step on CPU beside transformers on the same text, and packing beside padding.

Contenders take turns, each run a process of its own: "hf" as it comes, a sequence of a document to
a row, padded to the longest of the batch; "hf-packed" and "hf-tuned" our own packed rows and masks,
the second with our allocator variables, `sdpa` and torch's `medium` products; "ours-padded" our
step on rows of one sequence. All start from the same weights and mask the same tokens, so the first
losses agree. Ratios are of seconds, and of processor seconds, by token of text: padding is none.

    python benchmarks/bench_bert.py                     # a model of 4 layers of 256, rows of 256
    python benchmarks/bench_bert.py --drop 0.1          # with dropout, as BERT's recipe has it
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
from runs import answer, mtcli

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, MICRO = 4, 256, 4, 8192, 256, 4
LR, BETAS, CLIP = 1e-4, (0.9, 0.999), 1.0
WIDTHS = (10, 8, 9, 10, 9, 12, 9)
CONTENDERS = ("ours", "ours-padded", "hf", "hf-packed", "hf-tuned")
SEGMENTS = ("tokens", "token_types", "labels", "weights")


def main() -> None:
    args = parse()
    if args.child:
        print(json.dumps(run_child(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        prepare(args)
        found: dict[str, list[dict]] = {name: [] for name in args.contenders}
        for name in in_turn(args.contenders, args.repeats):
            found[name].append(spawn(args, name))
            say(f"{name:12} {min(found[name][-1]['seconds']):.3f} s a step")
    show(args, found)
    write_rows(args.json, found)


def parse() -> argparse.Namespace:
    parser = Arguments(
        __doc__,
        needs=("transformers",),
        repeats=1,
        steps=1,
        documents=300,
        rows=4,
        contenders=["ours", "hf"],
    )
    parser.add_argument("--drop", type=float, default=0.0, help="dropout, and of attention")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run")
    parser.add_argument("--sentence", type=float, default=2.6, help="log of words, on average")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--documents", type=int, default=4000, help="of the text")
    parser.add_argument("--contenders", type=lambda x: x.split(","), default=CONTENDERS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> None:
    """Documents of 2 to 6 sentences of log-normal lengths, preprocessed; and the first weights."""
    draw, folder = random.Random(0), Path(args.folder)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 7))) for _ in range(3000)]
    documents = []
    for _ in range(args.documents):
        lengths = [max(2, int(draw.lognormvariate(args.sentence, 0.6))) for _ in range(4)]
        chosen = lengths[: draw.randint(2, 4)]
        documents.append(" ".join(" ".join(draw.choices(words, k=n)).title() + "." for n in chosen))
    (folder / "text.txt").write_text("\n\n".join(documents))
    command = ["preprocess", str(folder / "text.txt"), "--split-on", "blank", "--sentences"]
    command += ["--tokenizer", f"train:{VOCAB}", "--output", str(folder / "text")]
    mtcli(*command)

    import torch
    from transformers import BertForPreTraining

    torch.manual_seed(0)
    BertForPreTraining(hf_config(args)).save_pretrained(folder / "hf")


def hf_config(args: argparse.Namespace):
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=SEQ,
        hidden_dropout_prob=args.drop,
        attention_probs_dropout_prob=args.drop,
    )


def spawn(args: argparse.Namespace, name: str) -> dict:
    from mtcli.core.runtime.launch import ALLOCATOR

    env = os.environ | (ALLOCATOR if name in ("ours", "ours-padded", "hf-tuned") else {})
    words = [f"--{flag}={getattr(args, flag)}" for flag in ("folder", "drop", "steps", "rows")]
    return answer(__file__, "--child", name, *words, env=env)


def show(args: argparse.Namespace, found: dict[str, list[dict]]) -> None:
    print(
        f"\nBERT: {LAYERS} layers of {HIDDEN}, V {VOCAB}, {args.rows} rows of {SEQ}, dropout "
        f"{args.drop:g}, fp32, {threads()} threads, {args.repeats} runs of {args.steps} steps"
    )
    heads = ("step best", "median", "text", "tokens/s", "ours/it", "processor", "loss")
    print(" " * 12 + "".join(f"{head:>{n}}" for head, n in zip(heads, WIDTHS, strict=True)))
    best = {name: per_token(runs, "seconds") for name, runs in found.items()}
    busy = {name: per_token(runs, "busy") for name, runs in found.items()}
    reference = "ours" if "ours" in found else next(iter(found))
    for name, runs in found.items():
        every = sorted(s for run in runs for s in run["seconds"])
        print(
            f"{name:12}{every[0]:9.3f}s{every[len(every) // 2]:7.3f}s{runs[0]['full']:9.0%}"
            f"{1 / best[name]:10,.0f}{best[name] / best[reference]:9.2f}"
            f"{busy[name] / busy[reference]:12.2f}{runs[0]['loss']:9.4f}"
        )
    losses = [runs[0]["loss"] for name, runs in found.items() if name != "ours-padded"]
    if not args.drop:
        assert max(losses) - min(losses) < 1e-3, f"the first losses differ: {losses}"


def per_token(runs: list[dict], kind: str) -> float:
    """The least seconds of a step by the tokens of its text."""
    return min(s / t for run in runs for s, t in zip(run[kind], run["tokens"], strict=True))


def run_child(args: argparse.Namespace) -> dict:
    import torch

    from mtcli.core.runtime.launch import set_matmul

    torch.set_num_threads(threads())
    if args.child.startswith("ours"):
        set_matmul("fast")
    elif args.child == "hf-tuned":
        torch.set_float32_matmul_precision("medium")
    step = ours(args) if args.child.startswith("ours") else theirs(args)
    seconds, busy, tokens, losses, full = [], [], [], [], []
    for number in range(args.steps + 1):  # the first warms up
        start, worked = perf_counter(), process_time()
        loss, count, room = step(number)
        if number:
            seconds.append(perf_counter() - start)
            busy.append(process_time() - worked)
            tokens.append(count)
        losses.append(loss)
        full.append(count / room)
    found = {"seconds": seconds, "busy": busy, "tokens": tokens, "loss": losses[0]}
    return found | {"full": sum(full) / len(full)}


class Sequences:
    """The sequences of packed rows in order, each a row of its own; all are padded alike."""

    def __init__(self, packed, width: int) -> None:
        self.packed, self.width = packed, width
        self.read: list[tuple] = []
        self.next_row = 0

    def __len__(self) -> int:
        return len(self.packed)

    def rows(self, start: int, count: int):
        """Sequences start .. start + count - 1."""
        while len(self.read) < start + count:
            self.read += sequences(self.packed.rows(self.next_row, 1))
            self.next_row += 1
        return padded(self.read[start : start + count], self.width)


def sequences(rows) -> list[tuple]:
    """The arrays of SEGMENTS, class and class weight of each sequence of packed rows."""
    found = []
    for number, first in enumerate(rows.firsts):
        row, at = divmod(int(first), rows.tokens.shape[1])
        length = int((rows.documents[row] == rows.documents[row, at]).sum())
        arrays = (getattr(rows, name)[row, at : at + length] for name in SEGMENTS)
        found.append((*arrays, rows.classes[number], rows.class_weights[number]))
    return found


def padded(found: list[tuple], width: int):
    """Rows of one sequence each; padding is a document of its own."""
    import numpy as np

    from mtcli.core.data.bert.row_format import EncoderRows

    *columns, classes, weights = zip(*found, strict=True)
    wide = {}
    for name, arrays in zip(SEGMENTS, columns, strict=True):
        wide[name] = np.zeros((len(found), width), arrays[0].dtype)
        for row, array in zip(wide[name], arrays, strict=True):
            row[: len(array)] = array
    lengths = np.array([len(array) for array in columns[0]])
    documents = (np.arange(width) >= lengths[:, None]).astype(np.int32)
    firsts = np.arange(len(found)) * width
    return EncoderRows(
        **wide, documents=documents, firsts=firsts, classes=np.array(classes),
        class_weights=np.array(weights),
    )  # fmt: skip


def opened(args: argparse.Namespace, rows: int = 0, micro: int = MICRO, width: int = SEQ):
    """(trainer, loader) of ours; the loader gives everybody's batches."""
    import torch

    from mtcli.core.checkpoint.fine_tuning import source_of
    from mtcli.core.config.loading import load_config
    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.training.loader import open_loader
    from mtcli.core.training.state import load_weights, starting_point
    from mtcli.core.training.step import Trainer

    settings = [f'data.train=["{args.folder}/text"]', f"batch.seq_len={width}", "train.steps=100"]
    settings += [f"batch.global_batch_size={rows or args.rows}", f"batch.micro_batch_size={micro}"]
    settings += [f"optimizer.lr={LR}", "optimizer.schedule=constant", "train.device=cpu"]
    settings += [f"model.dropout={args.drop}", f"model.attention_dropout={args.drop}"]
    settings += ["train.precision=fp32", "parallel.recompute=none", "optimizer.weight_decay=0"]
    run = load_config(source_of(f"{args.folder}/hf"), settings)
    trainer = Trainer(run, Runtime(0, 1, 0, 1, torch.device("cpu")))
    load_weights(trainer, starting_point(run, trainer.groups.world).checkpoint)
    return trainer, open_loader(run, trainer.groups)


def ours(args: argparse.Namespace):
    trainer, loader = opened(args)
    packed, rows, width = loader.batches, args.rows, SEQ
    if args.child == "ours-padded":  # as many tokens in a step, and a micro-batch
        some = sequences(packed.rows(0, args.rows + args.steps))
        width = max(len(one[0]) for one in some)
        micro = MICRO * SEQ // width
        rows = micro * args.rows // MICRO
        trainer, loader = opened(args, rows, micro, width)
        loader.batches = Sequences(packed, width)

    def step(number: int) -> tuple[float, int, int]:
        found = loader.batches.rows(number * rows, rows)
        return trainer.train_step(loader).loss, text_tokens(found), rows * width

    return step


def text_tokens(rows) -> int:
    """Tokens of sequences: padding is none."""
    return sum(len(one[0]) for one in sequences(rows))


def theirs(args: argparse.Namespace):
    import torch
    from transformers import BertForPreTraining

    _, loader = opened(args)
    packed = loader.batches
    model = BertForPreTraining.from_pretrained(f"{args.folder}/hf").train()
    trained = list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    batches = padded_batches if args.child == "hf" else packed_batches
    chooses = args.child == "hf-tuned"

    def step(number: int) -> tuple[float, int, int]:
        rows = packed.rows(number * args.rows, args.rows)
        predicted, classified = float(rows.weights.sum()), float(rows.class_weights.sum())
        total, room = 0.0, 0
        for batch, mask in batches(packed, number, args.rows):
            loss = hf_loss(model, batch, mask, (predicted, classified), chooses)
            loss.backward()
            total, room = total + loss.item(), room + batch.tokens.numel()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total, text_tokens(rows), room

    return step


def hf_loss(model, batch, mask, sums: tuple[float, float], chooses: bool):
    """Their loss of a micro-batch over the global batch's sums; only masked tokens get logits where
    it `chooses`."""
    import torch.nn.functional as F

    from mtcli.core.parallel.attention_mask import restarted

    positions = restarted(batch.documents.contiguous()).clamp(max=SEQ - 1)
    given = {"token_type_ids": batch.token_types, "position_ids": positions}
    hidden = model.bert(batch.tokens, attention_mask=mask, **given)[0].flatten(0, 1)
    labels, weights = batch.labels.flatten(), batch.weights.flatten()
    pooled = model.bert.pooler(hidden[batch.firsts][:, None])
    if chooses:
        at = weights.nonzero()[:, 0]
        scores, labels, weights = model.cls.predictions(hidden[at]), labels[at], weights[at]
    else:
        scores = model.cls.predictions(hidden)
    masked = F.cross_entropy(scores, labels, reduction="none") * weights
    order = F.cross_entropy(model.cls.seq_relationship(pooled), batch.classes, reduction="none")
    return masked.sum() / sums[0] + (order * batch.class_weights).sum() / sums[1]


def packed_batches(packed, number: int, count: int):
    """Micro-batches of our rows, and a mask of their sequences, to add to scores."""
    import torch

    for first in range(number * count, (number + 1) * count, MICRO):
        batch = on_torch(packed.rows(first, MICRO))
        same = batch.documents[:, :, None] == batch.documents[:, None, :]
        mask = torch.zeros(same.shape).masked_fill_(~same, torch.finfo(torch.float32).min)
        yield batch, mask[:, None]


def padded_batches(packed, number: int, count: int):
    """The same sequences, as many in a batch as ours have, padded to its longest."""
    found = sequences(packed.rows(number * count, count))
    random.Random(number).shuffle(found)
    size = -(-len(found) * MICRO // count)
    for first in range(0, len(found), size):
        part = found[first : first + size]
        batch = on_torch(padded(part, max(len(one[0]) for one in part)))
        yield batch, 1 - batch.documents.long()


def on_torch(rows):
    import torch

    return type(rows)(*(torch.from_numpy(array) for array in rows))


if __name__ == "__main__":
    main()
