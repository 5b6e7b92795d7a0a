"""B models of one shape as one array (HFTA): ours beside B models in turn, and beside torch's vmap.

Every contender trains the same B models on the same batches with AdamW, in one process, in turns;
a row is the fastest of its steps. Told are samples or tokens a second of all models together, and
memory: state and the peak of a step above it. The first losses of every model must be those of
the models alone. Models are small on a CPU, and of the paper's sizes on a GPU.

    python fused/benchmarks/bench_fused_models.py --plot docs/images/fused.png
    python fused/benchmarks/bench_fused_models.py --device cuda
"""

import argparse
import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from time import monotonic, perf_counter, process_time
from typing import Any

import torch
from fused_cases import PAPER, SMALL, TINY, Case
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

import mtcli_fused as fused

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from progress import each, say
from resident import peak_mib

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LR, STEPS = 1e-3, 3  # steps whose losses are compared, and which warm up
GAP = 2e-3  # of losses of contenders: Adam's first steps make signs of rounding errors


class Contender:
    """B models that train: `step` returns the losses [B] of one step on a batch."""

    def __init__(self, case: Case, models: list[nn.Module], compiled: bool, device: str) -> None:
        raise NotImplementedError

    def state(self) -> list[Tensor]:
        """Weights and what the optimizer keeps."""
        raise NotImplementedError


class Serial(Contender):
    """Each model by itself, one after another."""

    def __init__(self, case: Case, models: list[nn.Module], compiled: bool, device: str) -> None:
        self.case, self.models = case, [model.to(device) for model in models]
        self.optimizers = [adamw(model.parameters()) for model in self.models]
        self.calls = [self._loss(model) for model in self.models]

    def _loss(self, model: nn.Module) -> Callable[..., Tensor]:
        return lambda inputs, targets: self.case.loss(model(*inputs), targets)

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        losses = []
        for b, (call, optimizer) in enumerate(zip(self.calls, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss = call(tuple(x[b] for x in inputs), targets[b])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def state(self) -> list[Tensor]:
        return [t for m, o in zip(self.models, self.optimizers, strict=True) for t in of(m, o)]


class Vmap(Contender):
    """torch.func: parameters stacked, one model's code under vmap."""

    def __init__(self, case: Case, models: list[nn.Module], compiled: bool, device: str) -> None:
        parameters, buffers = stack_module_state([model.to(device) for model in models])
        self.parameters = {k: p.detach().requires_grad_() for k, p in parameters.items()}
        self.buffers = buffers
        base = copy.deepcopy(models[0]).to("meta")

        def loss(parameters, buffers, inputs, targets):
            return case.loss(functional_call(base, (parameters, buffers), inputs), targets)

        call = vmap(loss, randomness="different")
        self.call = torch.compile(call) if compiled else call
        self.optimizer = adamw(self.parameters.values())

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        losses = self.call(self.parameters, self.buffers, inputs, targets)
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()

    def state(self) -> list[Tensor]:
        kept = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.parameters.values(), *self.buffers.values(), *kept]


class Fused(Contender):
    """Ours, with a learning rate for each model."""

    def __init__(self, case: Case, models: list[nn.Module], compiled: bool, device: str) -> None:
        self.model = fused.fuse(models, positions=case.positions).to(device)
        self.optimizer = fused.AdamW(self.model, lr=[LR] * len(models))
        own = case.loss is torch.nn.functional.cross_entropy

        def losses(inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
            outputs = self.model(*inputs)
            if own:
                return fused.cross_entropy(outputs, targets)
            return vmap(case.loss)(outputs, targets)

        self.call = torch.compile(losses) if compiled else losses

    def step(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        losses = self.call(inputs, targets)
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()

    def state(self) -> list[Tensor]:
        kept = [t for tensors in self.optimizer.state.values() for t in tensors]
        return [*self.model.parameters(), *self.model.buffers(), *kept]


CONTENDERS: dict[str, tuple[type[Contender], bool]] = {
    "serial": (Serial, False),
    "vmap": (Vmap, False),
    "vmap compiled": (Vmap, True),
    "fused": (Fused, False),
    "fused compiled": (Fused, True),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from (*model.parameters(), *model.buffers())
    for tensors in optimizer.state.values():
        yield from tensors.values()


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here; try --device cpu", file=sys.stderr)
        sys.exit(2)
    if args.threads:
        torch.set_num_threads(args.threads)
    kind = "tiny" if args.tiny else "paper" if args.device == "cuda" else "small"
    cases = {"tiny": TINY, "paper": PAPER, "small": SMALL}[kind]
    runs = [(name, size) for name in args.only or cases for size in args.sizes]
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"device": device_name(args.device), "date": date.today().isoformat()}
    record |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": []}
    path = args.output / f"fused-{kind}-{record['device'].replace(' ', '-')}.json"
    print(f"{'':24}{'per second':>22}{'ms':>9}{'MiB':>8}{'of serial':>11}{'of vmap':>9}")
    end = monotonic() + args.budget
    for name, size in each(runs, lambda run: f"{run[0]}, B = {run[1]}"):
        if monotonic() > end:
            say(f"the time was up before {name}, B = {size}")
            break
        record["rows"] += measure(name, cases[name], size, args)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(record['rows'])}\n\nwrote {path}")
    if args.plot:
        plot(record, args.plot)
    if wrong := [row for row in record["rows"] if not row.get("agrees", True)]:
        sys.exit(f"error: losses differ in {len(wrong)} rows")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="small models: a rehearsal")
    parser.add_argument("--only", nargs="*", choices=list(SMALL))
    parser.add_argument("--sizes", type=int, nargs="*", metavar="B", help="1 2 4 8 16; tiny: 2")
    parser.add_argument("--compiled", type=int, nargs="*", metavar="B",
                        help="at which torch.compile is measured too: 8; tiny: none")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--budget", type=float, default=1e9, help="begin nothing after so many s")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot")
    args = parser.parse_args()
    if args.sizes is None:
        args.sizes = [2] if args.tiny else [1, 2, 4, 8, 16]
    if args.compiled is None:
        args.compiled = [] if args.tiny else [8]
    return args


