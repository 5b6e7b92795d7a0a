"""Triton kernels: when they run, how they are compiled and launched, and their grids.

A kernel's file imports `tl` for type checkers alone, and its annotations are text (`from __future__
import annotations`): the first launch imports triton, so a run on CPU never does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from types import FunctionType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from mtcli.kernels.autotune import LaunchConfig, best_config, fastest_backend

# torch's wheels for GPUs bring triton.
HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Grid = Callable[[Mapping[str, Any]], tuple[int, ...]]
Configs = Sequence[LaunchConfig]


@dataclass(frozen=True)
class Compilation:
    """A kernel compiled with a config, or the error of Triton or ptxas."""

    name: str
    config: LaunchConfig
    is_default: bool
    # triton's CompiledKernel, with `asm` and `metadata`; None beside an error.
    compiled: Any = None
    error: str = ""


@dataclass(frozen=True)
class CompileOnly:
    """The mode in which launches on CPU tensors compile and do not run; see ahead_of_time.py."""

    default_only: bool
    compilations: list[Compilation] = field(default_factory=list)


LaunchMode = CompileOnly | Literal["interpreted", "fake"]
_mode: ContextVar[LaunchMode | None] = ContextVar("mode", default=None)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on x: on a GPU in 16 or 32 bits, on CPU in tests alone."""
    if x.is_cuda:
        return HAS_TRITON and x.dtype in DTYPES
    # Dynamo cannot read a ContextVar.
    if torch.compiler.is_compiling():
        return False
    return _mode.get() is not None and x.dtype in DTYPES


def prefers_kernel(op: str, x: Tensor, size: int, unmeasured: str = "mtcli") -> bool:
    """Whether the Triton kernel runs on x, and torch's function was not measured to be faster;
    `unmeasured` is taken to be faster where neither was measured."""
    if not runs_triton(x):
        return False
    return torch.compiler.is_compiling() or (
        (fastest_backend(op, x, [size]) or unmeasured) != "torch"
    )


@contextmanager
def launch_mode(mode: LaunchMode) -> Iterator[None]:
    """Inside, kernels also take CPU tensors, in the given mode."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, Triton's interpreter runs kernels on CPU tensors, one program at a time.

    Raises RuntimeError where TRITON_INTERPRET=1 was not set before triton's import.
    """
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before anything imports triton")
    convert = partial(_convert_float, interpreter._convert_float)
    with launch_mode("interpreted"), patch.object(interpreter, "_convert_float", convert):
        yield


def _convert_float(convert: Callable[..., Any], x: Any, *dtypes: Any) -> Any:
    """The interpreter's conversion of floats, with torch's for float8, which rounds as a GPU does.

    The interpreter's own drops carries out of the mantissa, and rounds ties and nan differently.
    """
    dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(str(dtypes[1]))
    if dtype is None or x.dtype != "float32":
        return convert(x, *dtypes)
    return torch.tensor(x).to(dtype).view(torch.uint8).numpy()


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside, fake CPU tensors take a GPU's path, on which kernels are operators with shapes
    alone."""
    with launch_mode("fake"):
        yield


class TritonKernel:
    """A Triton kernel, launched as `kernel[grid](*arguments, **constants)`.

    `configs` are alternative constants and launch options, as in triton.Config, or a function to
    them from the sizes of the arguments named in `key`. The fastest one may differ by device, dtype
    and those sizes; without a measurement it is the first, or the result of `default` for the
    sizes. The first argument is a tensor.
    """

    def __init__(
        self,
        function: FunctionType,
        configs: Configs | Callable[..., Configs],
        key: Sequence[str],
        default: Callable[..., LaunchConfig] | None,
    ) -> None:
        self.function = function
        self.configs = configs if callable(configs) else lambda *sizes: configs
        self.default = default or (lambda *sizes: self.configs(*sizes)[0])
        self.name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.key = [parameters.index(name) for name in key]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launcher of a grid: a tuple, or a function from the constants to one."""
        return partial(self._launch, grid)

    @cached_property
    def jitted(self) -> Any:
        """The function under triton.jit, with `tl` and the kernels that it calls as globals."""
        import triton
        import triton.language as tl

        source = self.function
        names = {name: value for name, value in source.__globals__.items()}
        for name in source.__code__.co_names:
            if isinstance(names.get(name), TritonKernel):
                names[name] = names[name].jitted
        bound = FunctionType(source.__code__, names | {"tl": tl}, source.__name__)
        bound.__defaults__, bound.__annotations__ = source.__defaults__, source.__annotations__
        bound.__qualname__ = source.__qualname__
        return triton.jit(bound)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> None:
        mode = None if arguments[0].is_cuda else _mode.get()
        launch = partial(self._launch_as, grid, arguments, constants)
        sizes = [arguments[i] for i in self.key]
        configs, default = self.configs(*sizes), self.default(*sizes)
        if isinstance(mode, CompileOnly):
            alternatives = () if mode.default_only else [c for c in configs if c != default]
            for config in (default, *alternatives):
                mode.compilations.append(self._compile(launch, config, config is default))
        elif len(configs) == 1:
            launch(default)
        else:
            best = best_config(self.name, arguments[0], sizes, configs, launch)
            launch(best or default)

    def _launch_as(
        self,
        grid: Any,
        arguments: Any,
        constants: Any,
        config: LaunchConfig,
        warmup: bool = False,
    ) -> Any:
        # Triton launches on the current device.
        with torch.cuda.device_of(arguments[0]):
            return self.jitted.run(*arguments, grid=grid, warmup=warmup, **constants, **config)

    def _compile(
        self, launch: Callable[..., Any], config: LaunchConfig, is_default: bool
    ) -> Compilation:
        compiled, error = None, ""
        # Whatever Triton raises of one kernel: the others are compiled all the same.
        try:
            compiled = launch(config, warmup=True)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        return Compilation(self.name, dict(config), is_default, compiled, error)


