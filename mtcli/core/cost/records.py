"""Published runs as workloads: what a record says, and what it leaves to the reader.

A record is JSON with source, model, gpu, n_gpus, precision, parallel, result and flop_convention
(docs/plan.md lists the fields). Sources count FLOPs differently, so everything is turned into
seconds of a step: from the time itself or from tokens/s where they are printed, and otherwise from
TFLOP/s or MFU by the record's own convention.
"""

from dataclasses import dataclass
from typing import Any

from mtcli.core.cost.hardware import GPUS, Device
from mtcli.core.cost.workload import Workload
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import forward_flops
from mtcli.core.spec.model_config import ModelConfig

Table = dict[str, Any]

DEVICE_OF = {
    "V100": "v100-32gb",
    "A100-40": "a100-40gb",
    "A100-80": "a100-80gb",
    "A100": "a100-80gb",
    "H100": "h100",
    "H200": "h200",
    "GB200": "gb200",
    "GB300": "gb300",
    "B200": "b200",
    "B300": "b300",
    "Quadro RTX 5000": "rtx-5000",
}


@dataclass(frozen=True)
class Record:
    """A published run: its workload and device, and what was measured."""

    id: int
    source: str
    table: str
    work: Workload
    device: Device
    seconds: float | None  # of a step
    memory_gb: float | None
    out_of_memory: bool


def read_record(row: Table) -> Record:
    """The record of one JSON object.

    Raises ValueError with the reason where it does not describe a training step on a layout.
    """
    work, device = _workload(row), _device(row["gpu"])
    result = row["result"]
    return Record(
        id=row["id"],
        source=row["source"],
        table=row["table"],
        work=work,
        device=device,
        seconds=_seconds(row, work, device),
        memory_gb=result.get("mem_gb"),
        out_of_memory=bool(result.get("oom")),
    )


def _device(gpu: str) -> Device:
    for prefix, name in DEVICE_OF.items():
        if gpu.startswith(prefix):
            return GPUS[name]
    raise ValueError(f"no device for {gpu!r}")


def _workload(row: Table) -> Workload:
    p, m = row["parallel"], row["model"]
    if p.get("tp") is None or p.get("global_batch") is None:
        raise ValueError("no layout or no batch")
    if m.get("tp_mode") == "2d":
        raise ValueError("2D tensor parallelism has no cost model yet")
    layout = ParallelLayout(
        world=row["n_gpus"],
        tp=p["tp"],
        cp=p.get("cp") or 1,
        pp=p.get("pp") or 1,
        vpp=_chunks(p, m["layers"]),
        ep=p.get("ep") or 1,
        etp=_expert_tensor_parallel(p, row["n_gpus"]),
    )
    precision = row["precision"] or "fp32"
    return Workload(
        model=_model(m),
        layout=layout,
        seq_len=m["seq"],
        micro_batch_size=p.get("micro_batch") or 1,
        global_batch_size=p["global_batch"],
        precision=_precision(precision),
        schedule_name="interleaved" if layout.vpp > 1 else "1f1b",
        sequence_parallel=p["tp"] > 1 and p.get("sp") is not False,
        zero=min(p.get("zero") or 0, 3) if p.get("zero") != 2 else 1,
        recompute=p.get("recompute") or "none",
        flash="fp16" not in precision and row["precision"] is not None,
    )


def _expert_tensor_parallel(p: Table, world: int) -> int:
    """As printed; otherwise that of attention where experts are cut inside the data ranks, as in
    Megatron before folding (arXiv:2504.14960, section 2.3), and 1 where they reach beyond them."""
    if p.get("etp"):
        return int(p["etp"])
    ep, tp, pp = p.get("ep") or 1, p["tp"], p.get("pp") or 1
    inside = world % (ep * tp * pp) == 0 and (world // (tp * pp * (p.get("cp") or 1))) % ep == 0
    return tp if p.get("ep") and inside else 1


def _chunks(p: Table, layers: int) -> int:
    """As printed; otherwise as many as the layers allow, which is what long pipelines run."""
    if p.get("vpp"):
        return int(p["vpp"])
    pp = p.get("pp") or 1
    return layers // pp if pp > 1 and layers % pp == 0 else 1


def _precision(printed: str) -> str:
    if printed.startswith(("mxfp8", "fp8")):
        return "fp8"
    if printed.startswith("nvfp4"):
        return "nvfp4"
    return "fp32" if printed.startswith("fp32") else "fp16" if printed == "fp16 mixed" else "bf16"


def _model(m: Table) -> ModelConfig:
    """The model; latent attention is taken as full heads, sliding windows as full attention."""
    experts = m.get("experts") or 0
    table: Table = {
        "architecture": "llama" if m["gated"] else "gpt",
        "num_layers": m["layers"],
        "hidden_size": m["hidden"],
        "num_heads": m["heads"] or max(1, m["hidden"] // 128),
        "num_kv_heads": m["kv_heads"] or m["heads"] or max(1, m["hidden"] // 128),
        "head_dim": m.get("head_dim") or m["hidden"] // (m["heads"] or max(1, m["hidden"] // 128)),
        "ffn_hidden_size": m["ffn_hidden"],
        "vocab_size": m["vocab"] or 51200,
        "max_seq_len": m["seq"],
        "dropout": 0.0 if m["gated"] else 0.1,
        "attention_dropout": 0.0 if m["gated"] else 0.1,
        "tie_embeddings": not m["gated"],
    }
    if experts:
        shared = m.get("shared_expert_hidden") or m.get("shared_experts", 0) * m["ffn_hidden"]
        table |= {
            "num_experts": experts,
            "top_k": m["topk"],
            "moe_ffn_hidden_size": m["ffn_hidden"],
            "shared_expert_ffn_hidden_size": shared,
        }
    return ModelConfig.model_validate(table)


def _seconds(row: Table, work: Workload, device: Device) -> float | None:
    result, tokens = row["result"], work.global_batch_size * work.seq_len
    if "iter_time_s" in result:
        return float(result["iter_time_s"])
    if "tokens_per_s_per_gpu" in result:
        return tokens / float(result["tokens_per_s_per_gpu"]) / work.layout.world
    if "samples_s" in result:
        return work.global_batch_size / float(result["samples_s"])
    rate = _printed_rate(result, work, device)
    return tokens * _token_flops(row, work) / rate / work.layout.world if rate else None


def _printed_rate(result: Table, work: Workload, device: Device) -> float | None:
    """FLOP/s per GPU, by the record's convention."""
    if "tflops_per_gpu" in result:
        return float(result["tflops_per_gpu"]) * 1e12
    peak = float(result.get("mfu_peak_tflops", device.peak(work.sizes.gemm) / 1e12)) * 1e12
    return float(result["mfu"]) * peak if "mfu" in result else None


def _token_flops(row: Table, work: Workload) -> float:
    convention = row["flop_convention"] or ""
    causal = "causal" in convention
    passes = 4 if "4x" in convention else 3
    return passes * forward_flops(work.model, work.seq_len, causal)
