"""C12 on models and layouts that nobody chose: what a plan says of memory, beside a dry run of it.

Prints each draw whose state differs, or whose peak is off by more than 5 %, with the config that
shows it, and how many there were. With --run each draw is trained on this CPU instead: the peaks of
`mtcli profile`, planned and measured, and how many are within 2 %.

    python benchmarks/bench_memory_random.py [--device cpu] [--seed 0] [--count 40] [--json FILE]
    python benchmarks/bench_memory_random.py --run [--seed 0] [--count 100]
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from arguments import Arguments, write_rows
from runs import mtcli
from tqdm import tqdm

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import config_of, dump_toml
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import GPUS
from mtcli.core.rehearse.dry_run import TOLERANCE, dry_run
from mtcli.core.rehearse.request import planned

DEVICES = {"h100": GPUS["h100"], "cpu": replace(GPUS["h100"], name="cpu")}
CLOSE = 0.02
ARCHITECTURES = ["gpt", "llama", "mixtral", "mixtral", "qwen2-moe"]

Section = dict[str, Any]


def main() -> None:
    parser = Arguments(__doc__, count=1)
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--run", action="store_true", help="train each draw on this CPU")
    given = parser.parse_args()
    random, rows = Random(given.seed), []
    if given.run:
        return write_rows(given.json, report_runs(random, given.count))
    for _ in tqdm(range(given.count), unit="layout"):
        rows.append(measure(random, given.device))
        if rows[-1]["problems"]:
            tqdm.write(json.dumps(rows[-1]))
    write_rows(given.json, rows)
    wrong = sum(bool(row["problems"]) for row in rows)
    print(f"{wrong} of {len(rows)} layouts of {given.device} are off by more than {TOLERANCE:.0%}")
    sys.exit(wrong > 0)


def measure(random: Random, device: str) -> Section:
    """A legal draw, and the JSON of a dry run of one of its ranks, or of the fullest."""
    world, table = legal(random)
    rank = random.choice([None, random.randrange(world)])
    config = config_of(table)
    found = dry_run(config, planned(config, world, DEVICES[device]), rank)
    return {"ranks": world, "config": table} | found.as_json()


def report_runs(random: Random, count: int) -> list[Section]:
    """Prints each run whose peak is off by more than CLOSE, and how many are not; returns all."""
    close, rows = 0, []
    for _ in tqdm(range(count), unit="run"):
        world, table = legal(random)
        peak = run(config_of(table), world)["figures"]["memory.peak"]
        error = peak["planned"] / peak["measured"] - 1
        close += abs(error) <= CLOSE
        rows.append({"ranks": world, "config": table, "peak": peak})
        if abs(error) > CLOSE:
            tqdm.write(f"{error:+.1%} on {world} ranks: {json.dumps(table)}")
    print(f"the peaks of {close} of {count} runs are within {CLOSE:.0%} of the plan")
    return rows


def run(config: RunConfig, world: int) -> Section:
    """The JSON of `mtcli profile` of one step."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_toml(config))
        words = ["--nproc", world, "--steps", 1, "--warmup", 0, "--json", "-"]
        return json.loads(mtcli("profile", path, *words))


def legal(random: Random) -> tuple[int, Section]:
    """A world size and a config that trains on it."""
    while True:
        world, table = draw(random)
        try:
            config = config_of(table)
            rules.require(config, world, *rules.ENGINE_RULES)
        except MtcliError:
            continue
        if not rules.problems(config, world):
            return world, table


