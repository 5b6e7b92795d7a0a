"""Takes a tiny random model of each Hugging Face family through mtcli, as a user would, and back.

transformers writes a folder; `mtcli shard --verify` reads it, `mtcli train` runs 6 steps of SGD on
it on tp=2, pp=2, and `mtcli shard --to hf --verify` writes the weights after 3. transformers trains
on from both folders. All samples are one sequence, so its losses should be mtcli's: of steps 1 to 3
from its own folder, and of steps 4 to 6 from the one that came back.

    python benchmarks/families_by_command.py                 # all families of tests/core/tiny_hf.py
    python benchmarks/families_by_command.py gemma2 glm4     # some
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from arguments import Arguments, write_rows
from runs import metrics, mtcli, sets
from torch.nn.functional import cross_entropy

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "core")]
from indexed_dataset import write_dataset  # noqa: E402 - a file of the tests
from tiny_hf import ENCODERS, FAMILIES, configs  # noqa: E402 - a file of the tests

SEQ_LEN, STEPS, RATE = 52, 6, 0.1


def main() -> None:
    """Prints a row for each family: the first and the last loss, and how far transformers' are from
    mtcli's at most, ahead of the export and after it."""
    parser = Arguments(__doc__, families=["llama"])
    parser.add_argument("families", nargs="*", help="[all of tests/core/tiny_hf.py but encoders]")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tiny = configs()
    print(f"| family | loss of step 1 | of step {STEPS} | differ by, steps 1 to 3 | 4 to {STEPS} |")
    print("|---|---|---|---|---|")
    others = ("gpt2", *ENCODERS)  # of 3 heads, and without next tokens
    rows = {}
    for name in args.families or (name for name in FAMILIES if name not in others):
        with TemporaryDirectory() as folder:
            rows[name] = found = row(tiny[name], Path(folder))
        losses = f"{found['first_loss']:.6f} | {found['last_loss']:.6f}"
        gaps = " | ".join(f"{gap:.1e}" for gap in found["differences"])
        print(f"| {name} | {losses} | {gaps} |", flush=True)
    write_rows(args.json, rows)


def row(config: transformers.PretrainedConfig, folder: Path) -> dict:
    """Takes a model of a config through mtcli in a folder; returns its losses and differences."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "theirs")
    period = np.random.default_rng(3).integers(3, 50, SEQ_LEN)
    sequence = np.append(period, period[0])
    write_dataset(folder / "data", [np.append(np.tile(period, 40), period[0])], np.uint16)
    mtcli("shard", folder / "theirs", folder / "ours", "--verify", "--layout", "tp=2")
    losses = trained(folder, config.num_hidden_layers)
    saved = folder / "run" / "checkpoints" / f"step-{STEPS // 2:08d}"
    mtcli("shard", saved, folder / "back", "--to", "hf", "--verify")
    halves = losses[: STEPS // 2], losses[STEPS // 2 :]
    differences = [
        max(abs(a - b) for a, b in zip(half, their_losses(folder / name, sequence), strict=True))
        for name, half in zip(("theirs", "back"), halves, strict=True)
    ]
    return {"first_loss": losses[0], "last_loss": losses[-1], "differences": differences}


def trained(folder: Path, layers: int) -> list[float]:
    """Trains on 4 ranks, saves half-way, and returns the loss of each step."""
    settings = {
        "data.train": folder / "data", "data.split": "1,0,0", "train.output": folder / "run",
        "train.steps": STEPS, "train.save_every": STEPS // 2, "train.precision": "fp32",
        "parallel.tp": 2, "parallel.pp": 2, "parallel.stage_layers": [layers // 2, -(-layers // 2)],
        "batch.seq_len": SEQ_LEN, "batch.micro_batch_size": 1, "batch.global_batch_size": 2,
        "optimizer.name": "sgd", "optimizer.lr": RATE, "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0,
        "model.aux_loss_coeff": 0.0, "model.router_bias_update_rate": 0.0,
    }  # fmt: skip
    given = sets(f"{name}={value}" for name, value in settings.items())
    mtcli("train", folder / "theirs", "--nproc", 4, *given)
    return [entry["loss"] for entry in metrics(folder / "run") if "loss" in entry]


def their_losses(folder: Path, sequence: np.ndarray) -> list[float]:
    """The losses of the sequence of half of the steps, as transformers trains by SGD."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()  # without dropout
    tokens, losses = torch.tensor(sequence), []
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS // 2):
        loss = cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    main()
