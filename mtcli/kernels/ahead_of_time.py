"""Compiles kernels ahead of time, for GPUs that need not be in this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from mtcli.kernels.triton_launch import Compilation, CompileOnly, launch_mode


@contextmanager
def compiled_for(
    backend: str, arch: int, warp_size: int, *, default_only: bool = False
) -> Iterator[list[Compilation]]:
    """Inside, launches on CPU tensors compile and do not run: every config, or each kernel's
    default.

    Results are uninitialised memory. Yields a list to which compilations and their errors are
    appended.
    """
    driver.set_active(OfflineDriver(backend, arch, warp_size))
    mode = CompileOnly(default_only)
    with launch_mode(mode):
        yield mode.compilations


class OfflineDriver(DriverBase):
    """A Triton driver that answers what compiling asks; it cannot launch."""

    def __init__(self, backend: str, arch: int, warp_size: int) -> None:
        self.target = GPUTarget(backend, arch, warp_size)

    @classmethod
    def is_active(cls) -> bool:
        """Returns True."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Returns the type unchanged, as no launcher is built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_active_torch_device(self) -> str:
        """The device of a benchmark's tensors."""
        return "cpu"

    def get_benchmarker(self) -> None:
        """Returns None: nothing can be timed."""
        return None

    def get_current_device(self) -> int:
        """The architecture, as Triton caches compiled kernels by device number."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """Returns the only stream."""
        return 0
