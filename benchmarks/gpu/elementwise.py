"""Kernels that are bound by memory: each element is read and written once, or a few times."""

import importlib.util
from functools import partial

import torch
import torch.nn.functional as F
from harness import Entry, leaf, seeded

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.vocab_parallel import ChunkedLoss, VocabShard
from mtcli.kernels.attention.softmax import ScoreDropout, masked_softmax, masked_softmax_reference
from mtcli.kernels.cross_entropy import (
    logits_gradient_,
    logits_gradient_reference,
    losses_and_gradient_,
    row_parts,
    row_parts_reference,
)
from mtcli.kernels.dropout import dropout, dropout_reference
from mtcli.kernels.fp8 import (
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    quantize,
    quantize_reference,
)
from mtcli.kernels.gelu import gelu, gelu_backward_, gelu_reference
from mtcli.kernels.norm import add_norm, norm, norm_reference
from mtcli.kernels.random import normal, normal_reference
from mtcli.kernels.rope import rotate, rotate_reference, split_rotated
from mtcli.kernels.split_heads import join_heads
from mtcli.kernels.swiglu import swiglu, swiglu_backward_, swiglu_reference

ROWS = 32768
WIDE = [(ROWS, 768), (ROWS, 4096), (ROWS, 16384)]
BLOCKS = (PER_TENSOR, PER_ROW, BLOCK_1X128, BLOCK_128X128)
EPS, KEY, DROP = 1e-5, 12345678901234567, 0.1


