"""A GPU that is not there, for which triton compiles what it is told to launch."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class AbsentGpu(DriverBase):
    """What triton asks its driver before it compiles; a launch would need more."""

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
        """The only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only stream."""
        return 0
