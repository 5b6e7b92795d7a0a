"""What a kernel's benchmark is, and how one is checked, timed and compiled.

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

SMALL_BYTES = 32 * 2**20  # below, launches cost as much as the work, and are replayed from a graph


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
    compiled: tuple[int, ...] | None = None  # a size for --compile; None is `small`
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


def milliseconds(make: Callable[[], Step], moved: int, repeats: int) -> float:
    """The median time of one pass on a GPU, with its L2 cache emptied before each.

    Small ones are replayed from a CUDA graph, many in a row. `make()` makes the pass.
    """
    from triton.testing import do_bench

    step, count = make(), 1
    if 0 < moved < SMALL_BYTES:
        step, count = _replay(make)
    return median(float(do_bench(step, return_mode="median")) for _ in range(repeats)) / count


def _replay(make: Callable[[], Step], count: int = 20) -> tuple[Step, int]:
    """A CUDA graph of a pass that is repeated, and how often.

    The pass is made on the stream that is recorded: a backward runs on its forward's stream.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = make()
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            step()
    return graph.replay, count


def tried(make: Callable[[], Step], moved: int, repeats: int) -> float:
    """The same of a library's function; infinite where it refuses what it is given, or this GPU."""
    try:
        return milliseconds(make, moved, repeats)
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        print(f"not taken: {str(error).splitlines()[0]}", flush=True)
        return float("inf")


def floors(repeats: int) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and FLOP per second of a product in bf16."""
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = milliseconds(lambda: lambda: y.copy_(x), 2 * x.nbytes, repeats)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = milliseconds(lambda: lambda: a @ b, 0, repeats)
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