def kernel(
    configs: Configs | Callable[..., Configs] = ({},),
    key: Sequence[str] = (),
    default: Callable[..., LaunchConfig] | None = None,
) -> Callable[[FunctionType], TritonKernel]:
    """A decorator like triton.jit and triton.autotune in one; see `TritonKernel`."""
    return partial(TritonKernel, configs=configs, key=key, default=default)


@cache
def full_row_configs(width: int, elements: int) -> tuple[dict[str, int], ...]:
    """Configs of tiles as wide as a row; the first has rows for at least `elements` elements, 16
    per thread.

    The others have 4 to 64 elements per thread: with more, kernels spill and compile for minutes.
    """
    block = power_of_two(width)
    rows = max(1, elements // block)
    first = {"ROWS": rows, "num_warps": min(16, rows * block // 512)}
    tiles = [(more, warps) for more in (rows, 4 * rows) for warps in (2, 4, 8, 16)]
    configs = [{"ROWS": n, "num_warps": w} for n, w in tiles if 4 <= n * block // (32 * w) <= 64]
    return first, *(config for config in configs if config != first)


@cache
def tile_configs(width: int, elements: int = 2048) -> tuple[dict[str, int], ...]:
    """Configs of tiles of `elements` elements; the first is the widest of those that pad a row
    least.

    A tile of 2048 columns leaves 62 % of its lanes idle for a row of 768.
    """
    columns = sorted((2048, 1024, 512, 256), key=lambda n: (cdiv(width, n) * n, -n))
    tiles = [(max(1, elements // n), n) for n in columns]
    return tuple({"ROWS": rows, "COLUMNS": n, "num_warps": 4} for rows, n in tiles)


def row_grid(rows: int) -> Grid:
    """A program per ROWS of `rows` rows."""
    return lambda meta: (cdiv(rows, meta["ROWS"]),)


def column_grid(rows: int, columns: int) -> Grid:
    """A program per COLUMNS of each row."""
    return lambda meta: (rows, cdiv(columns, meta["COLUMNS"]))


def tile_grid(rows: int, columns: int) -> Grid:
    """A program per tile of ROWS by COLUMNS."""
    return lambda meta: (cdiv(rows, meta["ROWS"]), cdiv(columns, meta["COLUMNS"]))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n, as tiles need."""
    return 1 << max(0, n - 1).bit_length()


def multiprocessors(x: Tensor) -> int:
    """The GPU's multiprocessors (SMs), for persistent programs; 2 where kernels are interpreted."""
    if not x.is_cuda:
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count
