"""Reads published runs as workloads, with defaults for what a record leaves open.

A record is JSON with source, model, gpu, n_gpus, precision, parallel, result and flop_convention
(docs/reference/plan.md lists the fields). Sources count FLOPs differently, so everything is turned
into seconds of a step: from the time itself or from tokens/s where they are printed, and otherwise
from TFLOP/s or MFU by the record's own convention.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any
from zlib import crc32

from mtcli.core.config.model import Mla, ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.hardware import GPUS, Device, link
from mtcli.core.plan.predict import Convention, Prediction, predict_workload, recomputed_share
from published.software import (
    FLASH_ATTENTION,
    FUSED_ACCUMULATION,
    FUSED_SOFTMAX,
    HIDDEN_REDUCTION,
    ONCE_PER_NODE,
    PUBLISHED,
    PublishedPhysics,
    PublishedWork,
    published,
    since,
)

Table = dict[str, Any]

COUNTS = {"n_gpus", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab"}
COUNTS |= {"tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "global_batch"}
COUNTS |= {"seq", "topk"}
ARITHMETIC = {"mxfp8": "fp8", "fp8": "fp8", "float8": "fp8", "nvfp4": "nvfp4", "fp4": "nvfp4"}
ARITHMETIC |= {"fp32": "fp32", "tf32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16"}
MAX_SIZE = 1 << 24  # beyond all that a record has, and small enough to compute with
ENDS = 2  # of a pipeline, which may stand where a layer would: embedding and head
MICRO_BATCHES = (1, 2, 4, 8, 16)  # tried where a record gives none
STEPS_PER_EPOCH = 68507  # of arXiv:1909.08053, section 5.2, which prints days

# As they stand in "NVIDIA A100-SXM4-40GB" or "Quadro RTX 5000", longer ones first.
PRINTED = {name: name for name in ("gb300", "gb200", "b300", "b200", "h200", "h100")}
PRINTED |= {"a100": "a100-80gb", "v100": "v100-32gb", "rtx5000": "rtx-5000"}

_A100, _H100 = GPUS["a100-80gb"], GPUS["h100"]
# 4 NVLinks between GPUs, 4 Omni-Path links of 100 Gb/s for 8 of them (BigScience, tr11-176B-ml).
_JEAN_ZAY = replace(_A100, link=link("nvlink", 4 * 25.0), network=link("infiniband", 4 * 12.5 / 8))
# 96 GB of HBM2e at 2.4 TB/s, 500 W of 700 (torchtitan, benchmarks/llama3_h100_202412): power goes
# with the cube of the clock, which voltage follows.
_GRAND_TETON = replace(
    _H100,
    memory_bytes=96e9,
    memory_bandwidth=2.4e12,
    sustained=_H100.sustained * (500 / 700) ** (1 / 3),
)
SITES = {
    ("bigscience", "a100-80gb"): _JEAN_ZAY,
    ("bloom", "a100-80gb"): _JEAN_ZAY,
    ("torchtitan", "h100"): _GRAND_TETON,
}

# Reduced gradients when the last backward pass was done: Megatron-LM
# without its flags of overlap (SimuMax, docs/b200).
ALONE = ("simumax",)
SOFTWARE = {"vtrain": "eager", "bigscience": "eager", "mt-nlg": "eager"}
SOFTWARE |= {"mosaicml": "eager", "nanotron": "eager"}


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its workload, its device and its measured figures."""

    id: int
    source: str
    table: str
    work: PublishedWork
    device: Device
    seconds: float | None  # of a step, or of a block's passes
    of_block: bool
    memory_gb: float | None
    out_of_memory: bool

    @property
    def judges(self) -> bool:
        """Whether no constant was fitted on the run: of about every other one, by its source and
        number."""
        return crc32(f"{self.source} {self.id}".encode()) % 2 == 1

    def predict(self, physics: PublishedPhysics = PUBLISHED) -> Prediction:
        """The cost of the run's step with the software of its time."""
        return predict_workload(self.work, self.reached(physics))

    def reached(self, physics: PublishedPhysics = PUBLISHED) -> Device:
        """The run's device, as its software reaches its rates."""
        return published(self.device, physics, self.software)

    @property
    def software(self) -> str:
        """The software whose host time a run has: see SOFTWARE."""
        name = self.source.lower()
        return next((kind for word, kind in SOFTWARE.items() if word in name), "megatron")


