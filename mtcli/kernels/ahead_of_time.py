"""Compiles kernels ahead of time, for a GPU that this machine need not have."""

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
    """Inside, launches on CPU tensors only compile: each kernel's default config, or all of them.

    Nothing runs, so results are uninitialised memory. Yields a list that fills with what was
    compiled, and with what could not be.
    """
    driver.set_active(OfflineDriver(backend, arch, warp_size))
    mode = CompileOnly(default_only)
    with launch_mode(mode):
        yield mode.compilations


class OfflineDriver(DriverBase):
    """Answers what Triton asks a driver before it compiles; a launch would need more."""

    def __init__(self, backend: str, arch: int, warp_size: int) -> None:
        self.target = GPUTarget(backend, arch, warp_size)

    @classmethod
    def is_active(cls) -> bool:
        """True: it was chosen by name."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """The type itself: no launcher is built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The GPU compiled for."""
        return self.target

    def get_active_torch_device(self) -> str:
        """The device of tensors that a benchmark would make."""
        return "cpu"

    def get_benchmarker(self) -> None:
        """None: nothing can be timed."""
        return None

    def get_current_device(self) -> int:
        """The architecture, as Triton keeps compiled kernels by device number."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """The only stream."""
        return 0