def measure(name: str, case: Case, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all contenders for B models of a case.

    On a CPU all take turns, as its speed changes; a GPU has room for one at a time.
    """
    torch.manual_seed(0)
    models = [case.model() for _ in range(size)]
    ours = [[case.batch() for _ in range(size)] for _ in range(STEPS)]
    batches = [tree_map(lambda *xs: torch.stack(xs).to(args.device), *each) for each in ours]
    names = [n for n, (_, compiled) in CONTENDERS.items() if not compiled or size in args.compiled]
    rows: list[dict[str, Any]] = []
    for together in [names] if args.device == "cpu" else [[n] for n in names]:
        running: dict[str, Contender] = {}
        for contender in together:
            row = {"case": name, "B": size, "contender": contender, "unit": case.unit}
            rows.append(row | begun(contender, (case, models, batches), running, args.device))
        seconds = in_turns(running, batches[0], args)
        for row in rows:
            if row["contender"] in running:
                row["seconds"] = seconds[row["contender"]]
                row["peak_mib"] = total_mib(running[row["contender"]], batches[0], args.device)
    compare(rows, size * case.counts)
    return rows


def begun(contender: str, job: tuple, running: dict[str, Contender], device: str) -> dict[str, Any]:
    """Trains the first steps; what is running is put there. Of one that cannot run, why."""
    case, models, batches = job
    cls, compiled = CONTENDERS[contender]
    torch.compiler.reset()
    started = perf_counter()
    try:
        one = cls(case, copy.deepcopy(models), compiled, device)
        losses = torch.stack([one.step(*batch) for batch in batches]).tolist()
    except Exception as error:  # torch.func and torch.compile refuse some models, memory others
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    running[contender] = one
    return {"losses": losses, "first_steps_s": perf_counter() - started}


def compare(rows: list[dict[str, Any]], count: int) -> None:
    """Adds rates and ratios, says each row, and whether its losses are those of models alone."""
    seconds = {row["contender"]: row["seconds"] for row in rows if "seconds" in row}
    alone = next(
        (row["losses"] for row in rows if row["contender"] == "serial" and "losses" in row), None
    )
    for row in rows:
        if "failed" in row:
            why = row["failed"].splitlines()[0]
            say(f"{row['case']:<12}{row['B']:3} {row['contender']:<15}{why}")
            continue
        row["per_s"] = count / row["seconds"]
        row["of_serial"] = seconds["serial"] / row["seconds"] if "serial" in seconds else None
        other = "vmap compiled" if "compiled" in row["contender"] else "vmap"
        row["of_vmap"] = seconds[other] / row["seconds"] if other in seconds else None
        if alone is not None:
            gap = torch.tensor(row["losses"]) / torch.tensor(alone) - 1.0
            row["gap"] = gap.abs().max().item()
            row["agrees"] = row["gap"] < GAP
        say(told(row))


def in_turns(
    running: dict[str, Contender], batch: tuple, args: argparse.Namespace
) -> dict[str, float]:
    """The fastest step of each, all taking turns; of one thread of a CPU its processor time, which
    others on the machine do not lengthen."""
    best = dict.fromkeys(running, float("inf"))
    clock = process_time if args.device == "cpu" and args.threads == 1 else perf_counter
    for _ in range(args.repeats):
        for name, one in running.items():
            for _ in range(3):
                started = clock()
                one.step(*batch)
                if args.device == "cuda":
                    torch.cuda.synchronize()
                best[name] = min(best[name], clock() - started)
    return best


def total_mib(one: Contender, batch: tuple, device: str) -> float:
    """MiB of state, and of what a step allocates above it at its peak."""
    state = sum(t.untyped_storage().nbytes() for t in one.state()) / 2**20
    if device == "cpu":
        return state + peak_mib(lambda: one.step(*batch))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one.step(*batch)
    return state + (torch.cuda.max_memory_allocated() - before) / 2**20


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def told(row: dict[str, Any]) -> str:
    of_serial, of_vmap = (f"{x:.2f}x" if x else "" for x in (row["of_serial"], row["of_vmap"]))
    wrong = "" if row.get("agrees", True) else f"  losses are {row['gap']:.1e} off"
    return (
        f"{row['case']:<12}{row['B']:3} {row['contender']:<15}"
        f"{row['per_s']:11,.0f} {row['unit']:<8}{1e3 * row['seconds']:9.2f}{row['peak_mib']:8.1f}"
        f"{of_serial:>11}{of_vmap:>9}{wrong}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Throughput of all models over that of the same models in turn, as Markdown, by B."""
    sizes = sorted({row["B"] for row in rows})
    lines = [["model", "contender", *(f"B = {size}" for size in sizes)]]
    lines.append(["---"] * len(lines[0]))
    for case in dict.fromkeys(row["case"] for row in rows):
        for contender in list(CONTENDERS)[1:]:
            own = {r["B"]: r for r in rows if (r["case"], r["contender"]) == (case, contender)}
            ratios = [(own.get(size) or {}).get("of_serial") for size in sizes]
            if own:
                lines.append([case, contender, *(f"{x:.2f}" if x else "" for x in ratios)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(record: dict[str, Any], path: str) -> None:
    """Draws what all models do in a second, by B, a panel for each kind of model."""
    from matplotlib.figure import Figure

    rows = [row for row in record["rows"] if "per_s" in row]
    names = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(3.2 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for i, contender in enumerate(CONTENDERS):
            own = [r for r in rows if (r["case"], r["contender"]) == (name, contender)]
            if not own:
                continue
            style = "o" if len(own) == 1 else "o-"
            panel.plot(
                [r["B"] for r in own], [r["per_s"] for r in own], style, ms=4, color=f"C{i}",
                label=contender,
            )  # fmt: skip
        sizes = sorted({row["B"] for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set(title=name, xlabel="models", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("samples or tokens per second, all models")
    panels[0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
