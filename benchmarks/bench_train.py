"""C5 and C6: the CPU training step beside Hugging Face transformers and a plain torch GPT.

Every contender starts from the same weights and sees the same tokens; their losses are compared
first. Contenders run in turn, each run a process of its own, so that allocator settings count:
"default" is as shipped, "tuned" has our allocator variables and torch's `medium` product as well.

    python benchmarks/bench_train.py --model tiny --precision fp32 --repeats 5
    python benchmarks/bench_train.py --contenders ours,ours-compiled  # with train.compile
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent))

SIZES = {  # layers, hidden, heads, vocabulary, tokens of a sequence, sequences of a step
    "nano": (4, 128, 4, 256, 128, 16),
    "tiny": (4, 256, 4, 8192, 256, 16),
    "124m": (12, 768, 12, 50257, 512, 4),
}
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="timed steps of a run")
    parser.add_argument("--contenders", default="ours,hf,plain,plain-tuned")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.steps = args.steps or (4 if args.model == "124m" else 20)
    if args.child:
        print(json.dumps(run_child(args)))
        return
    rows = measure(args)
    show(args, rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")


def measure(args: argparse.Namespace) -> dict[str, dict]:
    contenders = args.contenders.split(",")
    rows: dict[str, dict] = {name: {"seconds": [], "first_step": []} for name in contenders}
    for _ in range(args.repeats):
        for name in contenders:
            found = spawn(args, name)
            rows[name]["seconds"] += found["seconds"]
            rows[name]["first_step"].append(found["first_step"])
            rows[name]["losses"] = found["losses"]
    reference = rows[contenders[0]]["losses"]
    for name, row in rows.items():
        gaps = [abs(a - b) / a for a, b in zip(reference, row["losses"], strict=True)]
        row["largest_loss_gap"] = max(gaps)
        limit = 1e-5 if args.precision == "fp32" else 2e-2
        assert max(gaps) < limit, f"{name}: losses differ by {max(gaps):.1e}, not below {limit}"
    return rows


def spawn(args: argparse.Namespace, name: str) -> dict:
    from mtcli.core.spec.machine import ALLOCATOR

    env = dict(os.environ)
    if name.startswith("ours") or name.endswith("-tuned"):
        env |= ALLOCATOR
    command = [sys.executable, __file__, "--child", name, "--model", args.model]
    command += ["--precision", args.precision, "--steps", str(args.steps)]
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def show(args: argparse.Namespace, rows: dict[str, dict]) -> None:
    layers, hidden, _, vocab, seq, batch = SIZES[args.model]
    ours = rows["ours"]
    print(
        f"\n{args.model}: {layers} layers of {hidden}, V {vocab}, {batch} x {seq} tokens, "
        f"{args.precision}, {os.cpu_count()} cores, {args.repeats} runs of {args.steps} steps"
    )
    print(
        f"{'':14}{'tok/s best':>11}{'median':>9}{'ours/it: best':>15}{'median':>9}{'loss gap':>10}"
    )
    for name, row in rows.items():
        best, middle = (pick(row["seconds"]) for pick in (min, median))
        ratios = min(row["seconds"]) / min(ours["seconds"]), middle / median(ours["seconds"])
        tokens = batch * seq
        print(
            f"{name:14}{tokens / best:11,.0f}{tokens / middle:9,.0f}{ratios[0]:15.2f}"
            f"{ratios[1]:9.2f}{row['largest_loss_gap']:10.1e}"
        )


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run_child(args: argparse.Namespace) -> dict:
    import torch

    if args.child.endswith("-tuned"):
        torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trainer = make_trainer(args)
    tokens = batches(args, args.steps + 1)
    start = perf_counter()
    step = {"ours": ours, "hf": hugging_face, "plain": plain}[args.child.split("-")[0]]
    train = step(trainer, args)
    losses, seconds = [], []
    for batch in tokens:
        begin = perf_counter()
        losses.append(train(batch))
        seconds.append(perf_counter() - begin)
    return {"losses": losses, "seconds": seconds[1:], "first_step": seconds[0], "start": start}


def make_trainer(args: argparse.Namespace):
    import torch

    from mtcli.core.runtime import Runtime, set_matmul
    from mtcli.core.spec.load import config_of
    from mtcli.core.trainer import Trainer

    layers, hidden, heads, vocab, seq, batch = SIZES[args.model]
    config = config_of(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_heads": heads,
                "vocab_size": vocab,
                "max_seq_len": seq,
                "activation": "gelu_tanh",
            },
            "batch": {"seq_len": seq, "micro_batch_size": batch, "global_batch_size": batch},
            "optimizer": {
                "lr": LR,
                "betas": list(BETAS),
                "weight_decay": DECAY,
                "clip": CLIP,
                "schedule": "constant",
            },
            "train": {
                "steps": args.steps + 1,
                "precision": args.precision,
                "compile": args.child == "ours-compiled",
            },
        }
    )
    if args.child.startswith("ours"):
        set_matmul("fast")
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    trainer.initialise()
    return trainer


def batches(args: argparse.Namespace, steps: int) -> list:
    import torch

    _, _, _, vocab, seq, batch = SIZES[args.model]
    generator = torch.Generator().manual_seed(1)
    ranks = torch.arange(1, vocab + 1).double()
    words = torch.multinomial(1 / ranks, steps * batch * (seq + 1), True, generator=generator)
    return list(words.view(steps, batch, seq + 1))


def ours(trainer, args: argparse.Namespace):
    from mtcli.core.model.inputs import make_inputs

    class Fixed:
        def step(self, step: int, training: bool = True):
            rows = self.rows
            return lambda m: make_inputs(
                trainer.config.model,
                rows.dtype,
                rows[:, :-1].contiguous(),
                labels=rows[:, 1:].contiguous(),
            )

    feed = Fixed()

    def train(rows) -> float:
        feed.rows = rows
        return trainer.train_step(feed).loss

    return train


def hugging_face(trainer, args: argparse.Namespace):
    import transformers

    layers, hidden, heads, vocab, seq, _ = SIZES[args.model]
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=seq,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    ours_to_gpt2(trainer, model.state_dict(), "transformer.", transposed=True)
    model.tie_weights()
    model.train()
    return stepper(model, lambda x, y: cross_entropy(model(x).logits, y), args)


def plain(trainer, args: argparse.Namespace):
    from plain_gpt import PlainGPT

    layers, hidden, heads, vocab, seq, _ = SIZES[args.model]
    model = PlainGPT(layers, hidden, heads, vocab, seq)
    ours_to_gpt2(trainer, model.state_dict(), "", transposed=False)
    return stepper(model, lambda x, y: cross_entropy(model(x), y), args)


def cross_entropy(logits, labels):
    import torch.nn.functional as F

    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def stepper(model, loss_of, args: argparse.Namespace):
    import torch

    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        fused=True,
    )
    cast = torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")

    def train(rows) -> float:
        with cast:
            loss = loss_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return train


def ours_to_gpt2(trainer, state: dict, prefix: str, transposed: bool) -> None:
    """Copies our weights into a state dict with GPT-2's names (and its transposed matrices)."""
    ours = {n: p.data.float() for s in trainer.stages.values() for n, p in s.named_parameters()}
    names = {"embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
    blocks = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "mlp_norm": "ln_2",
        "attention.out": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for name, value in ours.items():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, rest = module.split(".", 2)
            if rest == "attention.qkv":  # [heads, 3, head_dim, ...] -> [3 * heads * head_dim, ...]
                value = value.transpose(0, 1).flatten(0, 2)
            if transposed and value.dim() == 2:
                value = value.T
            module = f"h.{layer}.{blocks[rest]}"
        else:
            module = names[module]
        target = state[f"{prefix}{module}.{kind}"]
        target.copy_(value[: target.shape[0]])


if __name__ == "__main__":
    main()
