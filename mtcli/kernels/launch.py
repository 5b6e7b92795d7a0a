"""Triton kernels: when they run, how they are made and launched, and how they become operators.

A kernel's file names `tl` for type checkers alone, and its annotations are text (`from __future__
import annotations`): triton is imported by the first launch, so a run on CPU never pays for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from mtcli.kernels.choices import Config, choose, fastest

HAS_TRITON = importlib.util.find_spec("triton") is not None  # a wheel of torch for GPUs brings it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIBRARY = torch.library.Library("mtcli", "FRAGMENT")


@dataclass(frozen=True)
class Compiling:
    """The mode in which a launch on CPU tensors only compiles: all configurations, or `first`."""

    first: bool
    names: list[str] = field(default_factory=list)


_mode: ContextVar[Compiling | Literal["interpreted", "imagined"] | None] = ContextVar(
    "mode", default=None
)


def runs_triton(x: Tensor) -> bool:
    """Whether our kernels run on this tensor: on a GPU in 16 or 32 bits; on CPU in tests alone."""
    if x.is_cuda:
        return HAS_TRITON and x.dtype in DTYPES
    if torch.compiler.is_compiling():  # dynamo cannot read a ContextVar
        return False
    return _mode.get() is not None and x.dtype in DTYPES


def beats_torch(op: str, x: Tensor, magnitude: int) -> bool:
    """Whether our kernel runs on x, and torch's function was not measured to be faster there."""
    if not runs_triton(x):
        return False
    return torch.compiler.is_compiling() or fastest(op, x, [magnitude]) != "torch"


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels run on CPU tensors by Triton's interpreter, a program at a time.

    Raises RuntimeError where TRITON_INTERPRET=1 was not in the environment before triton's import.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before anything imports triton")
    token = _mode.set("interpreted")
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def imagined() -> Iterator[None]:
    """Inside, `runs_triton` holds for CPU tensors too: fake ones, of which shapes alone count."""
    token = _mode.set("imagined")
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def compiled_for(
    backend: str, arch: int, warp_size: int, *, first: bool = False
) -> Iterator[list[str]]:
    """Inside, launches on CPU tensors only compile, for a GPU that need not be there.

    Nothing runs, so results are uninitialised memory. Gives a list that fills with what was
    compiled, such as "swiglu._forward {'ROWS': 1}".
    """
    from triton.runtime import driver

    from mtcli.kernels.absent import AbsentGpu

    driver.set_active(AbsentGpu(backend, arch, warp_size))
    compiling = Compiling(first)
    token = _mode.set(compiling)
    try:
        yield compiling.names
    finally:
        _mode.reset(token)


class Kernel:
    """A Triton kernel, launched as `kernel[grid](*arguments, **constants)`.

    `configs` are alternative constants and launch options. Which is best may differ by device, by
    dtype and by the magnitudes of the arguments named in `key`; where nothing was measured it is
    the first, or what `default` returns for those arguments. The first argument is a tensor.
    """

    def __init__(
        self,
        function: FunctionType,
        configs: Sequence[Config],
        key: Sequence[str],
        default: Callable[..., Config] | None,
    ) -> None:
        self.function, self.configs = function, tuple(configs)
        self.default = default or (lambda *magnitudes: self.configs[0])
        self.name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.key = [parameters.index(name) for name in key]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launch of a grid: a tuple, or a function from the constants to one."""
        return partial(self._launch, grid)

    @cached_property
    def jitted(self) -> Any:
        """The function under triton.jit, with `tl` and the kernels it calls as its globals."""
        import triton
        import triton.language as tl

        source = self.function
        names = {name: value for name, value in source.__globals__.items()}
        for name in source.__code__.co_names:
            if isinstance(names.get(name), Kernel):
                names[name] = names[name].jitted
        bound = FunctionType(source.__code__, names | {"tl": tl}, source.__name__)
        bound.__defaults__, bound.__annotations__ = source.__defaults__, source.__annotations__
        bound.__qualname__ = source.__qualname__
        return triton.jit(bound)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> None:
        mode = None if arguments[0].is_cuda else _mode.get()
        launch = partial(self._launch_as, grid, arguments, constants)
        magnitudes = [arguments[i] for i in self.key]
        default = self.default(*magnitudes)
        if isinstance(mode, Compiling):
            for config in (default, *(() if mode.first else self.configs)):
                launch(config, warmup=True)
                mode.names.append(f"{self.name} {dict(config)}")
        elif mode is not None or len(self.configs) == 1:
            launch(default)
        else:
            chosen = choose(self.name, arguments[0], magnitudes, self.configs, launch)
            launch(chosen or default)

    def _launch_as(
        self, grid: Any, arguments: Any, constants: Any, config: Config, warmup: bool = False
    ) -> None:
        with torch.cuda.device_of(arguments[0]):  # triton launches on the current device
            self.jitted.run(*arguments, grid=grid, warmup=warmup, **constants, **config)


def kernel(
    configs: Sequence[Config] = ({},),
    key: Sequence[str] = (),
    default: Callable[..., Config] | None = None,
) -> Callable[[FunctionType], Kernel]:
    """A decorator that is triton.jit and triton.autotune in one: see `Kernel`."""
    return partial(Kernel, configs=configs, key=key, default=default)


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The operator `torch.ops.mtcli.<name>` of a schema such as "name(Tensor x) -> Tensor".

    torch.compile, FakeTensor and meta tensors see its result by `fake`; `gradient(ctx, *grads)` and
    `keep(ctx, inputs, output)` are autograd's. torch.library.custom_op does the same and imports
    torch._dynamo in its first call, 0.9 s.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):  # on CPU for the interpreter
        LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"mtcli::{name}", fake, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"mtcli::{name}", gradient, setup_context=keep, lib=LIBRARY)
    return getattr(torch.ops.mtcli, name).default


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n: tiles have no other sizes."""
    return 1 << max(0, n - 1).bit_length()


def processors(x: Tensor) -> int:
    """The GPU's multiprocessors, for programs that stay; 2 where kernels are interpreted."""
    if not x.is_cuda:
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count