def liger(name):
    """Liger's function of a name, where the package is installed: {} or {"liger": it}."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        "liger": {
            "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
            "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS),
            "swiglu": lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1)),
            "linear_cross_entropy": head_step(
                lambda x, w, labels: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels)[0]
            ),
            "rotate": lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos[:, 0], sin[:, 0]),
        }[name]
    }


def moved(tensors):
    """A function from itemsize and a size of rows and columns to the bytes of so many tensors."""
    return lambda itemsize, rows, columns, *others: tensors * rows * columns * itemsize


def rows_and(vectors, tensors=1):
    """Makes [rows, columns] tensors, and vectors of as many columns."""

    def make(device, dtype, rows, columns):
        wide = [leaf((rows, columns), dtype, device, seed) for seed in range(tensors)]
        return *wide, *(leaf((columns,), dtype, device, 7 + i) for i in range(vectors))

    return make


def rotary(device, dtype, b, s, h, g, d):
    angles = 3.0 * seeded((b, 1, s, d // 2), torch.float32, device, 3)
    angles = torch.cat([angles, angles], -1)
    q, k = (leaf((b, s, n, d), dtype, device, n).transpose(1, 2).detach() for n in (h, g))
    return q.requires_grad_(), k.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)


def packed(device, dtype, b, s, h, g, d):
    _, _, cos, sin = rotary(device, dtype, b, s, h, g, d)
    return leaf((b, s, g, h // g + 2, d), dtype, device), cos, sin


def torch_rotate_packed(qkv, cos, sin):
    q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
    q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
    return *torch_rotate(q, k, cos, sin), v


def logits(device, dtype, rows, columns):
    target = torch.arange(rows, device=device) * 7 % columns
    return 4.0 * seeded((rows, columns), dtype, device), target


def cross_entropy(row_parts, gradient):
    """A whole step of the loss: losses and the gradient of their sum, as the model makes them.

    The logits are copied first, since ours overwrites them: part of both functions' time, and of
    the bytes counted.
    """

    def step(logits_TV, target_T):
        logits_TV, valid = logits_TV.clone(), logits_TV.shape[1]
        top, sums, at_target = row_parts(logits_TV, target_T, valid)
        lse = top + sums.log()
        return lse - at_target, gradient(logits_TV, lse, target_T, torch.ones_like(lse), valid)

    return step


def one_launch(logits_TV, target_T):
    """`cross_entropy` as one rank computes it."""
    logits_TV, ones_T = logits_TV.clone(), torch.ones(len(logits_TV), device=logits_TV.device)
    losses_T = losses_and_gradient_(logits_TV, target_T, ones_T, logits_TV.shape[1])
    return losses_T, logits_TV


def torch_cross_entropy(logits_TV, target_T):
    logits_TV = logits_TV.detach().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(logits_TV.float(), target_T, reduction="none")
        return losses.detach(), *torch.autograd.grad(losses.sum(), logits_TV)


def head(device, dtype, tokens, hidden, vocabulary):
    """Activations, a table and labels."""
    labels = torch.arange(tokens, device=device) * 7 % vocabulary
    x, table = leaf((tokens, hidden), dtype, device), leaf((vocabulary, hidden), dtype, device, 1)
    return x, table.detach().mul_(0.02).requires_grad_(), labels


def head_step(loss):
    """A loss of a head and its gradients."""

    def step(x, table, labels):
        with torch.enable_grad():
            value = loss(x, table, labels)
            return value.detach(), *torch.autograd.grad(value, (x, table))

    return step


def chunked_loss(x, table, labels):
    axis = make_groups(ParallelLayout(1), 0, x.device).tp
    shard = VocabShard(0, len(table), axis)
    return ChunkedLoss.apply(x, labels, None, table, None, shard, 1.0 / len(x))[1]


def torch_loss(x, table, labels):
    return F.cross_entropy(F.linear(x, table).float(), labels)


def torch_rotate(q, k, cos, sin):
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)


def gates(device, dtype, rows, width):
    """Gate and up side by side."""
    return (leaf((rows, 2 * width), dtype, device),)


def gated(device, dtype, rows, width):
    """The gradient of a SwiGLU twice, as ours overwrites it, and what it is of."""
    grad = leaf((rows, width), dtype, device, 1).detach()
    return grad.clone(), grad, leaf((rows, 2 * width), dtype, device).detach()


def biased(device, dtype, rows, width):
    """The gradient of a GELU twice, as ours overwrites it, and what it is of."""
    grad = leaf((rows, width), dtype, device, 1).detach()
    x, bias = (leaf(shape, dtype, device).detach() for shape in ((rows, width), (width,)))
    return grad.clone(), grad, x, bias


def torch_gelu_backward(mine, grad, x, bias):
    whole = x + bias
    of_x = torch.ops.aten.gelu_backward(grad, whole, approximate="tanh")
    return of_x, of_x.sum(0), F.gelu(whole, approximate="tanh")


def torch_swiglu_backward(mine, grad, gate_up):
    gate, up = gate_up.chunk(2, -1)
    silu = torch.nn.functional.silu(gate)
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat([of_gate, grad * silu], -1), silu * up


def added(reference):
    def function(x, y, *weights):
        return x + y, reference(x + y, *weights)

    return function


def add_layer_norm(x, y, weight, bias, y_bias):
    return add_norm(x, y, weight, bias, y_bias=y_bias, **LAYER)


def torch_add_layer_norm(x, y, weight, bias, y_bias):
    return added(layer)(x, y + y_bias, weight, bias)


def of_heads(device, dtype, b, s, h, g, d):
    """Gradients of queries, keys and values, laid out by token."""
    return tuple(
        seeded((b, s, n, d), dtype, device, i).transpose(1, 2) for i, n in enumerate((h, g, g))
    )


def torch_join_heads(of_q, of_k, of_v):
    q, k, v = (x.transpose(1, 2) for x in (of_q, of_k, of_v))
    joined = torch.cat([q.unflatten(2, (k.shape[2], -1)), k[:, :, :, None], v[:, :, :, None]], 3)
    return joined, joined.flatten(0, 1).flatten(1).sum(0)


LAYER, RMS = {"eps": EPS, "centred": True}, {"eps": EPS, "centred": False}
layer, rms = partial(norm_reference, **LAYER), partial(norm_reference, **RMS)

CHOSEN = {"chosen": ("torch",)}


def operand(device, dtype, rows, columns, block, transposed):
    """[rows, columns] to be quantized in e4m3, or its transpose, by the number of a block."""
    x = seeded((rows, columns), dtype, device)
    return x.T if transposed else x, BLOCKS[block], torch.float8_e4m3fn


def with_dropout(softmax):
    """softmax(scores, mask) with dropout by the queries' token numbers."""

    def dropped(scores, mask, numbers):
        return softmax(scores, mask, ScoreDropout(numbers, scores.shape[1], 0, KEY, DROP))

    return dropped


