"""HFTA's operators for Python: B models of one structure as one module, trained as one.

    import mtcli_fused as fused

    model = fused.fuse([Net() for _ in range(8)])       # takes and returns [8, N, ...]
    optimizer = fused.AdamW(model, lr=[1e-3, 3e-4, ...])
    fused.cross_entropy(model(x), y).sum().backward()
    optimizer.step(active=fused.finite(model))
    nets = fused.unfuse(model)

docs/concepts/fused.md says what runs and what is refused.
"""

from mtcli_fused.fusing import fuse, unfuse
from mtcli_fused.gradients import clip_grad_norm_, finite, grad_norms
from mtcli_fused.losses import cross_entropy, losses
from mtcli_fused.model import FusedModels, Shared
from mtcli_fused.optimizers import LAMB, SGD, Adam, AdamW
from mtcli_fused.schedules import cosine_lr, exponential_lr, multi_step_lr, step_lr
from mtcli_fused.verify import verify

__all__ = [
    "LAMB", "SGD", "Adam", "AdamW", "FusedModels", "Shared", "clip_grad_norm_", "cosine_lr",
    "cross_entropy", "exponential_lr", "finite", "fuse", "grad_norms", "losses", "multi_step_lr",
    "step_lr", "unfuse", "verify",
]  # fmt: skip
