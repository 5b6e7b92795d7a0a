"""Allocates, next to fake tensors, what a CPU's kernels allocate besides their results.

Fake kernels allocate results alone. On a CPU some real ones take more memory while they run:

- pointwise kernels cast floating-point operands of other dtypes to the widest of them, whole
  (TensorIterator::compute_types): adding bfloat16 [N] to float32 [N] takes 4 N bytes. A narrower
  output is computed in a temporary of the widest dtype;
- oneDNN's GEMMs copy blocks of an operand to the order in which they are multiplied;
- mtcli's own operators run in plain torch, whose intermediate results take memory;
- gloo copies the output of an all-gather and the input of a reduce-scatter, which FSDP2 uses.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mtcli.core.rehearse.live_memory import Mode

aten = torch.ops.aten
GEMMS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm}


class CpuKernels(Mode):
    """Has each operation allocate a CPU kernel's temporaries, for a mode below that counts them."""

    def __init__(self, threads: int, onednn: Collection[torch.dtype]) -> None:
        """`threads` of a rank multiply; oneDNN does so for the dtypes `onednn`."""
        super().__init__()
        self.threads, self.onednn = threads, onednn

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation while its temporaries are alive."""
        given = dict(kwargs or {})
        if func.namespace == "mtcli":
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **given)
        temporaries = casts(func, args, given)
        if func.overloadpacket in GEMMS and args[-1].dtype in self.onednn:
            temporaries += panels(args[-2], args[-1], self.threads)
        result = func(*args, **given)
        del temporaries
        return result


def casts(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> list[Tensor]:
    """Allocates the casts of a pointwise operation's operands, and of a narrower output."""
    if torch.Tag.pointwise not in func.tags:
        return []
    tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
    operands = [x for x in tensors if x.is_floating_point()]
    if len({x.dtype for x in operands}) < 2:
        return []
    # A tensor without dimensions does not widen others.
    dtypes = [x.dtype for x in operands if x.dim()] or [x.dtype for x in operands]
    wide = reduce(torch.promote_types, dtypes)
    cast = [x for x in operands if x.dtype != wide]
    if func._schema.is_mutable and args[0].dtype != wide:  # read in one temporary, then written
        cast.append(args[0])
    return [torch.empty_like(x, dtype=wide) for x in cast]


def panels(a: Tensor, b: Tensor, threads: int) -> list[Tensor]:
    """Allocates what oneDNN's GEMM of a [..., M, K] and b [..., K, N] takes besides its result.

    An operand with gaps is copied to a contiguous one. A thread then has blocks, of M / ceil(M /
    256) rows and 64 columns: of a if it is transposed, of b if it is transposed or in 16 bits, and
    in 16 bits of the float32 sums. A block is 512 products deep at most; of b 1024 where K is
    larger. These are oneDNN 3.12's on AMD's AVX-512, up to a few KiB of padding.
    """
    copies = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (a, b)
        if not _has_no_gaps(x)
    ]
    a_flips, b_flips = (_has_no_gaps(x) and not x.is_contiguous() for x in (a, b))
    (m, k), n, size = a.shape[-2:], b.shape[-1], a.itemsize
    rows, depth, halves = -(-m // max(1, -(-m // 256))), min(k, 512), size < 4
    elements_of_a = rows * depth * a_flips
    elements_of_b = 64 * (1024 if k > 1024 else depth) * (b_flips or halves)
    sums = rows * (n if a_flips and k > 512 else min(n, 64)) * halves
    taken = (elements_of_a + elements_of_b) * size + sums * 4
    return [*copies, a.new_empty(threads * taken, dtype=torch.uint8)]


def _has_no_gaps(x: Tensor) -> bool:
    """Whether x is contiguous, or is so when its last two dimensions are swapped."""
    return x.is_contiguous() or x.mT.is_contiguous()


def copying(collective: Callable[..., Any], copied: int) -> Callable[..., Any]:
    """Wraps a collective of FSDP2 to allocate the copy that gloo makes of its tensor `copied`, the
    output (0) or the input (1)."""

    def call(fsdp: Any, *tensors: Any, **given: Any) -> Any:
        copy = torch.empty_like(tensors[copied])
        work = collective(fsdp, *tensors, **given)
        del copy
        return work

    return call
