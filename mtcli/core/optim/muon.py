"""Muon (https://kellerjordan.github.io/posts/muon; arXiv:2502.16982): momentum, orthogonalised.

The momentum is the mean of gradients, m = m + (1 - momentum) (g - m), and with Nesterov's the step
is of g + momentum (m - g). The step of each matrix is brought near the orthogonal matrix of its
singular vectors (`newton_schulz.py`), and x = x (1 - lr decay) - lr scale step. A matrix is whole
when it is orthogonalised, as its singular vectors are of no part of it: one rank gathers it
(`parallel/matrix_exchange.py`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mtcli.core.mesh.matrices import step_scale
from mtcli.core.optim.update_rule import UpdateRule
from mtcli.core.parallel.matrix_exchange import MatrixExchange, MatrixUpdate, Stacks
from mtcli.kernels.multi_tensor import OptimizerStep


class Muon(UpdateRule):
    """The update rule of Muon for a rank's shards. A step is collective."""

    has_kernels = False

    @cached_property
    def exchanges(self) -> list[MatrixExchange]:
        """The exchange of matrices that tp and data ranks share, and that of experts' matrices."""
        ownership, split = self.ownership, self.config.muon_split_heads
        axes = ownership.groups.axes
        experts = {name for name in self.stage_names if ownership.table[name].is_expert}
        dense = [name for name in self.stage_names if name not in experts]
        sharing = ((dense, axes["tokens"]), (sorted(experts), axes["expert_copies"]))
        return [
            MatrixExchange(names, ownership, axis._replace(name="matrices"), split)
            for names, axis in sharing
            if names
        ]

    @cached_property
    def like(self) -> Tensor:
        """An empty tensor of the dtype that matrices are orthogonalised in: bfloat16 on a GPU,
        float64 of float64 masters."""
        device = self.ownership.groups.device
        narrow = device.type == "cuda" and self.dtype == torch.float32
        return torch.empty(0, dtype=torch.bfloat16 if narrow else self.dtype, device=device)

    def update_(self, gradients: Sequence[Tensor], update: OptimizerStep) -> MatrixUpdate:
        """Updates in place, and overwrites the gradients with the steps, once the matrices that it
        yields are orthogonalised and sent back."""
        tensors, c = self.tensors, self.config
        steps, momenta, masters = list(gradients), list(tensors.exp_avgs), list(tensors.masters)
        means = steps  # by which matrices step
        # torch takes no empty list
        if masters and momenta[0].dtype == steps[0].dtype == masters[0].dtype:
            torch._foreach_lerp_(momenta, steps, 1.0 - c.momentum)
            if c.nesterov:
                torch._foreach_lerp_(steps, momenta, c.momentum)
            else:
                means = momenta
        else:  # one wide momentum at a time
            for momentum, step in zip(momenta, steps, strict=True):
                gradient = self.widened(step, update)
                wide = momentum.to(gradient.dtype).lerp_(gradient, 1.0 - c.momentum)
                momentum.copy_(wide)
                step.copy_(gradient.lerp_(wide, c.momentum if c.nesterov else 1.0))
        sources = dict(zip(self.names, means, strict=True))
        targets = dict(zip(self.names, steps, strict=True))
        for exchange in self.exchanges:
            yield from exchange.stacks(sources, targets, self.like)
            if exchange.local:
                views = [location.view(targets) for location, _ in exchange.local]
                scales = [step_scale(*shape, c.scale) for _, shape in exchange.local]
                torch._foreach_mul_(views, scales)
        if decaying := [x for x, decays in zip(masters, tensors.decays, strict=True) if decays]:
            torch._foreach_mul_(decaying, 1.0 - update.lr * update.decay)
        if masters:
            torch._foreach_add_(masters, steps, alpha=-update.lr)
        tensors.round_()


def orthogonalise_together(
    updates: Sequence[MatrixUpdate], orthogonalise: Callable[[Tensor], Tensor]
) -> None:
    """Runs the updates of one model, or of several as one: matrices of equal shapes are one
    stack [S, M, N], which `orthogonalise` may overwrite."""
    waiting = [
        (update, stacks) for update in updates if (stacks := _next(update, None)) is not None
    ]
    while waiting:
        results: list[Stacks] = [{} for _ in waiting]
        for shape in dict.fromkeys(shape for _, stacks in waiting for shape in stacks):
            having = [n for n, (_, stacks) in enumerate(waiting) if shape in stacks]
            parts = [waiting[n][1].pop(shape) for n in having]
            sizes = [len(part) for part in parts]
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            del parts
            for n, result in zip(having, orthogonalise(joined).split(sizes), strict=True):
                results[n][shape] = result
        sent = zip(waiting, results, strict=True)
        waiting = [
            (update, stacks)
            for (update, _), result in sent
            if (stacks := _next(update, result)) is not None
        ]


def _next(update: MatrixUpdate, results: Stacks | None) -> Stacks | None:
    """The next stacks of an update, which is sent the results of the last; None at its end."""
    try:
        return update.send(results)
    except StopIteration:
        return None
