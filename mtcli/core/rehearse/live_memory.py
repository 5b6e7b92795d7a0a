"""Counts the live bytes of tensors, fake ones too, and their peaks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as has_parts
from torch.utils._pytree import tree_leaves

resize_storage = torch.UntypedStorage.resize_


class Mode(TorchDispatchMode):
    """The base of modes that torch.compile never sees: to hide them, torch would import it, which
    takes half a second."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class LiveMemory(Mode):
    """Counts the live bytes of a device type, and the peak; `where` names the moment of a peak."""

    def __init__(self, device: str = "cpu", where: Callable[[], str] = str) -> None:
        super().__init__()
        self.device, self.where = device, where
        self.sizes: dict[int, int] = {}  # of each storage
        self.references: dict[int, ref[torch.UntypedStorage]] = {}
        self.bytes = self.peak = 0
        self.peak_at = ""

    def begin(self) -> None:
        """Restarts the peak at the bytes that are alive now."""
        self.peak, self.peak_at = self.bytes, self.where()

    def __enter__(self) -> "LiveMemory":
        """Counts from here on, storages that are resized without an operation (FSDP2's) too."""

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = resize_storage(storage, size)
            if id(resized) in self.sizes:
                self.add(resized)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]  # a patch
        super().__enter__()  # type: ignore[no-untyped-call]  # torch
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the count."""
        torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign]  # unpatched
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, and counts the memory of its result."""
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == self.device and not has_parts(x):
                self.add(x.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage at its present size, until it is freed."""
        key = id(storage)
        if key not in self.references:
            self.references[key] = ref(storage, lambda _: self._remove(key))
        self.bytes += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        if self.bytes > self.peak:
            self.begin()

    def _remove(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key)
        del self.references[key]
