"""Newton-Schulz iterations, which bring the singular values of a matrix near 1 (Muon).

Each multiplies X by a polynomial of X X^T: X = a X + (b G + c G G) X with G = X X^T, after X is
divided by its Frobenius norm. Of the two symmetric GEMMs a kernel computes a half. Products are
fused as in torch.optim.Muon, so that bfloat16 rounds alike.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mtcli.core.config.schema import OptimizerConfig
from mtcli.kernels.syrk import syrk

Triple = tuple[float, float, float]
# By name: a factor of the norm that X is divided by, and the polynomials in turn; the last is
# repeated. Jordan's is of https://kellerjordan.github.io/posts/muon, quintic5 of Dion and
# Megatron-LM, Polar Express of arXiv:2505.16932.
POLYNOMIALS: dict[str, tuple[float, tuple[Triple, ...]]] = {
    "jordan": (1.0, ((3.4445, -4.7750, 2.0315),)),
    "quintic5": (
        1.0,
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ),
    "polar_express": (
        1.02,
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
}


def orthogonalised(stack_SMN: Tensor, optimizer: OptimizerConfig) -> Tensor:
    """Matrices [S, M, N], in the dtype to compute in -> the same singular vectors, with singular
    values near 1.

    A matrix of zeros stays so. The stack is overwritten.
    """
    is_tall = stack_SMN.shape[-2] > stack_SMN.shape[-1]
    x = stack_SMN.mT if is_tall else stack_SMN
    safety, polynomials = _polynomials(optimizer)
    norm = x.norm(dim=(-2, -1), keepdim=True) * safety
    x.div_(norm.clamp_(min=torch.finfo(x.dtype).tiny))
    for a, b, c in _each(polynomials, optimizer.ns_steps):
        gram = syrk(x)
        x = torch.baddbmm(x, syrk(gram, c, gram, b), x, beta=a)
    return x.mT if is_tall else x


def _polynomials(optimizer: OptimizerConfig) -> tuple[float, tuple[Triple, ...]]:
    given = optimizer.ns_coefficients
    return POLYNOMIALS[given] if isinstance(given, str) else (1.0, (given,))


def _each(polynomials: tuple[Triple, ...], steps: int) -> Iterator[Triple]:
    for step in range(steps):
        yield polynomials[min(step, len(polynomials) - 1)]
