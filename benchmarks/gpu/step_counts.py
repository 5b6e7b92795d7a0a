"""Counts what a step asks of a GPU, without one: launches, bytes, FLOPs, and waits of the host.

`StepCounts` is a dispatch mode over the tensors of a rehearsal, which take a GPU's paths. Each
operation becomes an `Event` with the line of mtcli that caused it; an operation of a backward has
the line of its forward. An operator of mtcli counts the launches that its implementation makes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import mtcli
from mtcli.core.schedule.ops import Op
from mtcli.kernels.multi_tensor import FIRST, GRADIENT
from mtcli.kernels.triton_launch import TritonKernel

PACKAGE = Path(mtcli.__file__).parent
# What runs the operations of others, or is the rehearsal's own.
PASSED_OVER = ("core/rehearse/", "kernels/custom_op.py")
aten = torch.ops.aten
EMPTY = {
    torch.ops.prim.device,
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten.lift_fresh, aten.resize_, aten.set_, aten.record_stream,
}  # fmt: skip
# Operations that read as many rows as they return, of a larger table.
GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}
OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.index_copy_, aten.scatter_}
# Kernels of operations that launch more than one: see aten/src/ATen/native.
LAUNCHES = {
    aten._scaled_dot_product_flash_attention_backward: 3,
    aten._scaled_dot_product_efficient_attention_backward: 2,
    aten._scaled_dot_product_cudnn_attention_backward: 3,
    aten.embedding_dense_backward: 6,  # sorts the ids
    aten.sort: 3,
    aten.nonzero: 3,
}
# Results whose number of rows the host waits for.
ROWS_OF_UNKNOWN_NUMBER = {
    aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique2, aten.bincount,
    aten.repeat_interleave, aten.equal,
}  # fmt: skip
# Operators of mtcli that read addresses, which fake tensors lack, or run torch's GEMM on a GPU.
ONE_LAUNCH = {"adamw_", "lamb_moments_", "lamb_step_", "fp8_product"}

Kind = Literal["aten", "mtcli", "collective", "read", "upload"]


class Event(NamedTuple):
    """An operation; the host waits for a `read` from the device, and for an `upload` to it."""

    kind: Kind
    name: str  # of the operation
    frame: str  # file:line function
    inside: Op | None  # the op of the schedule; None before and after all
    launches: int = 1
    triton: int = 0  # of the launches
    read_bytes: int = 0
    written_bytes: int = 0
    gemm_flops: int = 0
    attention_flops: int = 0

    @property
    def place(self) -> str:
        """File and function, which a change elsewhere in the file leaves as they are."""
        file, _, rest = self.frame.partition(":")
        return f"{file} {rest.partition(' ')[2]}"


class StepCounts(TorchDispatchMode):
    """Records the events of a step in `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.op: Op | None = None
        self.forwards: dict[int, str] = {}  # frame of each autograd node, by sequence number
        self.tables: dict[int, dict[int, list[Tensor]]] = {}  # of multi-tensor launches
        self.last_read: tuple[Any, ...] = ()

    @contextmanager
    def around(self, op: Op) -> Iterator[None]:
        """Notes the op of the schedule, as `Pipeline.around`."""
        self.op = op
        yield
        self.op = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and records it."""
        given = dict(kwargs or {})
        result = func(*args, **given)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if any(x.device.type == "meta" for x in (*tensors, *outs)):
            self._record(func, args, given, tensors, outs)
        return result

    def _record(
        self, func: Any, args: tuple[Any, ...], given: Any, tensors: list[Tensor], outs: Any
    ) -> None:
        inner, outer = self._frames()
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if wait := _wait(func, args, given, tensors, outs):
            read = (inner, *((id(x.untyped_storage()), x._version) for x in tensors[:1]))
            if read != self.last_read:  # a list of numbers is one copy
                self.events.append(Event(wait, name, inner, self.op, launches=0))
            self.last_read = read
        if func.overloadpacket is aten._local_scalar_dense or _is_free(func):
            return
        if func.namespace == "mtcli":
            self._record_ours(func, name, outer, args, outs)
            return
        read, written = _bytes(func, args, given, outs)
        kind: Kind = "collective" if func.namespace == "c10d" else "aten"
        count = 1 if outs or written or kind == "collective" else 0
        if count and kind == "aten" and not (read or written):
            return
        gemm, attention = _flops(func, args, given, outs)
        launches = LAUNCHES.get(func.overloadpacket, count)
        found = read, written, gemm, attention
        self.events.append(Event(kind, name, outer, self.op, launches, 0, *found))

    def _record_ours(self, func: Any, name: str, frame: str, args: Any, outs: Any) -> None:
        """Records an operator of mtcli, with the launches of its implementation."""
        short = func.overloadpacket.__name__
        if short == "point_":  # of a table's column: addresses
            self.tables.setdefault(id(args[1]), {})[args[3]] = args[2]
            return
        read, written = _bytes(func, args, {}, outs)
        if short in ONE_LAUNCH:
            launches = triton = 1
            roles = self.tables.get(id(args[1]), {}) if short != "fp8_product" else {}
            sizes = [(c, sum(map(_size, xs))) for c, xs in roles.items()]
            read += sum(size for c, size in sizes if c != GRADIENT - 1)
            written += sum(size for c, size in sizes if FIRST <= c < GRADIENT)
        else:
            launches, triton = self._launches(func, args)
        flops = _our_flops(short, args)
        event = Event("mtcli", name, frame, self.op, launches, triton, read, written, *flops)
        self.events.append(event)

    def _launches(self, func: Any, args: Any) -> tuple[int, int]:
        """(all launches, those of Triton's kernels) of an operator's implementation."""
        inside, triton = StepCounts(), []

        def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
            triton.append(kernel.name)

        with (
            _disable_current_modes(),
            patch.object(TritonKernel, "_launch", launch),
            inside,
        ):
            func._op_dk(torch._C.DispatchKey.CPU, *args)
        self.events += [e._replace(inside=self.op) for e in inside.events if not e.launches]
        return sum(e.launches for e in inside.events) + len(triton), len(triton)

    def _frames(self) -> tuple[str, str]:
        """(the innermost line of mtcli, the innermost one outside its kernels)."""
        inner = outer = ""
        frame: FrameType | None = sys._getframe(2)
        node = torch._C._current_autograd_node()
        while frame is not None:
            if frame.f_code.co_name == "_engine_run_backward" and not outer and node is not None:
                outer = self.forwards.get(node._sequence_nr(), "")
                outer = outer and f"{outer} backward"
            path = frame.f_code.co_filename
            if path.startswith(str(PACKAGE)):
                file = path[len(str(PACKAGE)) + 1 :]
                if not file.startswith(PASSED_OVER):
                    function = frame.f_code.co_qualname.removesuffix(".<locals>.<genexpr>")
                    text = f"{file}:{frame.f_lineno} {function}"
                    inner = inner or text
                    if not file.startswith("kernels/"):
                        outer = outer or text
            if outer and inner:
                break
            frame = frame.f_back
        outer = outer or inner
        if node is None:
            # The last node that was made is of the first operation that runs after it.
            self.forwards.setdefault(torch.autograd._get_sequence_nr() - 1, outer)
        return inner, outer


def _is_free(func: Any) -> bool:
    """Whether an operation launches nothing: a view, or memory without values."""
    returned = [r.alias_info for r in func._schema.returns]
    is_view = bool(returned) and all(a is not None and not a.is_write for a in returned)
    return is_view or func.overloadpacket in EMPTY


def _wait(func: Any, args: Any, given: Any, tensors: list[Tensor], outs: Any) -> Kind | None:
    """Whether the host waits: for a copy to it, for one from memory that is not pinned, or for the
    number of rows of a result."""
    packet = func.overloadpacket
    on_device = [x for x in tensors if x.device.type == "meta"]
    if packet is aten._local_scalar_dense:
        return "read"
    if packet in (aten._to_copy, aten.copy_):
        target, source = (outs[0], args[0]) if packet is aten._to_copy else (args[0], args[1])
        ways = source.device.type, target.device.type
        waits = not (given.get("non_blocking") or (packet is aten.copy_ and True in args[2:]))
        kinds: dict[tuple[str, str], Kind] = {("meta", "cpu"): "read", ("cpu", "meta"): "upload"}
        return kinds.get(ways) if waits else None
    if packet in ROWS_OF_UNKNOWN_NUMBER and on_device:
        return None if given.get("output_size") is not None else "read"
    if packet in (aten.index, aten.index_put, aten.index_put_):
        is_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return "read" if is_mask else None
    return None


def _bytes(func: Any, args: Any, given: Any, outs: list[Tensor]) -> tuple[int, int]:
    """(bytes read, bytes written) of a kernel that reads each input once."""
    read = written = 0
    packet = func.overloadpacket
    for argument, value in zip(func._schema.arguments, args, strict=False):
        size = sum(_size(x) for x in tree_leaves(value) if isinstance(x, Tensor))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += size * is_written
        read += size * (not is_written or packet not in OVERWRITES)
    for name, value in given.items():
        size = sum(_size(x) for x in tree_leaves(value) if isinstance(x, Tensor))
        written += size * (name == "out")
        read += size * (name != "out")
    if not func._schema.is_mutable:
        written += sum(map(_size, outs))
    if packet in GATHERS:
        read = min(read, written + sum(_size(x) for x in tree_leaves(args[1:]) if _is_tensor(x)))
    return read, written


def _size(x: Tensor) -> int:
    """Bytes of a tensor's distinct elements: an expanded dimension counts once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride or not length else 1
    return size


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _flops(func: Any, args: Any, given: Any, outs: Any) -> tuple[int, int]:
    """(FLOPs of GEMMs, FLOPs of attention) of an operation of torch; causal attention is half."""
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0, 0
    out = outs[0] if len(outs) == 1 else tuple(outs)
    if "attention" not in func.overloadpacket.__name__:
        return int(count(*filter(_is_tensor, args), out_val=out)), 0
    flops = int(count(*args, **given, out_val=out))
    names = [argument.name for argument in func._schema.arguments]
    causal = dict(zip(names, args, strict=False)) | given
    return 0, flops // (2 if causal.get("is_causal") else 1)


def _our_flops(name: str, args: Any) -> tuple[int, int]:
    """The same of an operator of mtcli; documents count as causal rows."""
    if name == "grouped_linear":
        x_NK, weight_EFK = args[:2]
        return 2 * len(x_NK) * x_NK.shape[1] * weight_EFK.shape[1], 0
    if name in ("grouped_outer", "grouped_add_outer"):
        grad_NF, x_ND = args[:2] if name == "grouped_outer" else args[1:3]
        return 2 * grad_NF.numel() * x_ND.shape[1], 0
    if name == "syrk":
        return args[0].numel() * args[0].shape[1], 0
    if name == "fp8_product":
        return 2 * args[0].numel() * len(args[3]), 0
    if name in ("document_flash", "document_flash_backward"):
        q, *_, longest, _, right = args  # or its gradient, of the same size
        gemms = 5 if name.endswith("backward") else 2
        return 0, gemms * 2 * q.numel() * longest // (2 if right == 0 else 1)
    if name in ("flash", "flash_backward"):
        q, k = args[1:3] if name == "flash_backward" else args[:2]
        causal = args[6] if name == "flash_backward" else args[3]
        first = args[7] if name == "flash_backward" else args[4]
        gemms = 5 if name == "flash_backward" else 2
        return 0, gemms * 2 * q.numel() * k.shape[2] // (2 if causal or first is not None else 1)
    return 0, 0
