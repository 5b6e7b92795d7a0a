"""Core-sets beside random subsets and all data: logistic regression, and a language model.

`logistic` trains softmax regression on scikit-learn's digits by incremental gradient steps, as the
CRAIG paper does: the loss of all training data against gradients computed, and against seconds with
the selection in them. `language` trains a small GPT on a tenth of a corpus of three kinds of text:
clean, repeated and gibberish; it needs WikiText-103 in the folder that MTCLI_TEST_DATA names.

    python benchmarks/bench_craig.py logistic --plot docs/images/craig-logistic.png
    python benchmarks/bench_craig.py language --plot docs/images/craig-language.png
"""

import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from arguments import Arguments, data_folder, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

from mtcli.core.data.indexed import write_index

SEEDS = 5
SEQ_LEN = 128
KINDS = ("clean", "repeated", "gibberish")
# Of the language model: bytes of each kind of text, and the runs.
KIND_BYTES = 128 << 10
PASSAGE = 8 << 10  # bytes that are repeated
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_size": 257,
    "max_seq_len": SEQ_LEN,
}
WARM_UP, STEPS = 60, 150  # of the model that selects, and of each run
CHOICES = {
    "core-set": ("--method", "craig"),
    "random": ("--method", "random"),
    "importance resampling": ("--method", "dsir"),
    "all data": None,
}


def main() -> None:
    parser = Arguments(__doc__, needs=("sklearn",))
    parser.add_argument("what", choices=("logistic", "language"), nargs="?", default="logistic")
    parser.add_argument("--plot", help="draw into this file")
    args = parser.parse_args()
    run, draw = (logistic, plot_logistic) if args.what == "logistic" else (language, plot_language)
    found = run(args.tiny)
    write_rows(args.json, found)
    if args.plot:
        draw(found, args.plot)


# --- softmax regression on digits


class Curve(NamedTuple):
    """The loss and the held-out accuracy of a run after so many gradients and seconds."""

    gradients: list[int]
    seconds: list[float]
    losses: list[float]
    accuracies: list[float]


EPOCHS_OF_ALL = 20  # gradients of a run, in passes over all training data
RATES = (0.3, 0.1, 0.03)
PENALTY = 1e-5
PARTS = (0.1, 0.3)


