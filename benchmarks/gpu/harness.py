"""What a kernel's benchmark is, and how one is checked and timed.

An entry names our function and its rivals, the first of which says what is right. The floors, a
copy's bandwidth and a product's rate, are measured in the same run, and every time is also given as
a part of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

SHORT = 1.0  # milliseconds; below, launches may take longer than the work
REPLAYED = 20  # passes in a CUDA graph


@dataclass(frozen=True)
class Entry:
    """A function beside its rivals, forward and, where `backward_bytes` is given, backward.

    `make(device, dtype, *size)` gives the arguments; those that require a gradient get one.
    `bytes` and `flops` of a size count the least that an implementation must move and compute.
    """

    name: str
    ours: Callable[..., Any]
    rivals: Mapping[str, Callable[..., Any]]
    make: Callable[..., tuple[Any, ...]]
    sizes: Sequence[tuple[int, ...]]
    small: tuple[int, ...]
    forward_bytes: Callable[..., int] = lambda itemsize, *size: 0
    backward_bytes: Callable[..., int] | None = None
    forward_flops: Callable[..., int] = lambda *size: 0
    backward_flops: Callable[..., int] = lambda *size: 0
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    chosen: tuple[str, ...] = ()  # rivals that a wrapper calls where they are faster than ours
    magnitudes: Callable[..., Sequence[int]] = lambda *size: size[-1:]  # what that depends on
    torch_compiles: str | None = None  # the rival for torch.compile; None is the first


Step = Callable[[], Any]


def forward(entry: Entry, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Step:
    """A forward pass that keeps nothing for a backward one."""

    def step() -> Any:
        with torch.no_grad():
            return function(*arguments)

    return step


def backward(entry: Entry, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Step:
    """The backward pass alone, of a forward one made here."""
    out = tensors(function(*arguments))
    out = [y for y in out if y.requires_grad]
    grads = [seeded(y.shape, y.dtype, y.device, 7) for y in out]
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]

    def step() -> Any:
        return torch.autograd.grad(out, leaves, grads, retain_graph=True)

    return step


def passes(entry: Entry) -> dict[str, Callable[..., Step]]:
    """The passes of an entry that are measured, by name."""
    both = {"forward": forward, "backward": backward}
    return both if entry.backward_bytes else {"forward": forward}


def agree(entry: Entry, step: Step, expected: Step, dtype: torch.dtype) -> None:
    """Raises where results differ by more than roundings of the dtype."""
    bound = {torch.float32: 1e-4}.get(dtype, 2e-2)
    for ours, theirs in zip(tensors(step()), tensors(expected()), strict=True):
        ours, theirs = ours.double(), theirs.double()
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        if not error < bound:
            raise AssertionError(f"{entry.name}: results are {error:.1e} apart")


def milliseconds(step: Step, repeats: int) -> float:
    """The median time of one pass on a GPU, with its L2 cache emptied before each.

    A short one is replayed from a CUDA graph, as its launches would take longer than its work. One
    that asks the GPU for a number cannot be, and is timed with them.
    """
    from triton.testing import do_bench

    found = median(float(do_bench(step, return_mode="median")) for _ in range(repeats))
    # The default stream cannot be recorded.
    if found > SHORT or torch.cuda.current_stream() == torch.cuda.default_stream():
        return found
    try:
        return _replayed(step, repeats)
    except RuntimeError:
        torch.cuda.synchronize()
        return found


def _replayed(step: Step, repeats: int) -> float:
    """Milliseconds of a pass in a CUDA graph, less those of emptying the L2 cache."""
    from triton.runtime import driver
    from triton.testing import do_bench

    cache = driver.active.get_empty_cache_for_benchmark()

    def graph_of(*work: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(REPLAYED):
                for one in work:
                    one()
        return graph.replay

    both, alone = graph_of(cache.zero_, step), graph_of(cache.zero_)
    times = [
        do_bench(both, return_mode="median") - do_bench(alone, return_mode="median")
        for _ in range(repeats)
    ]
    return float(median(times)) / REPLAYED


def tried(make: Callable[[], Step], repeats: int) -> float:
    """The same of a library's function; infinite where it refuses what it is given, or this GPU."""
    try:
        return milliseconds(make(), repeats)
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        print(f"not taken: {str(error).splitlines()[0]}", flush=True)
        return float("inf")


def floors(repeats: int) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and FLOP per second of a product in bf16."""
    from triton.testing import do_bench

    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    # Not from a graph, whose copies took half again as long on an H200.
    copy = median(float(do_bench(lambda: y.copy_(x), return_mode="median")) for _ in range(repeats))
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = milliseconds(lambda: a @ b, repeats)
    return {
        "copy_bytes_per_s": 2 * x.nbytes / copy * 1e3,
        "flop_per_s": 2 * 8192**3 / product * 1e3,
    }


def seeded(shape: Sequence[int], dtype: torch.dtype, device: Any, seed: int = 0) -> Tensor:
    """Standard normals."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def leaf(shape: Sequence[int], dtype: torch.dtype, device: Any, seed: int = 0) -> Tensor:
    """Standard normals that get a gradient."""
    return seeded(shape, dtype, device, seed).requires_grad_()


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [result] if isinstance(result, Tensor) else [x for x in result if x is not None]
