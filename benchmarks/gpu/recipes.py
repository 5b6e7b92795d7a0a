"""What compile.py compiles: every entry of the benchmark, at the sizes by which its kernels differ.

Nothing is computed, so tensors have few rows: a kernel is the same for any number of them. Cases
that no benchmark measures stand at the end.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import elementwise
import mixture
import scores
import torch
import updates
from harness import Entry, leaf

from mtcli.kernels.attention.flash_forward import flash
from mtcli.kernels.attention.softmax import masked_softmax
from mtcli.kernels.cross_entropy import logits_gradient_, losses_and_gradient_, row_parts
from mtcli.kernels.permute import sort_copies
from mtcli.kernels.relu2 import relu2, relu2_backward_
from mtcli.kernels.swiglu import swiglu, swiglu_backward_
from mtcli.kernels.syrk import syrk
from mtcli.kernels.top_k import TopKRouting, route

HEADS = (16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256)
WIDTHS = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384)
VOCABULARIES = (50257, 128256)
EXPERTS = ((8, 2), (16, 4), (60, 4), (64, 6), (128, 8), (256, 8))
FLOAT8 = 89  # the first compute capability with float8, times 10
Size = tuple[int, ...]


class Shapes(NamedTuple):
    """`label` are the sizes of a benchmark by which kernels differ, `small` a size of the same."""

    label: Callable[..., Size]
    small: Callable[..., Size]
    more: tuple[Size, ...] = ()  # labels that no benchmark has


class Case(NamedTuple):
    """An entry at one size, such as "flash 128"; `sizes` are those of the benchmark it stands for.

    Of 16-bit dtypes an entry takes any, and of float32 alone that one.
    """

    entry: Entry
    small: Size
    sizes: tuple[Size, ...]

    def dtypes(self, asked: list[torch.dtype]) -> list[torch.dtype]:
        """Those of `asked`, or what the entry is for."""
        return asked if torch.bfloat16 in self.entry.dtypes else list(self.entry.dtypes)

    def runs_on(self, arch: int) -> bool:
        """Whether GPUs of a compute capability have what it computes with."""
        return arch >= FLOAT8 or not self.entry.name.startswith("fp8")


def last(*more: int) -> Shapes:
    """64 rows of the last size."""
    return Shapes(lambda *size: size[-1:], lambda width: (64, width), tuple((n,) for n in more))


def experts_and_k(*more: Size) -> Shapes:
    return Shapes(lambda *size: size[-2:], lambda e, k: (64, e, k), more)


def shrunk(size: int) -> int:
    """A small size with the remainder of a large one: it is as (un)aligned."""
    return 256 + size % 256


HEAD = Shapes(
    lambda b, h, g, n, d: (d,), lambda d: (1, 8, 2, 256, d), tuple((d,) for d in HEADS)
)  # fmt: skip
BLOCK = Shapes(  # of a ring: as many keys as queries are causal, half of them are seen whole
    lambda b, h, g, n, m, d: (d, n // m), lambda d, part: (1, 8, 2, 256, 256 // part, d)
)
ANY = Shapes(lambda *size: (), lambda: (4096,))
OPTIMIZER = Shapes(lambda *size: (), lambda: (2, 4096))
SHAPES = {
    "flash": HEAD,
    "flash_documents": HEAD._replace(more=((64,), (128,))),
    "ring_of_4": HEAD._replace(more=()),
    "attention": BLOCK,
    "attention_backward": BLOCK,
    "merge": Shapes(lambda b, h, n, d: (d,), lambda d: (1, 8, 64, d)),
    "rms_norm": last(*WIDTHS),
    "layer_norm": last(*WIDTHS),
    "add_rms_norm": last(*WIDTHS),
    "add_layer_norm": last(*WIDTHS),
    "gelu": last(3072, 6400),
    "gelu_tanh": last(3072),
    "gelu_again": last(3072),
    "swiglu": last(768, 28672),
    "swiglu_again": last(768, 28672),
    "dropout_add": last(1600),
    "rotate": Shapes(
        lambda b, s, h, g, d: (h, g, d), lambda h, g, d: (2, 64, h, g, d), ((16, 16, 72),)
    ),
    "rotate_packed": Shapes(
        lambda b, s, h, g, d: (h, g, d), lambda h, g, d: (2, 64, h, g, d), ((16, 16, 72),)
    ),
    "join_heads": Shapes(
        lambda b, s, h, g, d: (h, g, d),
        lambda h, g, d: (2, 64, h, g, d),
        ((16, 16, 128), (8, 2, 72)),
    ),
    "masked_softmax": Shapes(lambda b, h, n: (n,), lambda n: (1, 2, n)),
    "cross_entropy": last(),
    "linear_cross_entropy": Shapes(lambda t, d, v: (v,), lambda v: (64, 64, v)),
    "fp8_quantize": Shapes(
        lambda rows, columns, block, transposed: (block, transposed),
        lambda block, transposed: (128, 4096, block, transposed),
    ),
    "normal": ANY,
    "route": experts_and_k(*EXPERTS),
    "sort_copies": experts_and_k(*EXPERTS),
    "permute": Shapes(
        lambda t, width, e, k: (width, e, k), lambda *label: (64, *label), ((768, 60, 4),)
    ),
    "unpermute": Shapes(
        lambda t, width, e, k: (width, e, k), lambda *label: (64, *label), ((768, 60, 4),)
    ),
    "grouped_linear": Shapes(
        lambda *size: size,
        lambda e, each, inner, width: (e, min(each, 1024), shrunk(inner), shrunk(width)),
        # Multiples of 8, of 2, and odd numbers.
        ((6, 1024, 2056, 1400), (6, 1024, 2052, 1402), (6, 1024, 2057, 1401)),
    ),
    "syrk": Shapes(
        lambda count, rows, inner: (rows, inner),
        lambda rows, inner: (1, rows, inner),
        ((770, 65),),
    ),
    "adamw": OPTIMIZER,
    "lamb": OPTIMIZER,
    "compress": ANY,
    "decompress": ANY,
    # Not measured.
    "cross_entropy_padded": last(*VOCABULARIES),
    "cross_entropy_capped": last(256000),
    "flash_capped": HEAD,
    "softmax_of_all": Shapes(tuple, lambda n: (1, 2, n), ((1024,),)),
    "geglu": last(768, 9216, 14336),
    "geglu_tanh": last(768, 9216, 14336),
    "geglu_again": last(768, 9216, 14336),
    "grouped_outer": Shapes(
        lambda *size: size,
        lambda e, each, inner, width: (e, min(each, 1024), shrunk(inner), shrunk(width)),
        ((8, 8192, 4096, 28672), (128, 2048, 2048, 1536), (6, 1024, 2056, 1400)),
    ),
    "relu2": last(9216, 24576),
    "relu2_again": last(9216, 24576),
    "route_groups": experts_and_k((64, 6), (256, 8)),
    "sort_with_capacity": experts_and_k((8, 2)),
    "syrk_tall": Shapes(tuple, lambda *size: (1, *size), ((14336, 4096),)),
}


def padded(device, dtype, rows, valid):
    """Logits of a vocabulary that is padded to a multiple of 128, as the model's shards are."""
    logits, target = elementwise.logits(device, dtype, rows, -(-valid // 128) * 128)
    return logits, target % valid, valid


def padded_cross_entropy(logits, target, valid, cap=0.0):
    """In one launch, and in two."""
    top, sums, _ = row_parts(logits, target, valid, cap)
    losses_and_gradient_(logits, target, torch.ones_like(top), valid, cap)
    return logits_gradient_(logits, top + sums.log(), target, torch.ones_like(top), valid, cap)


def capped_flash(q, k, v):
    return flash(q, k, v, True, None, None, 50.0)[0]


def choose_within_groups(logits, k):
    routing = TopKRouting(k, False, True, groups=8, top_groups=4)
    return route(logits, torch.zeros(logits.shape[1]), routing)[:2]


def sort_with_capacity(x, experts, num_experts):
    kept = torch.ones_like(experts, dtype=torch.bool)
    copies = sort_copies(x, experts, kept, num_experts, 64)
    return copies.counts, copies.places


def scores_of_all(device, dtype, b, h, n):
    return leaf((b, h, n, n), dtype, device), None, torch.arange(b * n).view(b, n)


def geglu_again(mine, grad, gate_up):
    return swiglu_backward_(mine, gate_up, "gelu")


def rows_and_sums(device, dtype, num_experts, each, inner, width):
    """Sums [O, R, D] of two owners, the gradient, the input, and the ends of experts' rows."""
    x, _, counts = mixture.ragged(device, dtype, num_experts, each, inner, width)
    sums = torch.zeros(2, num_experts * width // 2, inner, device=device)
    ends = counts.cumsum(0, dtype=torch.int32)
    return sums, leaf((len(x), width), dtype, device), x, ends


def add_gradients(sums, grad, x, ends):
    torch.ops.mtcli.grouped_add_outer(sums, grad.detach(), x.detach(), ends, True)
    return sums


def relu2_again(mine, grad, x, bias):
    return relu2_backward_(mine, x, None)


def unmeasured(name: str, ours: Callable[..., Any], make, **passes) -> Entry:
    return Entry(name, ours, {}, make, (), (), **passes)


BACKWARD: dict[str, Any] = {"backward_bytes": lambda itemsize, *size: 0}
MEASURED = [*scores.ENTRIES, *mixture.ENTRIES, *updates.ENTRIES, *elementwise.ENTRIES]
UNMEASURED = [
    unmeasured("cross_entropy_padded", padded_cross_entropy, padded),
    unmeasured("cross_entropy_capped", partial(padded_cross_entropy, cap=30.0), padded),
    unmeasured("flash_capped", capped_flash, scores.heads, **BACKWARD),
    unmeasured(
        "softmax_of_all", elementwise.with_dropout(masked_softmax), scores_of_all, **BACKWARD
    ),
    unmeasured(
        "route_groups", choose_within_groups, mixture.router, dtypes=(torch.float32,), **BACKWARD
    ),
    *(
        unmeasured(name, partial(swiglu, gate=gate), elementwise.gates, **BACKWARD)
        for name, gate in (("geglu", "gelu"), ("geglu_tanh", "gelu_tanh"))
    ),
    unmeasured("geglu_again", geglu_again, elementwise.gated),
    unmeasured("relu2", relu2, elementwise.rows_and(0), **BACKWARD),
    unmeasured("relu2_again", relu2_again, elementwise.biased),
    unmeasured("grouped_outer", add_gradients, rows_and_sums),
    unmeasured("syrk_tall", lambda x: syrk(x.mT), updates.matrices),
    unmeasured("sort_with_capacity", sort_with_capacity, mixture.unsorted),
]


def cases() -> Iterator[tuple[str, Case]]:
    """(name, case) of everything, such as "flash 128"."""
    for entry in (*MEASURED, *UNMEASURED):
        shapes = SHAPES[entry.name]
        labels = dict.fromkeys([*(shapes.label(*size) for size in entry.sizes), *shapes.more])
        for label in labels:
            sizes = tuple(size for size in entry.sizes if shapes.label(*size) == label)
            name = " ".join([entry.name, "x".join(map(str, label))]).strip()
            yield name, Case(entry, shapes.small(*label), sizes)


CASES = dict(cases())