# fmt: off
ENTRIES = [
    Entry("rms_norm", partial(norm, **RMS), {"torch": rms, **liger("rms_norm")},
        rows_and(1), WIDE, (5, 22), moved(2), moved(3), **CHOSEN),
    Entry("layer_norm", partial(norm, **LAYER), {"torch": layer, **liger("layer_norm")},
        rows_and(2), WIDE, (5, 22), moved(2), moved(3), **CHOSEN),
    Entry("add_rms_norm", partial(add_norm, **RMS), {"torch": added(rms)},
        rows_and(1, tensors=2), WIDE, (5, 4096), moved(4), moved(4)),
    Entry("add_layer_norm", add_layer_norm, {"torch": torch_add_layer_norm},
        rows_and(3, tensors=2), WIDE, (5, 4096), moved(4), moved(4)),
    Entry("gelu", lambda x, b: gelu(x, b), {"torch": lambda x, b: gelu_reference(x, b)},
        rows_and(1), WIDE, (5, 22), moved(2), moved(3)),
    Entry("gelu_tanh", lambda x, b: gelu(x, b, "tanh"),
        {"torch": lambda x, b: gelu_reference(x, b, "tanh")},
        rows_and(1), WIDE, (5, 4096), moved(2), moved(3)),
    Entry("gelu_again", lambda mine, grad, x, b: gelu_backward_(mine, x, b, "tanh"),
        {"torch": torch_gelu_backward}, biased, [(ROWS, 4096), (ROWS, 16384)], (5, 22), moved(4)),
    Entry("swiglu", swiglu, {"torch": swiglu_reference, **liger("swiglu")},
        gates, [(ROWS, 768), (ROWS, 5632), (ROWS, 14336)], (5, 22), moved(3), moved(5)),
    Entry("swiglu_again", lambda mine, grad, gate_up: swiglu_backward_(mine, gate_up),
        {"torch": torch_swiglu_backward}, gated, [(ROWS, 5632), (ROWS, 14336)], (5, 22), moved(6)),
    Entry("dropout_add",
        lambda y, x, numbers: dropout(y, numbers, KEY, DROP, onto=x),
        {"torch": lambda y, x, numbers: x + dropout_reference(y, numbers, KEY, DROP)},
        lambda device, dtype, rows, width: (
            leaf((rows, width), dtype, device), leaf((rows, width), dtype, device, 1),
            torch.arange(rows, device=device)),
        WIDE[:2], (5, 22), moved(3), moved(2)),
    Entry("rotate", rotate, {"torch": torch_rotate, **liger("rotate")}, rotary,
        [(8, 4096, 32, 8, 128), (32, 1024, 12, 12, 64)], (2, 3, 4, 2, 8),
        lambda itemsize, b, s, h, g, d: 2 * b * s * (h + g + 1) * d * itemsize,
        lambda itemsize, b, s, h, g, d: 2 * b * s * (h + g + 1) * d * itemsize),
    Entry("rotate_packed", split_rotated, {"torch": torch_rotate_packed}, packed,
        [(8, 4096, 32, 8, 128)], (2, 3, 4, 2, 8),
        lambda itemsize, b, s, h, g, d: 2 * b * s * (h + g + 1) * d * itemsize,
        lambda itemsize, b, s, h, g, d: 2 * b * s * (h + 2 * g + 1) * d * itemsize),
    Entry("join_heads", lambda *grads: join_heads(*grads, True), {"torch": torch_join_heads},
        of_heads, [(32, 1024, 12, 12, 64)], (2, 3, 4, 2, 8),
        lambda itemsize, b, s, h, g, d: 2 * b * s * (h + 2 * g) * d * itemsize),
    Entry("masked_softmax", with_dropout(masked_softmax),
        {"torch": with_dropout(masked_softmax_reference)},
        lambda device, dtype, b, h, n: (
            leaf((b, h, n, n), dtype, device),
            torch.ones(1, 1, n, n, dtype=torch.bool, device=device).tril(),
            torch.arange(b * n, device=device).view(b, n)),
        [(8, 12, 1024), (1, 16, 4096)], (2, 2, 9),
        lambda itemsize, b, h, n: 2 * b * h * n * n * itemsize,
        lambda itemsize, b, h, n: 3 * b * h * n * n * itemsize,
        **CHOSEN),
    Entry("cross_entropy", one_launch,
        {"torch": torch_cross_entropy,
         "two launches": cross_entropy(row_parts, logits_gradient_),
         "reference": cross_entropy(row_parts_reference, logits_gradient_reference)},
        logits, [(8192, 50304), (8192, 128256)], (5, 33), moved(4),
        torch_compiles="reference"),
    Entry("linear_cross_entropy", head_step(chunked_loss),
        {"torch": head_step(torch_loss), **liger("linear_cross_entropy")},
        head, [(8192, 4096, 128256), (32768, 768, 50304)], (8, 6, 101),
        forward_flops=lambda T, D, V: 6 * T * D * V),
    Entry("fp8_quantize", lambda *given: quantize(*given)[:2], {"torch": quantize_reference},
        operand, [(ROWS, 4096, block, transposed) for block in range(4) for transposed in (0, 1)],
        (5, 22, 1, 1), lambda itemsize, rows, columns, *_: (itemsize + 1) * rows * columns),
    Entry("normal", partial(normal, KEY, 5),
        {"torch": partial(normal_reference, KEY, 5),
         "randn": lambda count, device: torch.randn(count, device=device)},
        lambda device, dtype, count: (count, device),
        [(2**28,)], (40,), lambda itemsize, count: 4 * count, torch_compiles=""),
]
