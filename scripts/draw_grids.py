"""Draws docs/images/grids.png: planned steps of two-dimensional tensor parallelism over one's.

python scripts/draw_grids.py  # also prints the table of docs/concepts/tensor-2d.md

GPT-3's layers with 128 heads on H100s, forward and backward in bf16, nothing recomputed.
"""

from pathlib import Path

import matplotlib
import typer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from mtcli.core.config.loading import load_config
from mtcli.core.plan.predict import predict

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "grids.png"
RANKS = (4, 16, 64)
SEQUENCES = (8, 16, 32, 64, 128)
SEQ_LEN, LAYERS, BYTES = 2048, 5, 2**30  # as many layers as 4 GPUs of 80 GiB hold


def main() -> None:
    """Writes the picture, and prints the table."""
    figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.4))
    typer.echo("| GPUs | sequences | 1D, s | 2D, s | 2D / 1D | 1D, GiB | 2D, GiB |")
    typer.echo("|---|---|---|---|---|---|---|")
    for tp in RANKS:
        ratios, less = [], []
        for sequences in SEQUENCES:
            one, two = (planned(tp, mode, sequences) for mode in ("1d", "2d"))
            ratios.append(two[0] / one[0])
            less.append(two[1] / one[1])
            sizes = f"{ratios[-1]:.2f} | {one[1] / BYTES:.1f} | {two[1] / BYTES:.1f}"
            typer.echo(f"| {tp} | {sequences} | {one[0]:.3f} | {two[0]:.3f} | {sizes} |")
        times.plot(SEQUENCES, ratios, marker="o", label=f"{tp} GPUs")
        memory.plot(SEQUENCES, less, marker="o", label=f"{tp} GPUs")
    for axes, what in ((times, "step time"), (memory, "bytes per GPU")):
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(xscale="log", xlabel=f"sequences of {SEQ_LEN:,} tokens", title=f"{what}, 2D / 1D")
        axes.set_xticks(SEQUENCES, [str(n) for n in SEQUENCES])
        axes.minorticks_off()
        axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def planned(tp: int, mode: str, sequences: int) -> tuple[float, float]:
    """(seconds of a step of one micro-batch, bytes of the fullest GPU)."""
    fields = {"parallel.tp": tp, "parallel.tp_mode": mode, "parallel.pp": 1}
    fields |= {"model.num_layers": LAYERS, "model.num_heads": 128, "train.precision": "bf16"}
    fields |= {f"batch.{kind}_batch_size": sequences for kind in ("micro", "global")}
    config = load_config("gpt3-175b", [f"{name}={value}" for name, value in fields.items()])
    found = predict(config, tp, "h100")
    return found.step_seconds, found.memory.total


if __name__ == "__main__":
    main()
