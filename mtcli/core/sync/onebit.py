"""1-bit LAMB and 1-bit Adam: after a warm-up, replicas exchange momenta as signs.

In the warm-up gradients are averaged over the replicas, uncompressed, and the update is LAMB's or
AdamW's. Then the variance is frozen. Each replica updates the momentum by its own gradient, and the
momenta are averaged as signs with error feedback (arXiv:2104.06069; arXiv:2102.02888). Weights are
equal on all replicas after every step; error feedback is not.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.config.fields import Count, Section
from mtcli.core.exchange.onebit import ERROR, FRESH, SERVER_ERROR, OneBitFacts
from mtcli.core.optim.frozen import FrozenLamb, frozen_adam_
from mtcli.core.optim.lamb import Lamb
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.ownership import GlobalSums
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.flat import flatten
from mtcli.core.sync.strategy import Strategy
from mtcli.core.sync.two_phase import Chunks, CompressedMean

Numbers = list[Annotated[float, Field(ge=0.0, allow_inf_nan=False)]]

NOISE = 1e-4  # of a parameter's root mean square gradient: below it there is only rounding


class OneBitCounters(Section):
    """The JSON state of a checkpoint. A list has a number per trained parameter of the model."""

    frozen_at: Count = 0
    """the update after which the variance was frozen; 0: it is not"""
    ratio_sum: Numbers
    """running mean of trust ratios in the warm-up, from 0"""
    ratio_weight: Numbers
    """the sum of that mean's weights"""
    factor: Numbers
    """by which the last step multiplied the trust ratio"""
    scale: Numbers
    """by which momenta are multiplied ahead of compression"""
    live: Numbers
    """elements whose frozen variance is not 0"""


