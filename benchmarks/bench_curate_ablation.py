"""Does curation help? The same GPT on the same number of bytes of a dirty corpus, stage by stage.

The corpus is WikiText's test articles, some with broken Unicode, among what a crawl has: pages in
other languages, junk of symbols, word lists of shops, copies, and near copies under boilerplate.
Each run adds a stage to the one before, trains the same GPT from the same seed on its output, one
byte a token, and is evaluated on half of WikiText's validation articles; the other half are the
classifier's good examples, and its bad ones are other shops and junk. The last run has the clean
articles alone: what a perfect filter gives.

    python benchmarks/bench_curate_ablation.py --plot docs/images/curate-ablation.png \
        --json benchmarks/results/curate-ablation.json
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

from arguments import Arguments, data_folder, write_rows
from progress import each, say
from runs import metrics, mtcli, sets

STAGES = ["normalise", "language", "rules", "quality", "exact", "fuzzy"]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Polish", "Turkish", "Dutch", "Portuguese"]
SHOP = """
buy now cheap price the sale offer and shipping free of discount click here best to deal
shop online with order today that have save cart new brand store product review top be
"""
BOILERPLATE = (
    "Home Login Search Share this page with friends . All rights reserved . Read the terms"
)
MODEL = ["model.num_layers=2", "model.hidden_size=128", "model.num_heads=4", "model.vocab_size=257"]
MODEL += ["model.max_seq_len=128", "batch.seq_len=128"]
MODEL += ["batch.micro_batch_size=16", "batch.global_batch_size=16"]
DIRTY_MB = {"languages": 0.9, "symbols": 0.6, "shops": 0.6, "copies": 1.0, "near copies": 1.0}


def documents(path: Path, characters: int = 1500) -> list[str]:
    """Paragraphs of articles, joined to documents of about so many characters."""
    found, held = [], ""
    for line in path.read_text().splitlines():
        if len(line) > 200:
            held += line.strip().replace(" @-@ ", "-").replace(" @,@ ", ",") + "\n"
        if len(held) > characters:
            found.append(held)
            held = ""
    return found


def dirty(clean: list[str], source: random.Random, kinds: dict[str, float]) -> list[str]:
    """The clean documents, a fifth of them broken, and megabytes of what a crawl has beside."""
    import justext

    foreign = {name: sorted(justext.get_stoplist(name)) for name in LANGUAGES}
    shop, signs = SHOP.split(), "#$%^*|~<>{}[]0123456789 \n"

    def broken(text: str) -> str:
        curled = (
            text.replace(' " ', " \u201c ").replace(" ' ", " \u2019 ").replace(" - ", " \u2014 ")
        )
        return curled.encode().decode("cp1252", "replace")

    def near(text: str) -> str:
        words = text.split(" ")
        for _ in range(3):
            words[source.randrange(len(words))] = f"{source.randrange(1000)}"
        return f"{BOILERPLATE} {' '.join(words)} {BOILERPLATE}"

    copied, resembled = clean[10:22], clean[40:52]
    makers = {
        "languages": lambda: " ".join(source.choices(foreign[source.choice(LANGUAGES)], k=250)),
        "symbols": lambda: "".join(source.choices(signs, k=1500)),
        "shops": lambda: " ".join(source.choices(shop, k=280)),
        "copies": lambda: source.choice(copied),
        "near copies": lambda: near(source.choice(resembled)),
    }
    made = [broken(text) if n % 5 == 0 else text for n, text in enumerate(clean)]
    for name, megabytes in kinds.items():
        size = 0
        while size < megabytes * 1e6:
            made.append(makers[name]())
            size += len(made[-1].encode())
    source.shuffle(made)
    return made


def write(path: Path, texts: list[str]) -> None:
    lines = (json.dumps({"id": f"d{n:06d}", "text": text}) for n, text in enumerate(texts))
    path.write_text("".join(line + "\n" for line in lines))


def loss_of(folder: Path, name: str, options: argparse.Namespace, seed: int) -> float:
    """The loss on held-out text, nats per byte, of a GPT trained on `name`.jsonl's bytes."""
    if not (folder / f"{name}.bin").exists():
        words = [f"{name}.jsonl", "--output", name, "--tokenizer", "bytes"]
        mtcli("preprocess", *words, folder=folder)
    steps = options.steps
    run = [f"train.steps={steps}", f"train.eval_every={steps}"]
    run += [f"train.eval_batches={options.eval_batches}"]
    run += ["train.output=run", "train.device=cpu", f"seed={seed}", "optimizer.lr=2e-3"]
    data = [f'data.train=["{name}"]', 'data.valid=["held"]']
    shutil.rmtree(folder / "run", ignore_errors=True)
    mtcli("train", "tiny", *sets([*MODEL, *run, *data]), folder=folder)
    return [row["valid_loss"] for row in metrics(folder / "run") if "valid_loss" in row][-1]


