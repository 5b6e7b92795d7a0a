"""The optimizer's step: in place, so that each function has a copy of everything."""

import torch
from harness import Entry, seeded

from mtcli.kernels.adamw import adamw_, adamw_reference_
from mtcli.kernels.lamb import (
    lamb_moments_,
    lamb_moments_reference_,
    lamb_step_,
    lamb_step_reference_,
    trust_ratios,
)
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors, tensor_table
from mtcli.kernels.onebit import (
    add_,
    add_reference_,
    pack_,
    pack_reference_,
    unpack,
    unpack_reference,
)
from mtcli.kernels.syrk import syrk, syrk_reference

UPDATE = OptimizerStep(1e-4, (0.9, 0.95), 1e-8, 0.1, count=3)
BOUNDS = (0.01, 10.0)  # of LAMB's trust ratios


def optimizers(device, dtype, tensors, numel):
    """(our parts, packed; torch's parts; the reference's; gradients in float32)."""

    def made(seed):
        return [seeded((numel + i,), torch.float32, device, seed + i) for i in range(tensors)]

    def parts():
        masters, squares = made(0), [x.square_() for x in made(200)]
        weights = masters if dtype == torch.float32 else [x.to(dtype) for x in masters]
        return OptimizerTensors(
            masters, made(100), squares, weights, [i % 2 == 0 for i in range(tensors)]
        )

    ours = parts()
    return ours, tensor_table(ours), parts(), parts(), made(300)


def by_ours(ours, packed, theirs, plain, gradients):
    adamw_(packed, ours, gradients, UPDATE)
    return ours.masters


def by_reference(ours, packed, theirs, plain, gradients):
    adamw_reference_(plain, gradients, UPDATE)
    return plain.masters


def by_torch(ours, packed, theirs, plain, gradients):
    """torch's fused kernel for each decay, and the rounding."""
    for decays in (True, False):
        at = [i for i, flag in enumerate(theirs.decays) if flag == decays]
        masters, m, v = ([kind[i] for i in at] for kind in theirs[:3])
        count = torch.tensor(float(UPDATE.count), device=masters[0].device)
        torch._fused_adamw_(
            masters, [gradients[i] for i in at], m, v, [], [count] * len(at), lr=UPDATE.lr,
            beta1=UPDATE.betas[0], beta2=UPDATE.betas[1], weight_decay=UPDATE.decay * decays,
            eps=UPDATE.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    if theirs.weights is not theirs.masters:
        torch._foreach_copy_(theirs.weights, theirs.masters)
    return theirs.masters


def lamb(ours, packed, theirs, plain, gradients):
    ratios = trust_ratios(lamb_moments_(packed, ours, gradients, UPDATE), BOUNDS)
    lamb_step_(packed, ours, ratios, UPDATE)
    return [ratios, *ours.masters]


def torch_lamb(ours, packed, theirs, plain, gradients):
    ratios = trust_ratios(lamb_moments_reference_(theirs, gradients, UPDATE), BOUNDS)
    lamb_step_reference_(theirs, ratios, UPDATE)
    return [ratios.float(), *theirs.masters]


def momentum(device, dtype, size):
    """A momentum, and two copies of the error of its last compression."""
    x, error = (seeded((size,), torch.float32, device, seed) for seed in (1, 2))
    return x, error, error.clone()


def compress(x, error, other):
    scale = (add_(x, error) / len(x)).sqrt()
    return pack_(error, scale), scale


def torch_compress(x, error, other):
    scale = (add_reference_(x, other) / len(x)).sqrt()
    return pack_reference_(other, scale), scale


def signs(device, dtype, size):
    x, error, other = momentum(device, dtype, size)
    return *torch_compress(x, error, other), size


def matrices(device, dtype, count, rows, inner):
    return (seeded((count, rows, inner), dtype, device),)


# fmt: off
ENTRIES = [
    Entry("syrk", syrk, {"torch": syrk_reference}, matrices,
        [(8, 1024, 4096), (8, 4096, 4096), (4, 4096, 14336)], (2, 70, 9),
        forward_flops=lambda count, rows, inner: count * rows * rows * inner,
        chosen=("torch",), magnitudes=lambda count, rows, inner: (rows,)),
    Entry("adamw", by_ours, {"torch": by_torch, "reference": by_reference}, optimizers,
        [(64, 2**22), (400, 2**18)], (2, 70),
        lambda itemsize, tensors, numel: (24 + 4 + itemsize) * tensors * numel, torch_compiles=""),
    Entry("lamb", lamb, {"torch": torch_lamb}, optimizers, [(64, 2**22), (400, 2**18)], (2, 70),
        lambda itemsize, tensors, numel: (36 + 4 + itemsize) * tensors * numel, torch_compiles=""),
    Entry("compress", compress, {"torch": torch_compress}, momentum,
        [(2**28,)], (70,), lambda itemsize, size: 20 * size, torch_compiles=""),
    Entry("decompress", unpack, {"torch": unpack_reference}, signs,
        [(2**28,)], (70,), lambda itemsize, size: 4 * size, torch_compiles=""),
]