def draw(random: Random) -> tuple[int, Section]:
    """A world size and a config, of which few are legal."""
    choice, rarely = random.choice, lambda share: random.random() < share
    world, model = choice([1, 2, 2, 3, 4, 4, 6, 8]), draw_model(choice, rarely)
    parallel = draw_layout(choice, rarely, "num_experts" in model)
    stages = parallel["pp"] * parallel.get("vpp", 1)
    if rarely(0.4) or model["num_layers"] % stages:
        parallel["stage_layers"] = parts_of(model["num_layers"], stages, random)
    sequences = choice([1, 2, 3])
    data_ranks = max(1, world // (parallel["tp"] * parallel["cp"] * parallel["pp"]))
    batch = {
        "seq_len": choice([64, 96, 128, 256, 256, 512, 768]),
        "micro_batch_size": sequences,
        "global_batch_size": sequences * data_ranks * choice([1, 2, 3]),
    }
    train = {"precision": choice(["fp64", "fp32", "fp32", "bf16", "bf16", "fp16", "fp8"])}
    if train["precision"] == "fp8":
        train["fp8_scaling"] = choice(["rowwise", "blockwise", "tensorwise"])
    data = {"document_mask": rarely(0.1), "document_positions": rarely(0.1)}
    sections = {"model": model, "parallel": parallel, "batch": batch, "train": train, "data": data}
    return world, sections


def draw_model(choice: Callable[[Sequence], Any], rarely: Callable[[float], bool]) -> Section:
    """A small model of any architecture, with what its layers may be instead."""
    kind, heads = choice(ARCHITECTURES), choice([4, 8])
    model = {"architecture": kind, "num_heads": heads, "hidden_size": heads * choice([16, 32, 64])}
    model |= {"num_layers": choice([1, 2, 3, 4]), "vocab_size": choice([100, 512, 1024, 5000])}
    model["max_seq_len"] = 8192
    if kind != "gpt":
        model["num_kv_heads"] = choice([heads, heads // 2, 2])
        model["ffn_hidden_size"] = choice([128, 384, 640, 1024])
    elif rarely(0.2):
        model |= {"activation": choice(["gelu", "swiglu"]), "ffn_hidden_size": choice([256, 768])}
    if kind in ("mixtral", "qwen2-moe"):
        model |= draw_experts(choice, rarely)
    if kind == "qwen2-moe":
        model["shared_expert_ffn_hidden_size"] = choice([0, 128, 512])
    for share, field, values in (
        (0.15, "dropout", [0.1]),
        (0.15, "attention_dropout", [0.1]),
        (0.15, "causal", [False]),
        (0.2, "tie_embeddings", [True, False]),
        (0.2, "norm", ["layernorm", "rmsnorm"]),
        (0.2, "position", ["learned", "rope"]),
    ):
        if rarely(share):
            model[field] = choice(values)
    return model


def draw_experts(choice: Callable[[Sequence], Any], rarely: Callable[[float], bool]) -> Section:
    """Experts, dropless or of a capacity, with any of the losses."""
    experts = {"num_experts": choice([4, 4, 8]), "top_k": choice([1, 2, 4])}
    experts["moe_ffn_hidden_size"] = choice([64, 128, 384])
    if rarely(0.6):
        experts |= {"capacity_factor": choice([0.5, 1.0, 1.25, 2.0])}
        experts |= {"pad_to_capacity": rarely(0.6), "drop_policy": choice(["probs", "position"])}
        experts["drop_scope"] = choice(["full_sequence", "sub_sequence"])
    for field in ("aux_loss_coeff", "sequence_aux_loss_coeff", "z_loss_coeff"):
        if rarely(0.3):
            experts[field] = 0.01
    if rarely(0.3):
        experts |= {"router_bias_update_rate": 0.01, "router_score": "sigmoid"}
    return experts


def draw_layout(
    choice: Callable[[Sequence], Any], rarely: Callable[[float], bool], experts: bool
) -> Section:
    """Sizes of axes, and how they are used."""
    layout = {
        "tp": choice([1, 1, 2, 4]),
        "cp": choice([1, 1, 2, 4]),
        "pp": choice([1, 1, 2, 3, 4]),
        "cp_mode": choice(["ring", "all_gather", "a2a"]),
        "zero": choice([0, 1, 3]),
        "schedule": choice(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
        "recompute": choice(["none", "selective", "full"]),
        "sequence_parallel": not rarely(0.2),
        "bucket_mib": choice([0.1, 1.0, 25.0]),
    }
    if layout["schedule"] == "interleaved":
        layout["vpp"] = choice([2, 3])
    if experts:
        layout |= {"ep": choice([1, 1, 2, 4]), "etp": choice([1, 1, 2, 4])}
        layout["dispatcher"] = choice(["all_to_all", "all_to_all", "all_gather"])
    return layout


def parts_of(whole: int, parts: int, random: Random) -> list[int]:
    """Numbers of layers, none perhaps, that add up."""
    cuts = [0, *sorted(random.randint(0, whole) for _ in range(parts - 1)), whole]
    return [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


if __name__ == "__main__":
    main()
