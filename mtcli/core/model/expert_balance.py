"""Expert load balancing without auxiliary loss (arXiv:2408.15664; arXiv:2412.19437, section 2.1.2).

After each step the bias of an expert with more than the mean load of the global batch falls by a
fixed rate, and that of one with less rises. No gradient is involved. E experts, L layers.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.router import Router
from mtcli.core.model.router_figures import summed_figures
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups


class ExpertBalance:
    """The statistics and biases of this rank's routers; biases stay at a rate of 0.

    `tokens` are the axes over which ranks have different tokens of the same layers.
    """

    def __init__(
        self, stages: Iterable[nn.Module], rate: float, groups: Groups, tokens: Iterable[Axis]
    ) -> None:
        modules = [module for stage in stages for module in stage.modules()]
        self.routers = [module for module in modules if isinstance(module, Router)]
        self.rate, self.groups, self.tokens = rate, groups, tuple(tokens)

    def begin(self) -> None:
        """Zeroes the statistics, at the start of a step."""
        for router in self.routers:
            router.statistics.zero_()

    def statistics(self, model: ModelConfig) -> Tensor:
        """This rank's part of the statistics of a model's layers of experts [L, E + figures], which
        `router_figures` reads once all ranks' are summed; no two ranks route the same tokens."""
        layers = model.num_layers - model.first_dense_layers
        size = model.num_experts + len(summed_figures(model))
        sums_LS = torch.zeros(layers, size, dtype=torch.float64, device=self.groups.device)
        for router in self.routers:
            sums_LS[router.layer - model.first_dense_layers] = router.statistics
        return sums_LS

    @torch.no_grad()
    def move_biases(self) -> float | None:
        """b_e += rate * sign(mean load - load_e) in every layer, by the global batch's loads.

        Returns the largest load of an expert over the mean one, in the worst layer of the model.
        """
        if not self.rate:
            return None
        worst = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        if self.routers:
            loads_LE = torch.stack([router.load_E for router in self.routers])
            for axis in self.tokens:
                loads_LE = all_reduce(loads_LE, axis)
            worst = (loads_LE.amax(1) / loads_LE.mean(1)).max()
            # Whole numbers: the mean load need not be one, and no order of sums changes them.
            excess_LE = loads_LE * loads_LE.shape[1] - loads_LE.sum(1, keepdim=True)
            for router, excess_E in zip(self.routers, excess_LE, strict=True):
                assert router.bias is not None, f"rate={self.rate} of a router without biases"
                if router.moves:
                    router.bias.sub_(excess_E.sign().to(router.bias), alpha=self.rate)
        return float(all_reduce(worst, self.groups.axes["pp_forward"], dist.ReduceOp.MAX))