def curated(folder: Path, stages: list[str]) -> dict[str, int]:
    """Writes `curated-N.jsonl`, of the first N stages; returns documents and bytes."""
    out = folder / "out"
    words = ["--set", f"stages={json.dumps(stages)}", "--set", "quality.model=q.bin", "--force"]
    words += ["--set", "quality.keep=threshold"]
    words += ["--output", "out", "--workers", "1"]
    mtcli("curate", "dirty.jsonl", *words, folder=folder)
    report = json.loads((out / "report.json").read_text())
    (folder / f"curated-{len(stages)}.jsonl").write_bytes(
        b"".join(map(read, sorted(out.glob("shard-*.jsonl.zst"))))
    )
    sizes = sum(source["bytes"] for source in report["sources"].values())
    return {"documents": report["documents"], "bytes": sizes}


def read(path: Path) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(path.read_bytes())


def draw(rows: list[dict], path: Path) -> None:
    """Draws the loss after each stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    axes = figure.subplots()
    means = [sum(row["losses"]) / len(row["losses"]) for row in rows]
    names = [row["after"] for row in rows[:-1]]
    axes.plot(names, means[:-1], "o-", color="#2f6fb0", label="after the stages so far")
    axes.axhline(means[-1], color="#5a9e5a", linestyle="--", label="clean articles alone")
    for name, row, mean in zip(names, rows, means, strict=False):
        axes.plot([name] * len(row["losses"]), row["losses"], "k.", markersize=4)
        axes.annotate(f"{mean:.3f}", (name, mean), (8, 4), textcoords="offset points")
    axes.plot([], [], "k.", markersize=4, label="each seed")
    axes.legend()
    axes.set(ylabel="loss on held-out WikiText, nats per byte")
    axes.margins(x=0.09)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = Arguments(__doc__, needs=("justext",), steps=2, seeds=1, eval_batches=1)
    parser.add_argument("--steps", type=int, default=200, help="of 2,048 bytes")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--eval-batches", type=int, default=60)
    parser.add_argument("--plot", help="draw them into this PNG")
    options = parser.parse_args()
    test_data = data_folder("wikitext-103/wiki.test.tokens")
    if test_data is None:
        why = "MTCLI_TEST_DATA names no folder with wikitext-103/wiki.test.tokens"
        say(why)
        return write_rows(options.json, {"skipped": why})
    data = test_data / "wikitext-103"
    stages, share = (STAGES[:1], 0.05) if options.tiny else (STAGES, 1.0)
    dirt = {kind: share * megabytes for kind, megabytes in DIRTY_MB.items()}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), random.Random(0)
        clean, valid = documents(data / "wiki.test.tokens"), documents(data / "wiki.valid.tokens")
        half = len(valid) // 2
        clean = clean[: 100 if options.tiny else None]
        write(folder / "clean.jsonl", clean)
        write(folder / "dirty.jsonl", dirty(clean, source, dirt))
        write(folder / "bad.jsonl", dirty([], source, {"shops": 0.3, "symbols": 0.1}))
        write(folder / "held.jsonl", valid[half:])
        write(folder / "good.jsonl", valid[:half])
        words = ["held.jsonl", "--output", "held", "--tokenizer", "bytes"]
        mtcli("preprocess", *words, folder=folder)
        words = ["--good", "good.jsonl", "--bad", "bad.jsonl", "--output", "q.bin"]
        mtcli("curate", "train-quality", *words, folder=folder)
        say(f"{'after':12}{'documents':>10}{'MB':>7}   loss on held-out text, nats per byte")
        cases = [(name, n) for n, name in enumerate(["nothing", *stages])] + [("clean only", -1)]
        for name, count in each(cases, lambda case: case[0]):
            if count < 0:
                texts, corpus = clean, "clean"
                facts = {"documents": len(texts), "bytes": sum(len(t.encode()) for t in texts)}
            else:
                facts, corpus = curated(folder, STAGES[:count]), f"curated-{count}"
            losses = [loss_of(folder, corpus, options, seed) for seed in range(options.seeds)]
            rows.append({"after": name, **facts, "losses": losses})
            told = "  ".join(f"{loss:.4f}" for loss in losses)
            say(f"{name:12}{facts['documents']:10,}{facts['bytes'] / 1e6:7.2f}   {told}")
    write_rows(options.json, rows)
    if options.plot:
        draw(rows, Path(options.plot))


if __name__ == "__main__":
    main()