def logistic(tiny: bool) -> dict[str, list[dict]]:
    """The curves of each choice, by seed; the learning rate is the best of RATES for each."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data, labels = load_digits(return_X_y=True)
    split = train_test_split(data / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    _members(split[0], split[2], PARTS[0], "core-set", seed=0)  # imports, and compiles loops
    choices = {"all data": (1.0, "all")}
    seeds, rates, epochs = (1, RATES[:1], 1) if tiny else (SEEDS, RATES, EPOCHS_OF_ALL)
    for part in PARTS[: 1 if tiny else None]:
        choices |= {f"{kind} {part:.0%}": (part, kind) for kind in ("core-set", "random")}
    found, heading = {}, "to 1.05 times the loss of all data: gradients, seconds"
    say(f"{'':16}{'rate':>6}{'loss':>9}{'accuracy':>10}{heading:>52}")
    for name in each(choices):
        part, kind = choices[name]
        runs = [
            [_regression(split, (part, kind), rate, seed, epochs) for seed in range(seeds)]
            for rate in rates
        ]
        best = min(range(len(rates)), key=lambda i: np.mean([r.losses[-1] for r in runs[i]]))
        found[name] = [run._asdict() | {"rate": RATES[best]} for run in runs[best]]
        goal = 1.05 * np.mean([run["losses"][-1] for run in found["all data"]])
        reached = [at for run in runs[best] if (at := _first_below(run, goal))]
        told = "never"
        if reached:
            gradients, seconds = np.mean(reached, 0)
            told = f"{gradients:,.0f}, {seconds:.2f} ({len(reached)} of {len(runs[best])})"
        loss = np.mean([run.losses[-1] for run in runs[best]])
        accuracy = np.mean([run.accuracies[-1] for run in runs[best]])
        say(f"{name:16}{RATES[best]:>6g}{loss:>9.4f}{accuracy:>10.4f}{told:>52}")
    return found


def _first_below(curve: Curve, goal: float) -> tuple[int, float] | None:
    for gradients, seconds, loss in zip(curve.gradients, curve.seconds, curve.losses, strict=True):
        if loss <= goal:
            return gradients, seconds
    return None


def _regression(split, choice: tuple[float, str], rate: float, seed: int, epochs: int) -> Curve:
    """One run: stochastic gradient steps of one weighted example each, in a random order."""
    x, x_held, y, y_held = split
    begin = time.perf_counter()
    members, weights = _members(x, y, *choice, seed)
    spent = time.perf_counter() - begin
    random, w = np.random.default_rng(seed), np.zeros((10, x.shape[1] + 1))
    x, x_held = (np.c_[one, np.ones(len(one))] for one in (x, x_held))
    targets, curve, done = np.eye(10)[y], Curve([0], [spent], [np.log(10.0)], [0.1]), 0
    weights = weights / weights.mean()
    check = len(x) // 4
    while done < epochs * len(x):
        begin = time.perf_counter()
        for i in random.permutation(len(members)):
            j, decayed = members[i], rate / (1.0 + 5.0 * done / len(x))
            z = w @ x[j]
            p = np.exp(z - z.max())
            p /= p.sum()
            w -= decayed * (weights[i] * np.outer(p - targets[j], x[j]) + PENALTY * w)
            done += 1
            if done % check == 0:
                spent += time.perf_counter() - begin
                for values, value in zip(
                    curve, (done, spent, *_quality(w, x, y, x_held, y_held)), strict=True
                ):
                    values.append(value)
                begin = time.perf_counter()
        spent += time.perf_counter() - begin
    return curve


def _quality(w, x, y, x_held, y_held) -> tuple[float, float]:
    z = x @ w.T
    z -= z.max(1, keepdims=True)
    loss = np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y])
    return float(loss), float(np.mean((x_held @ w.T).argmax(1) == y_held))


def _members(x, y, part: float, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Examples and their weights; of core-sets by the distances of examples within a class."""
    import torch

    from mtcli.core.parallel.groups import world_axis
    from mtcli.core.runtime.health.flight_recorder import FlightRecorder
    from mtcli.core.select.budgets import budgets_of
    from mtcli.core.select.coreset import Quota, Work, choose, random_orders

    if kind == "all":
        return np.arange(len(x)), np.ones(len(x))
    groups = [np.flatnonzero(y == label) for label in range(10)]
    sizes = [len(group) for group in groups]
    budgets = budgets_of(sizes, sizes, round(part * len(x)))
    if kind == "random":
        orders = random_orders(groups, budgets, seed)
        return np.concatenate(orders), np.ones(sum(budgets))
    work = Work(world_axis(0, 1, FlightRecorder()), torch.device("cpu"), seed)
    chosen = choose(torch.from_numpy(x).float(), groups, Quota(budgets), work)
    return chosen.indices, chosen.weights


def plot_logistic(found: dict[str, list[dict]], target: str) -> None:
    figure = _figure(2)
    for name, runs in found.items():
        style = {"core": "-", "rand": "--", "all ": ":"}[name[:4]]
        loss = np.mean([run["losses"] for run in runs], 0)
        for axis, key in zip(figure.axes, ("gradients", "seconds"), strict=True):
            axis.plot(np.mean([run[key] for run in runs], 0), loss, style, label=name)
    for axis, label in zip(figure.axes, ("gradients", "seconds, selection included"), strict=True):
        axis.set(xlabel=label, ylabel="loss of all training data", yscale="log")
    figure.axes[0].legend()
    figure.savefig(target, dpi=120)


# --- a language model


def language(tiny: bool) -> dict[str, dict[str, list[float]]]:
    """The held-out losses of each choice by seed, and the shares of the kinds of text in it."""
    data = data_folder("wikitext-103")
    if data is None:
        raise SystemExit("error: MTCLI_TEST_DATA names no folder with wikitext-103")
    seeds, warm_up, steps = (1, 2, 2) if tiny else (SEEDS, WARM_UP, STEPS)
    found: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in ("losses", *KINDS)} for name in CHOICES
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_corpora(folder, data / "wikitext-103")
        for seed in each(range(seeds)):
            _train(folder, seed, f"warm-{seed}", warm_up)
            for choice, method in CHOICES.items():
                subset = method and _select(folder, seed, method)
                loss = _train(folder, seed, f"run-{choice}-{seed}", steps, subset)
                found[choice]["losses"].append(loss)
                for kind, share in _shares(folder, subset).items():
                    found[choice][kind].append(share)
    random = np.array(found["random"]["losses"])
    say(f"{'held-out loss':24}{'mean':>8}{'- random, by seed':>44}{'clean':>8}{'repeated':>10}")
    for choice, figures in found.items():
        less = " ".join(f"{loss:+.3f}" for loss in np.array(figures["losses"]) - random)
        shares = f"{np.mean(figures['clean']):>8.1%}{np.mean(figures['repeated']):>10.1%}"
        say(f"{choice:24}{np.mean(figures['losses']):>8.4f}{less:>44}{shares}")
    return found


