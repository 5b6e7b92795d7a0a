"""BERT's original order of norms beside Megatron-LM's, on a narrow and deep model.

Megatron-LM (arXiv:1909.08053, section 5.3 and figure 7) moved the norms before attention and MLP,
as models in the original order did not train once they were larger. Here both train on the masked
words of sentences that count, from the command line, with the same seed, batches and initial
weights. Real text would be the better case, but no model of this size gets beyond the frequencies
of its words in an hour on a CPU. Writes JSON, and a plot for the docs.

    python benchmarks/bench_norm_order.py
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import mean

from arguments import Arguments, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

RATES = (3e-3,)
VOCAB, ROW, ROWS, LAST, WARMUP = 300, 32, 32, 20, 3
MODEL = ["num_layers=12", "hidden_size=64", "num_heads=4", f"vocab_size={VOCAB}"]
# 0.02 for the paper's 1,024 columns, by the root of the width
MODEL += [f"max_seq_len={ROW}", "dropout=0", "attention_dropout=0", "init_std=0.08"]
SETTINGS = [f"model.{field}" for field in MODEL]
SETTINGS += [f"batch.seq_len={ROW}", f"batch.micro_batch_size={ROWS}"]
SETTINGS += [f"batch.global_batch_size={ROWS}"]
SETTINGS += ["train.precision=fp32", "parallel.recompute=none", "train.log_every=1000"]
SETTINGS += ["optimizer.schedule=constant"]


def main() -> None:
    args = parse()
    rows = json.loads(Path(args.read).read_text()) if args.read else {}
    if not rows:
        with tempfile.TemporaryDirectory() as folder:
            data = preprocessed(Path(folder), args.documents)
            cases = [(order, rate) for rate in args.rates for order in ("pre", "post")]
            for order, rate in each(cases, lambda case: f"{case[0]}, {case[1]:g}"):
                name = f"{order}, lr {rate:g}"
                rows[name] = run(order, rate, [f'data.train=["{data}"]', *args.set], args.steps)
                say(f"{name:16} {mean(rows[name][-LAST:]):.3f}")
    show(rows)
    write_rows(args.json, rows)
    if args.plot:
        draw(rows, Path(args.plot))


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, steps=3, documents=300)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rates", type=lambda x: [float(r) for r in x.split(",")], default=RATES)
    parser.add_argument("--documents", type=int, default=3000, help="of the text")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--plot", help="draw the losses into this file")
    parser.add_argument("--read", help="losses that were measured")
    return parser.parse_args()


def preprocessed(folder: Path, count: int) -> Path:
    """The prefix of sentences that count in threes through 60 words, from document to document
    onwards from another one: easy to predict for a model that looks at its neighbours."""
    words = [first + rest for first in "bdfgklmnprst" for rest in ("ab", "ec", "id", "of", "ug")]
    draw, documents = random.Random(0), []
    for _ in range(count):
        at, text = draw.randrange(len(words)), []
        for _ in range(4):
            count = draw.randint(4, 8)
            said = " ".join(words[(at + 3 * i) % len(words)] for i in range(count))
            text.append(f"{said.capitalize()}.")
            at += 3 * count
        documents.append(" ".join(text))
    (folder / "text.txt").write_text("\n\n".join(documents))
    words = [str(folder / "text.txt"), "--output", str(folder / "text"), "--tokenizer"]
    mtcli("preprocess", *words, f"train:{VOCAB}", "--sentences", "--split-on", "blank")
    return folder / "text"


def run(order: str, rate: float, settings: list[str], steps: int) -> list[float]:
    """The training loss of each step; infinite after one that is none."""
    with tempfile.TemporaryDirectory() as output:
        given = [*SETTINGS, f"model.norm_order={order}", f"optimizer.lr={rate:g}"]
        given += [f"train.steps={steps}", f"optimizer.warmup_steps={WARMUP}"]
        given += [f"train.output={output}", *settings]
        mtcli("train", "bert-110m", *sets(given))
        return [round(step["loss"], 4) for step in metrics(Path(output))]


def show(rows: dict[str, list[float]]) -> None:
    """Prints each run's first loss, and the mean of its last ones."""
    print(f"{'':18}{'first loss':>11}{'last losses':>12}")
    for name, losses in rows.items():
        print(f"{name:18}{losses[0]:11.3f}{mean(losses[-LAST:]):12.3f}")


def draw(rows: dict[str, list[float]], path: Path) -> None:
    """Draws training losses by step, a panel for each learning rate."""
    import matplotlib.pyplot as plt

    rates = list(dict.fromkeys(name.split(", ")[1] for name in rows))
    figure, panels = plt.subplots(
        1, len(rates), figsize=(5 * len(rates), 4), sharey=True, layout="constrained", squeeze=False
    )
    for panel, rate in zip(panels[0], rates, strict=True):
        for order, label in (("post", "(a) original"), ("pre", "(b) rearranged")):
            losses = rows[f"{order}, {rate}"]
            smooth = [mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
            panel.plot(range(1, len(smooth) + 1), smooth, label=label, lw=1.2)
        panel.set(xlabel="step", title=rate)
    panels[0][0].set(ylabel="training loss: masked words and order")
    panels[0][0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