def read_record(row: Table) -> PublishedRun:
    """The record of one JSON object.

    Raises ValueError with the reason, or KeyError with the field, where it does not describe a
    training step on a layout.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{shown(row)} is no table")
    _require_counts(row)
    source, result = str(row.get("source") or "unnamed"), row.get("result") or {}
    device = device_of(str(row["gpu"]), source)
    work = _filled(_workload(row, source, device), row["parallel"], device)
    memory = result.get("mem_gb")
    return PublishedRun(
        id=row.get("id", 0),
        source=source,
        table=str(row.get("table") or ""),
        work=work,
        device=device,
        seconds=measured_seconds(row | {"result": result}, work, device),
        of_block="fwd_bwd_ms" in result and "iter_time_s" not in result,
        memory_gb=float(memory) if memory else None,
        out_of_memory=bool(result.get("oom")),
    )


def _require_counts(row: Table) -> None:
    """Raises ValueError for a size that is no whole number above 0."""
    for name in ("model", "parallel"):
        if not isinstance(row[name], dict):
            raise ValueError(f"{name} is no table")
    dense = {} if row["model"].get("experts") else {"topk": None}  # some write 0 of no experts
    for table in (row, row["model"] | dense, row["parallel"]):
        for name in COUNTS & set(table):
            size = table[name]
            if size is not None and (type(size) is not int or not 0 < size <= MAX_SIZE):
                raise ValueError(f"{name}={shown(size)} is no whole number above 0")


def device_of(gpu: str, source: str) -> Device:
    """The device that a source calls `gpu`.

    Raises ValueError where it is none of those that are known.
    """
    letters = "".join(c for c in gpu.lower() if c.isalnum())
    name = next((name for part, name in PRINTED.items() if part in letters), None)
    if name is None:
        raise ValueError(f"no device for {gpu!r}")
    if name == "a100-80gb" and "40" in letters.partition("a100")[2]:
        name = "a100-40gb"
    for (word, usual), site in SITES.items():
        if word in source.lower() and usual == name:
            return site
    return GPUS[name]


def _workload(row: Table, source: str, device: Device) -> PublishedWork:
    p, m = row["parallel"], row["model"]
    printed = str(row.get("precision") or "fp32").lower()
    precision = _precision(printed, device)
    layout = _layout(p, m, row.get("n_gpus"))
    mode = m.get("tp_mode") or p.get("tp_mode") or "1d"
    fp16 = "fp16" in printed or precision == "fp16"
    former = fp16 or precision == "fp32"
    flash = since(source, FLASH_ATTENTION) and not former
    alone = any(word in source.lower() for word in ALONE)
    if mode == "2d" and isqrt(layout.tp) ** 2 != layout.tp:
        raise ValueError(f"tp={layout.tp} is no square, and tp_mode is 2d")
    return PublishedWork(
        model=_model(m, flash),
        layout=replace(layout, tp_rows=isqrt(layout.tp)) if mode == "2d" else layout,
        seq_len=m["seq"],
        micro_batch_size=p.get("micro_batch") or 1,
        global_batch_size=_batch(p, layout),
        precision=precision,
        schedule_name="interleaved" if layout.vpp > 1 else "1f1b",
        sequence_parallel=layout.tp > 1 and (p.get("sp") is not False or mode == "2d"),
        zero=_zero(p),
        recompute=_recompute(str(p.get("recompute") or "none")),
        flash=flash,
        adds_in_gemm=since(source, FUSED_ACCUMULATION, former),
        hides_reduction=since(source, HIDDEN_REDUCTION, former) and not alone,
        narrow_gradients=fp16,
        gathers_ahead=flash and not alone,
        once_per_node=since(source, ONCE_PER_NODE),
        compile="torchtitan" in source.lower(),
        lora=LoraConfig(rank=row["model"].get("lora_rank") or 0),
        fused=since(source, FUSED_SOFTMAX) and precision != "fp32",
    )


def _layout(p: Table, m: Table, world: int | None) -> ParallelLayout:
    if not any(p.get(axis) for axis in ("tp", "pp", "dp", "cp", "ep", "zero")):
        raise ValueError("no layout")
    tp, cp, pp, ep = (int(p.get(axis) or 1) for axis in ("tp", "cp", "pp", "ep"))
    world = int(world or tp * cp * pp * (p.get("dp") or 1))
    etp = _expert_tensor_parallel(p, world) if m.get("experts") else 1
    for used in (tp * cp * pp, ep * etp * pp if m.get("experts") else 1):
        if world % used:
            raise ValueError(f"a layout of {used} ranks does not divide {world} GPUs")
    if p.get("dp") and world not in (tp * cp * pp * p["dp"], tp * pp * p["dp"]):  # dp may count cp
        raise ValueError(f"tp*cp*pp*dp={tp * cp * pp * p['dp']} is not n_gpus={world}")
    vpp, width = _chunks(p, m["layers"]), min(m["hidden"], m.get("ffn_hidden") or m["hidden"])
    if pp * vpp > m["layers"] + ENDS:
        raise ValueError(f"{pp * vpp} stages are more than {m['layers']} layers and the ends")
    if m.get("experts") and ep > m["experts"]:
        raise ValueError(f"ep={ep} is more than {m['experts']} experts")
    if max(tp, etp) > width:
        raise ValueError(f"{max(tp, etp)} ranks cannot share layers {width} wide")
    return ParallelLayout(world, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp)


def _batch(p: Table, layout: ParallelLayout) -> int:
    """The batch as printed, or a micro-batch for each data rank where there is no pipeline.

    Raises ValueError where neither is said.
    """
    if p.get("global_batch"):
        return int(p["global_batch"])
    if layout.pp > 1 or not p.get("micro_batch"):
        raise ValueError("no batch")
    return int(p["micro_batch"]) * layout.dp


def _recompute(printed: str) -> str:
    """The recomputation: `full`, `selective` (also any list of modules) or `none`."""
    if printed in ("none", "full"):
        return printed
    return "full" if printed.startswith("full") else "selective"


def _zero(p: Table) -> int:
    """The ZeRO stage as printed; 2 is 1, and so is 3 with a pipeline, which keeps weights."""
    zero = p.get("zero") or 0
    return min(zero, 1) if zero < 3 or (p.get("pp") or 1) > 1 else 3


def _expert_tensor_parallel(p: Table, world: int) -> int:
    """The etp as printed; otherwise tp where experts are sharded inside the data ranks, as in
    Megatron before folding (arXiv:2504.14960, section 2.3), and 1 where they reach beyond them."""
    if p.get("etp"):
        return int(p["etp"])
    ep, tp, pp = p.get("ep") or 1, p.get("tp") or 1, p.get("pp") or 1
    inside = world % (ep * tp * pp) == 0 and (world // (tp * pp * (p.get("cp") or 1))) % ep == 0
    return tp if p.get("ep") and inside else 1


def _chunks(p: Table, layers: int) -> int:
    """Chunks per rank as printed; otherwise as many as the layers allow, as long pipelines run.
    Embedding and head may stand where a layer would (arXiv:2407.21783, section 3.3.2)."""
    if p.get("vpp"):
        return int(p["vpp"])
    pp = p.get("pp") or 1
    each = [(layers + ends) // pp for ends in range(ENDS + 1) if (layers + ends) % pp == 0]
    return each[0] if pp > 1 and each else 1


def _precision(printed: str, device: Device) -> str:
    """The precision of GEMMs; 16 bits of either kind where both are printed."""
    for start, name in ARITHMETIC.items():
        if printed.startswith(start):
            return name
    return device.half_precision


def _model(m: Table, flash: bool) -> ModelConfig:
    """The model. Records of latent attention are DeepSeek-V3's, and those of windows gpt-oss's,
    whose every other layer has one; neither prints more than that."""
    hidden, gated = m["hidden"], bool(m.get("gated"))
    heads = m.get("heads") or max(1, hidden // 128)
    inner = m.get("ffn_hidden") or (4 * hidden if not gated else -(-8 * hidden // 768) * 256)
    table: Table = {
        "architecture": "llama" if gated else "gpt",
        "num_layers": m["layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": m.get("kv_heads") or heads,
        "head_dim": m.get("head_dim") or hidden // heads,
        "ffn_hidden_size": inner,
        "vocab_size": m.get("vocab") or 51200,
        "max_seq_len": m["seq"],
        "dropout": 0.0 if gated else 0.1,
        "attention_dropout": 0.0 if gated or flash else 0.1,
        "tie_embeddings": not gated,
    }
    if m.get("experts"):
        table |= {
            "first_dense_layers": m.get("dense_layers") or 0,
            "ffn_hidden_size": m.get("dense_ffn_hidden") or inner,
            "num_experts": m["experts"],
            "top_k": m.get("topk") or 1,
            "moe_ffn_hidden_size": inner,
            "shared_expert_ffn_hidden_size": m.get("shared_expert_hidden")
            or (m.get("shared_experts") or 0) * inner,
        }
    if m.get("mla"):
        mla = Mla(q_rank=1536)
        table |= {"mla": mla.model_dump(), "head_dim": mla.nope_dim + mla.rope_dim}
    if m.get("sliding_window"):
        table |= {"window": m["sliding_window"], "window_pattern": "LG"}
    return ModelConfig.model_validate(table)


def _filled(work: PublishedWork, p: Table, device: Device) -> PublishedWork:
    """Fills in what a record leaves open: the micro-batch is the quickest that fits, and an
    optimizer state of which nothing is said is sharded over the data ranks if it does not fit."""
    filled = work if p.get("micro_batch") else _tuned(work, device)
    if p.get("zero") is None and not predict_workload(filled, published(device)).fits:
        return _filled(replace(work, zero=1), p | {"zero": 1}, device)
    return filled


def _tuned(work: PublishedWork, device: Device) -> PublishedWork:
    """The workload with the micro-batch of the shortest predicted step among those that fit: a
    source that does not print it tuned it."""
    sizes = (
        size for size in MICRO_BATCHES if work.global_batch_size % (size * work.layout.dp) == 0
    )
    works = [replace(work, micro_batch_size=size) for size in sizes]
    tried = [(candidate, predict_workload(candidate, published(device))) for candidate in works]
    fitting = [pair for pair in tried if pair[1].fits] or tried[:1]
    return min(fitting, key=lambda pair: pair[1].step_seconds)[0] if fitting else work


def measured_seconds(row: Table, work: PublishedWork, device: Device) -> float | None:
    """Seconds of a step, or of one block's passes where a record is of those; None where none are
    said.

    Raises ValueError for what is no positive number.
    """
    tokens, samples = work.tokens_per_step, work.global_batch_size
    world, result = work.layout.world, {k: v for k, v in row["result"].items() if v is not None}
    forms: dict[str, Callable[[float], float]] = {
        "iter_time_s": lambda seconds: seconds,
        "iter_time_ms": lambda milliseconds: milliseconds / 1e3,
        "fwd_bwd_ms": lambda milliseconds: milliseconds / 1e3,
        "days_per_epoch": lambda days: days * 86400 / STEPS_PER_EPOCH,
        "tokens_per_s_per_gpu": lambda rate: tokens / rate / world,
        "tokens_per_s": lambda rate: tokens / rate,
        "samples_s": lambda rate: samples / rate,
    }
    for name, seconds in forms.items():
        if name in result:
            return seconds(_positive(name, result[name]))
    token = _token_seconds(row, result, work, device)
    return tokens * token / world if token else None


def _token_seconds(row: Table, result: Table, work: PublishedWork, device: Device) -> float | None:
    """Seconds of a token on one GPU, from a rate per GPU."""
    words = row.get("flop_convention") or ""
    convention = convention_of(words, work.recompute == "full")
    flops = convention.token_flops(work.model, work.seq_len)
    baseline = re.search(r"(\d+) TFLOP/s baseline", words)
    peak = float(result.get("mfu_peak_tflops") or device.peak(work.sizes.gemm) / 1e12)
    units = {
        "tflops_per_gpu": 1.0,
        "pflops_total": 1e3 / work.layout.world,
        "scaling_efficiency": float(baseline[1]) if baseline else None,
        "mfu": peak,
        "hfu": peak / (1 + recomputed_share(work)),
    }
    for name in {"mfu", "hfu"} & set(result):
        if _positive(name, result[name]) > 1:
            raise ValueError(f"{name}={result[name]} is more than the peak: give a share of 1")
    for name, tera in units.items():
        if name in result and tera:
            return flops / (_positive(name, result[name]) * tera * 1e12)
    return None


def convention_of(printed: str, recomputed: bool) -> Convention:
    """The FLOP convention that a record's words mean; 3x forward and the full square where they are
    silent, but for a source that counts achieved FLOPs without saying more."""
    unsaid = "not stated (" in printed and recomputed
    words = {
        "again": "4x" in printed or unsaid,
        "causal": "causal" in printed or "half" in printed,
        "attention": "no attention" not in printed and "without attention" not in printed,
    }
    return Convention(printed, **words)


def _positive(name: str, printed: object) -> float:
    number = float(str(printed))
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}={printed} is no positive number")
    return number