def _write_corpora(folder: Path, home: Path) -> None:
    """The mixture at mixed, a target of clean text at clean, held-out clean text at valid."""
    clean = (home / "wiki.test.tokens").read_bytes()
    random = np.random.default_rng(0)
    passage = clean[-PASSAGE:]
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)
    parts = {
        "clean": clean[:KIND_BYTES],
        "repeated": (passage * (KIND_BYTES // PASSAGE + 1))[:KIND_BYTES],
        "gibberish": random.choice(letters, KIND_BYTES).tobytes(),
        "target": clean[KIND_BYTES : KIND_BYTES + (64 << 10)],
        "valid": (home / "wiki.valid.tokens").read_bytes()[: 64 << 10],
    }
    mixed = b"".join(parts.pop(kind) for kind in KINDS)
    for name, text in (parts | {"mixed": mixed}).items():
        np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / f"{name}.bin")
        write_index(folder / f"{name}.idx", np.dtype("<u2"), np.array([len(text)]))


def _train(folder: Path, seed: int, output: str, steps: int, subset: str | None = None) -> float:
    """Trains on the mixture, or a subset of it; the last held-out loss."""
    settings = {f"model.{name}": value for name, value in MODEL.items()} | {
        "seed": seed,
        "batch.seq_len": SEQ_LEN,
        "batch.micro_batch_size": 16,
        "batch.global_batch_size": 16,
        "data.train": '["mixed"]',
        "data.valid": '["valid"]',
        "optimizer.lr": 3e-3,
        "optimizer.warmup_steps": 20,
        "train.steps": steps,
        "train.eval_every": steps,
        "train.eval_batches": 16,
        "train.output": output,
    }
    settings |= {"data.subset": subset} if subset else {}
    (folder / "base.toml").write_text("[model]\narchitecture = 'gpt'\n")
    given = sets(f"{name}={value}" for name, value in settings.items())
    mtcli("train", "base.toml", *given, folder=folder)
    return metrics(folder / output)[-1]["valid_loss"]


def _select(folder: Path, seed: int, method: tuple[str, ...]) -> str:
    output = f"{method[1]}-{seed}.json"
    # One source: which kind a sequence is of nobody says of a crawled corpus.
    words = ["--data", "mixed", "--model", f"warm-{seed}", "--fraction", "0.1", "--output", output]
    words += ["--target", "target"] if method[1] == "dsir" else []
    words += ["--set", f"seed={seed}", "--set", 'data.valid=["valid"]']
    mtcli("select", *words, *method, folder=folder)
    return output


def _shares(folder: Path, subset: str | None) -> dict[str, float]:
    """The shares of the kinds among the sequences, by their weights."""
    if subset is None:
        return dict.fromkeys(KINDS, 1.0 / len(KINDS))
    file = json.loads((folder / subset).read_text())
    kinds = np.array(file["indices"]) * SEQ_LEN // KIND_BYTES
    weights = np.bincount(np.minimum(kinds, 2), file["weights"], 3) / sum(file["weights"])
    return dict(zip(KINDS, weights.tolist(), strict=True))


def plot_language(found: dict[str, dict[str, list[float]]], target: str) -> None:
    figure = _figure(2)
    losses, shares = figure.axes
    for place, figures in enumerate(found.values()):
        losses.plot([place] * len(figures["losses"]), figures["losses"], "o", alpha=0.6)
        losses.plot([place - 0.2, place + 0.2], [np.mean(figures["losses"])] * 2, "k-")
        bottom = 0.0
        for color, kind in enumerate(KINDS):
            share = float(np.mean(figures[kind]))
            label = kind if place == 0 else None
            shares.bar(place, share, bottom=bottom, color=f"C{color}", label=label)
            bottom += share
    for axis in (losses, shares):
        axis.set_xticks(range(len(found)), [name.replace(" ", "\n") for name in found])
    losses.set_ylabel("held-out loss, five seeds")
    shares.set_ylabel("weight of each kind of text")
    shares.legend(ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(target, dpi=120)


def _figure(columns: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, _ = plt.subplots(1, columns, figsize=(5.0 * columns, 4.0), layout="constrained")
    return figure


if __name__ == "__main__":
    main()