class OneBit(ReplicaExchange):
    """Averages gradients over replicas in the warm-up, and signs of momenta after it."""

    facts: OneBitFacts

    ratio_decay = 0.9
    """of the running mean of trust ratios"""
    scales_updates = True
    """whether a scale for each parameter's momentum is fixed when the warm-up ends"""
    keeps_errors = True
    """whether the error of a compression is added to the next momentum"""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: OneBitFacts) -> None:
        super().__init__(inside, optimizer, facts)
        self.frozen_at = 0
        self.moments, ownership = optimizer.moments, inside.ownership
        self.global_sums = GlobalSums(optimizer.masters, ownership)
        self.mean: CompressedMean | None = None
        if ERROR in self.kept:
            self.mean = CompressedMean(optimizer.masters, ownership, self.keeps_errors)
        self.lamb = FrozenLamb(optimizer, self.global_sums) if FRESH in self.kept else None
        self.live: dict[str, Tensor] = {}  # masks of parameters that have elements without variance
        shapes = {name: x.shape for name, x in inside.weights().items()}
        self.gradient_chunks = Chunks(shapes, self.replicas)
        self._reset_counters()

    def rows_here(self, kind: str, name: str) -> slice | None:
        """The rows of the server's error that this replica has: those of its chunk."""
        if kind != SERVER_ERROR or self.mean is None:
            return None
        first, rows = self.inside.ownership.rows(name).start, self.mean.rows[name]
        return slice(first + rows.start, first + rows.stop)

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """The error feedback of replicas and of servers, and LAMB's fresh variance."""
        mean, fresh = self.mean, {FRESH: self.lamb.fresh} if self.lamb else {}
        errors = {ERROR: mean.errors, SERVER_ERROR: mean.server_errors} if mean else {}
        return (errors | fresh)[kind]

    def counters(self) -> dict[str, Any]:
        """The update that froze the variance, and the numbers of each parameter."""
        numbers = {name: x.tolist() for name, x in self.per_parameter.items()}
        return {"frozen_at": self.frozen_at} | numbers

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`; without any, or with another method's, the warm-up begins.

        Raises MtcliError where they are invalid, or of another model.
        """
        self._reset_counters()
        if "frozen_at" not in counters:
            return
        try:
            loaded = OneBitCounters.model_validate(counters)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise wrong(f"the checkpoint's counters of onebit: {where}: {first['msg']}") from None
        for name, numbers in self.per_parameter.items():
            values = getattr(loaded, name)
            if len(values) != len(numbers):
                message = f"the checkpoint has {name} of {len(values)} parameters, not of "
                raise wrong(f"{message}{len(numbers)}", "sync.method as the run had it")
            numbers.copy_(torch.tensor(values, dtype=torch.float64))
        self.frozen_at = loaded.frozen_at
        if self.frozen_at:
            self._find_live()

    def rejoin(self, counters: Mapping[str, Any]) -> str:
        """Starts with zero error feedback, as each replica's was its own."""
        if self.mean:
            self.mean.reset()
        self.load_counters(counters)
        return "the weights, and errors of compression are reset to 0"

    @torch.no_grad()
    def after_backward(self) -> None:
        """Averages gradients over replicas in the warm-up, sent in the weights' dtype.

        float16 weights send bfloat16, which has the range of float32 sums.
        """
        if self.frozen_at or self.replicas.size == 1:
            return
        gradients = self.inside.gradients
        vector = flatten(gradients.values())
        sent = torch.bfloat16 if self.facts.narrow else vector.dtype
        self.gradient_chunks.mean_(vector, sent)
        for name, mean in self.gradient_chunks.views(vector).items():
            gradients[name].copy_(mean)

    @torch.no_grad()
    def update(self, lr: float, factor: float) -> None:
        """Updates the weights, which stay equal on all replicas."""
        if not self.frozen_at:
            super().update(lr, factor)
            self._note_ratios()
            if self.optimizer.updates >= self.facts.warmup:
                self._freeze()
            return
        update = self.optimizer.begin(lr, factor)
        momenta = self._momenta(factor)
        if self.lamb:
            numbers = self.per_parameter
            unseen = numbers["ratio_weight"] == 0
            ratio = torch.where(unseen, 1.0, numbers["ratio_sum"] / numbers["ratio_weight"])
            self.lamb.step_(momenta, update, ratio, numbers["factor"])
        else:
            frozen_adam_(self.optimizer, momenta, update, self.frozen_at)
        self.inside.after_update()

    def _momenta(self, factor: float) -> dict[str, Tensor]:
        """The mean over replicas of the momenta, each updated by its replica's gradient."""
        if self.mean is None:
            return dict(self._own_momenta(factor))
        numbers = self.per_parameter
        scales = numbers["scale"][self.global_sums.rows].tolist()
        named = dict(zip(self.moments["exp_avg"], scales, strict=True))
        scaled = ((name, m.mul_(named[name])) for name, m in self._own_momenta(factor))
        means = self.mean(scaled, self.live, max(1.0, float(numbers["live"].sum())))
        for name, mean in means.items():
            mean.div_(named[name])
        return means

    def _own_momenta(self, factor: float) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, momentum updated by this replica's gradient)."""
        beta1, gradients = self.optimizer.config.betas[0], self.inside.gradients
        for name, m in self.moments["exp_avg"].items():
            new = gradients[name].to(m.dtype).mul(factor * (1.0 - beta1)).add_(m, alpha=beta1)
            yield name, new.mul_(self.live[name]) if name in self.live else new

    def _note_ratios(self) -> None:
        """Adds a step's trust ratios to their running means, but for ratios of 1: they had no norm.

        The mean is bias-corrected as AdamW's are; the paper starts it from 0 and waits until that
        makes no difference.
        """
        if not isinstance(rule := self.optimizer.rule, Lamb):
            return
        ratios, numbers = rule.ratios, self.per_parameter
        for name, value in (("ratio_sum", ratios), ("ratio_weight", torch.ones_like(ratios))):
            following = torch.lerp(value, numbers[name], self.ratio_decay)
            numbers[name].copy_(torch.where(ratios == 1.0, numbers[name], following))

    def _freeze(self) -> None:
        """Freezes the variance, and fixes a scale for each parameter's momentum.

        The scales give the momenta of all parameters the same root mean square, their mean
        (arXiv:2104.06069, section 4.2), so that one magnitude of signs serves all.
        """
        self.frozen_at = self.optimizer.updates
        self._clear_noise()
        if self.lamb:
            self.lamb.freeze()
        self._find_live()
        sums = self.global_sums.counts.new_zeros(len(self.moments["exp_avg"]), 2)
        for row, (name, m) in enumerate(self.moments["exp_avg"].items()):
            live = self.live.get(name, torch.ones_like(m, dtype=torch.bool))
            sums[row] = torch.stack([live.sum().double(), (m * live).double().square().sum()])
        sums, numbers = self.global_sums.of_model(sums), self.per_parameter
        numbers["live"].copy_(sums[:, 0])
        numbers["factor"].fill_(1.0)
        roots = (sums[:, 1] / sums[:, 0]).sqrt().nan_to_num()
        if self.scales_updates and (moved := roots > 0).any():
            numbers["scale"].copy_(torch.where(moved, roots[moved].mean() / roots, 1.0))

    def _clear_noise(self) -> None:
        """Zeroes the variance of elements whose gradients are rounding errors: sqrt(variance) is
        below NOISE * sqrt(the parameter's mean variance).

        The bias of keys has such gradients: measured 2e-9 of the mean in float32, 2e-5 in bfloat16.
        A sign's error divided by such a root would be a step of thousands.
        """
        variances = self.moments["exp_avg_sq"]
        sums = self.global_sums.counts.new_zeros(len(variances), 2)
        for row, v in enumerate(variances.values()):
            sums[row] = torch.stack([(v > 0).sum().double(), v.double().sum()])
        count, total = self.global_sums(sums).unbind(1)
        lowest = (total / count).nan_to_num() * NOISE**2
        for v, least in zip(variances.values(), lowest.tolist(), strict=True):
            v.mul_(v > least)

    def _find_live(self) -> None:
        """Sets `live`: masks of nonzero variance, for the parameters that have zeros in theirs."""
        masks = {name: v > 0 for name, v in self.moments["exp_avg_sq"].items()}
        self.live = {name: mask for name, mask in masks.items() if not mask.all()}

    def _reset_counters(self) -> None:
        self.frozen_at, count = 0, self.global_sums.num_rows
        device = self.inside.ownership.groups.device
        names = [name for name in OneBitCounters.model_fields if name != "frozen_at"]
        self.per_parameter = {
            name: torch.zeros(count, dtype=torch.float64, device=device) for name in names
        }
        self.per_parameter["scale"].fill_(1.0)
