"""C12: the memory that a plan predicts, beside what a dry run of the real trainer counts.

State has to agree to the byte, and the peak of everything else within 5 %.

    python benchmarks/bench_memory.py [--json FILE]
"""

import os
import sys

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from arguments import Arguments, write_rows
from progress import each, say

from mtcli.core.config.loading import config_of
from mtcli.core.plan.hardware import GPUS
from mtcli.core.rehearse.dry_run import dry_run
from mtcli.core.rehearse.request import planned

SHAPE = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": 1024}
GPT = {**SHAPE, "architecture": "gpt", "max_seq_len": 256}
LLAMA = {**GPT, "architecture": "llama", "num_kv_heads": 4, "ffn_hidden_size": 640}
MOE = {**LLAMA, "architecture": "mixtral", "num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 384}
QWEN = {**MOE, "architecture": "qwen2-moe", "shared_expert_ffn_hidden_size": 512}
# fmt: off
ROWS = [  # ranks, model, parallel
    (1, "gpt", GPT, {}),
    (1, "llama", LLAMA, {}),
    (1, "gpt", GPT, {"recompute": "full"}),
    (2, "gpt", GPT, {"tp": 2}),
    (2, "llama", LLAMA, {"tp": 2, "sequence_parallel": False}),
    (2, "llama", LLAMA, {"cp": 2}),
    (2, "llama", LLAMA, {"cp": 2, "cp_mode": "all_gather"}),
    (2, "llama", LLAMA, {"cp": 2, "cp_mode": "a2a"}),
    (4, "llama", LLAMA, {"pp": 4}),
    (4, "llama", LLAMA, {"pp": 4, "schedule": "zero_bubble"}),
    (2, "llama", LLAMA, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    (8, "llama", LLAMA, {"tp": 2, "pp": 2, "zero": 1, "recompute": "full"}),
    (2, "llama", LLAMA, {"zero": 3}),
    (4, "gpt", GPT, {"zero": 3, "recompute": "full"}),
    (2, "mixtral", MOE, {"ep": 2}),
    (4, "qwen2-moe", QWEN, {"tp": 2, "ep": 2}),
]
# fmt: on


def main() -> None:
    parser = Arguments(__doc__)
    args = parser.parse_args()
    print("Memory of the fullest rank, MiB: planned, and counted in a dry run")
    print(f"ranks {'model':11}{'layout':45}{'state':>8}{'peak':>8}{'planned':>9}{'off by':>8}")
    rows = []
    for case in each(ROWS[: 1 if args.tiny else None], name=lambda case: case[1]):
        rows.append(row := measure(*case))
        state, held, said = (
            row[key] / 2**20
            for key in ("state_bytes", "activation_peak_bytes", "predicted_activation_bytes")
        )
        say(
            f"{row['ranks']:5} {row['model']:11}{row['layout']:45}"
            f"{state:8.1f}{held:8.1f}{said:9.1f}{said / held - 1:+8.1%}"
        )
    write_rows(args.json, rows)
    if any(row["problems"] for row in rows):
        sys.exit("error: plan and step disagree")


def measure(world: int, name: str, model: dict, parallel: dict) -> dict:
    """A dry run's JSON, and what was run."""
    batch = {"seq_len": 256, "micro_batch_size": 2, "global_batch_size": 16 * world}
    train = {"precision": "bf16"}
    config = config_of({"model": model, "parallel": parallel, "batch": batch, "train": train})
    layout = " ".join(f"{field}={value}" for field, value in parallel.items()) or "one rank"
    plan = planned(config, world, GPUS["h100"])
    found = dry_run(config, plan, None).as_json()
    return {"ranks": world, "model": name, "layout": layout} | found


if __name__ == "__main__":
    main()
