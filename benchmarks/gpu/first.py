"""The first minutes on a GPU: versions, attention's backend, GEMMs, launches, and a step's loss.

    python benchmarks/gpu/first.py                     # two minutes; a row is kept when measured
    python benchmarks/gpu/first.py --device cpu --tiny --output FOLDER   # rehearsed

Decides what later measurements mean: which library attention runs by, what a GEMM of the models'
widths reaches, how long the host takes to launch an operation, and whether each kind of model has
the loss in bfloat16 on the device that it has in float32 on the CPU.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from cases import CASES
from ceilings import ceilings
from record import RESULTS, Row, open_record
from torch import Tensor

from mtcli.kernels.gemm import add_matmul_
from mtcli.kernels.swiglu import swiglu

TOKENS = 8192
# [N, K] of weights of GPT-2, of models of 1B and 8B, and of Mixtral's experts.
WEIGHTS = [(2304, 768), (3072, 768), (768, 3072), (6144, 2048), (8192, 2048), (2048, 8192)]
WEIGHTS += [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (50304, 768)]
MODELS = ("gpt2-124m", "llama-8b/2", "mixtral-8x7b/1", "qwen2-57b/1")
LAUNCHES = 200
LOSSES_APART = 2e-2  # of a mean loss in bfloat16 and one in float32, as a part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    args = parser.parse_args()
    end, device = monotonic() + args.budget, torch.device(args.device)
    found = ceilings(device)
    record = open_record(args.output, "first", found.pop("device"), afresh=True)
    record.facts |= found | facts(device)
    for name, value in record.facts.items():
        print(f"{name}: {value}", flush=True)
    wrong = []
    for part in (gemms, launches, steps):
        for row in part(args, device):
            shown = (
                f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in row.items()
            )
            print(", ".join(shown), flush=True)
            record.add(row)
            wrong += [row["model"]] if row.get("agrees") is False else []
            if monotonic() > end:
                raise SystemExit("error: the time was up")
    print(f"wrote {record.path}")
    if wrong:
        raise SystemExit(f"error: losses differ from the CPU's: {', '.join(wrong)}")


def facts(device: torch.device) -> dict[str, Any]:
    """Versions, and what this build of torch can do."""
    found: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found["multiprocessors"] = properties.multi_processor_count
        found["driver"] = torch._C._cuda_getDriverVersion()
    q = torch.zeros(1, 8, 1024, 128, dtype=torch.bfloat16, device=device)
    backend = torch._fused_sdp_choice(q, q, q, None, 0.0, True)
    found["sdpa"] = torch.nn.attention.SDPBackend(backend).name
    a, total = q[0, 0, :128].contiguous(), torch.zeros(128, 128, device=device)
    try:
        found["wide addmm"] = bool(add_matmul_(total, a, a).isfinite().all())
    except RuntimeError as error:
        found["wide addmm"] = str(error).splitlines()[0]
    return found


def gemms(args: Namespace, device: torch.device) -> Iterator[Row]:
    """FLOP/s of x W^T, and of both its gradients, at the widths of models."""
    tokens, shrink = (64, 16) if args.tiny else (TOKENS, 1)
    for n, k in WEIGHTS:
        n, k = n // shrink, k // shrink
        x, w, grad = (
            torch.randn(*shape, device=device, dtype=torch.bfloat16)
            for shape in ((tokens, k), (n, k), (tokens, n))
        )
        flops = 2 * tokens * n * k
        total = torch.zeros(n, k, device=device)
        passes: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=w: x @ w.T,
            "dgrad": lambda grad=grad, w=w: grad @ w,
            "wgrad": lambda grad=grad, x=x: grad.T @ x,
            "wgrad added": lambda total=total, grad=grad, x=x: add_matmul_(total, grad.T, x),
        }
        rates = {name: flops / seconds(run, device, 20) / 1e12 for name, run in passes.items()}
        yield {"gemm": f"{tokens} x {k} -> {n}"} | {
            f"{name} TFLOP/s": x for name, x in rates.items()
        }


def launches(args: Namespace, device: torch.device) -> Iterator[Row]:
    """Microseconds in which the host launches an operation that has nearly no work."""
    x = torch.ones(128, 128, device=device, requires_grad=True)
    pair = torch.ones(128, 256, device=device)
    leaf = pair.clone().requires_grad_()
    runs: dict[str, Callable[[], Any]] = {
        "add": lambda: x.detach() + 1.0,
        "linear and its backward": lambda: F.linear(x, x).sum().backward(),
        "an operator of mtcli": lambda: swiglu(pair),
        "the same and its backward": lambda: swiglu(leaf).sum().backward(),
    }
    for name, run in runs.items():
        for _ in range(3):
            run()
        synchronize(device)
        begin = perf_counter()
        for _ in range(LAUNCHES):
            run()
        host = (perf_counter() - begin) / LAUNCHES  # the queue is not waited for
        synchronize(device)
        yield {"launch": name, "us": host * 1e6}


def steps(args: Namespace, device: torch.device) -> Iterator[Row]:
    """The loss of a step of each kind of model, in bfloat16 here and in float32 on the CPU."""
    from contenders import ours
    from turns import batches

    small = ["model.num_layers=2", "batch.micro_batch_size=1", "batch.global_batch_size=1"]
    small += ["batch.seq_len=256", "model.max_seq_len=256"] if not args.tiny else []
    for name in MODELS:
        found = {}
        for where, precision in ((torch.device("cpu"), "fp32"), (device, "bf16")):
            settings = [*small, f"train.precision={precision}", f"train.device={where.type}"]
            config = CASES[name].config(settings, tiny=True)
            begin = perf_counter()
            loss = float(ours(config, where).train(batches(config, where)[0]))
            found[where.type if precision == "fp32" else "here"] = loss
            took = perf_counter() - begin
        apart = abs(found["here"] - found["cpu"]) / found["cpu"]
        yield {"model": name, **found, "apart": apart, "agrees": apart < LOSSES_APART, "s": took}


def seconds(run: Callable[[], Any], device: torch.device, times: int) -> float:
    """Of one run, in a row of them."""
    run()
    synchronize(device)
    begin = perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (perf_counter() - begin) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
