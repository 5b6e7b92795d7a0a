"""Runs training steps of an array of B models: forward and backward of all at once, and then each
model's own norm, clipping, loss scale and update.

Every model's step is the one that it would make alone; only kernel launches are shared. A loss or
gradient that is not finite stays in its model's rows.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.update_rules import update_of
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.transformer import Stage
from mtcli.core.optim.grad_norm import clip_factor
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.engines import adapter_settings
from mtcli.core.parallel.groups import Groups
from mtcli.core.sweep.array_memory import ArrayMemory
from mtcli.core.sweep.batches import ArrayBatch, ArrayLoader
from mtcli.core.sweep.layers import ArrayLayers
from mtcli.core.sweep.member import Member
from mtcli.core.sweep.update import CompiledAdamW, ModelUpdate
from mtcli.core.training.compile import Losses, compile_stage, compiler_errors
from mtcli.core.training.step import Step, conclude
from mtcli.kernels.gemm import DTYPES


class ModelArray:
    """Models of one shape that train in step on this rank; over dp ranks each has other samples."""

    def __init__(self, configs: Sequence[RunConfig], groups: Groups) -> None:
        """`configs` differ only in fields that `trials.FUSIBLE` names."""
        first = configs[0]
        self.groups, self.shape = groups, first
        self.dtype = DTYPES[first.train.precision]
        # Adapters of lower ranks have zeros where the largest has rows, which stay zero.
        largest = max((config.lora for config in configs), key=lambda lora: lora.rank)
        self.table = run_parameters(first.model, largest)
        self.trained = {name for name, parameter in self.table.items() if parameter.trained}
        like = torch.empty(0, dtype=self.dtype, device=groups.device)
        sizes = self.table, groups.layout, len(configs)
        self.memory = ArrayMemory(*sizes, first.optimizer, like, first.train)
        self.members = [Member(config, groups, self.dtype) for config in configs]
        batch = first.batch
        self.micro_batches = batch.global_batch_size // (
            batch.micro_batch_size * groups.layout.batch_shards
        )
        self._bind()

    @property
    def step(self) -> int:
        """The step that all models have made."""
        return self.members[0].step

    def compact(self, keep: Sequence[int]) -> None:
        """Goes on with some of the models; the memory of the others is freed."""
        self.memory.compact(keep)
        self.members = [self.members[index] for index in keep]
        self._bind()

    def train_step(self, loader: ArrayLoader) -> list[Step]:
        """One optimizer step of each model on its next global batch; where a model's loss or
        gradient is not finite its weights stay as they were, and its outcome says so."""
        with compiler_errors(self.shape.train.compile):
            return self._train_step(loader)

    def _train_step(self, loader: ArrayLoader) -> list[Step]:
        start = perf_counter()
        self.groups.world.recorder.step = self.step + 1
        loss_sums, batch = self.forward_backward(loader)
        norms = (self.compiled or self.memory).norms(self.gradients)
        losses = all_reduce(loss_sums, self.groups.world)
        steps = [
            self._step_of(member, loss / (count or 1.0), norm)
            for member, loss, count, norm in zip(
                self.members, losses.tolist(), batch.labels, norms, strict=True
            )
        ]
        self._update([update for _, update in steps])
        seconds = perf_counter() - start
        pairs = zip(steps, batch.tokens, strict=True)
        return [step._replace(seconds=seconds, tokens=tokens) for (step, _), tokens in pairs]

    def forward_backward(self, loader: ArrayLoader) -> tuple[Tensor, ArrayBatch]:
        """(each model's sum of this rank's weighted losses [B], their batch), with the gradients
        reduced."""
        scales = [member.loss_scale.scale for member in self.members]
        batch = loader.step(self.step, scales)
        device = self.groups.device
        factors = [s / (count or 1.0) for s, count in zip(scales, batch.labels, strict=True)]
        factor_B = torch.tensor(factors, dtype=torch.float64, device=device)
        total_B = torch.zeros(len(self.members), dtype=torch.float64, device=device)
        self.fresh = set(self.trained)
        for number in range(self.micro_batches):
            inputs = batch.load(number)
            sums_B, scaled = self.losses(inputs, factor_B)
            scaled.backward()
            total_B += sums_B
        for name in self.fresh:
            self.gradients[name] = self.memory.gradients.tensors[name].zero_()
        all_reduce(self.memory.gradients.flat, self.groups.axes["samples"])
        return total_B, batch

    @torch.no_grad()
    def evaluate(self, loader: ArrayLoader) -> list[float]:
        """Each model's weighted mean loss over train.eval_batches global batches."""
        total_B = torch.zeros(len(self.members), dtype=torch.float64, device=self.groups.device)
        labels = [0.0] * len(self.members)
        for step in range(self.shape.train.eval_batches):
            batch = loader.step(step, None)
            for number in range(self.micro_batches):
                inputs = batch.load(number)
                losses_T = self.stage.losses(self.stage(None, inputs), inputs)
                total_B += losses_T.double().view(len(self.members), -1).sum(1)
            labels = [a + b for a, b in zip(labels, batch.labels, strict=True)]
        sums = all_reduce(total_B, self.groups.world).tolist()
        return [total / count for total, count in zip(sums, labels, strict=True)]

    def _step_of(
        self, member: Member, loss: float, scaled_norm: float
    ) -> tuple[Step, ModelUpdate | None]:
        """(one model's step, its update or None), as `Trainer.train_step` makes them."""
        optimizer, scale = member.config.optimizer, member.loss_scale.scale
        step = conclude(member, loss, scaled_norm / scale)
        member.step = step.step
        if step.outcome != "updated":
            return step, None
        factor = clip_factor(step.grad_norm, optimizer.clip) / scale
        return step, ModelUpdate(optimizer, step.lr, factor, member.optimizer.updates + 1)

    def _update(self, models: Sequence[ModelUpdate | None]) -> None:
        moving = [(m, u) for m, u in zip(self.members, models, strict=True) if u is not None]
        if self.compiled is not None:
            self.compiled.update(self.gradients, models)
            for member, _ in moving:
                member.optimizer.updates += 1
            return
        matrices = [m.exchange.start(update.lr, update.factor) for m, update in moving]
        self.members[0].optimizer.finish([*chain(*matrices)])

    def _bind(self) -> None:
        """Builds the stage over the memory, as it is now."""
        first, groups = self.shape, self.groups
        for index, member in enumerate(self.members):
            member.bind(self.memory.model(index))
        build = ArrayLayers(
            table=self.table,
            groups=groups,
            dtype=self.dtype,
            recompute_activations=first.parallel.recompute != "full",
            num_models=len(self.members),
            memory=self.memory.parameters,
            adapters=adapter_settings(first),
            configs=tuple(member.config for member in self.members),
        )
        layers = range(first.model.num_layers)
        self.stage = Stage(first.model, build, 0, layers, recompute=first.parallel.recompute)
        self.losses, self.compiled = _losses(self.stage), None
        if first.train.compile:
            self.losses = compile_stage(self.stage, self.losses, first.data.document_mask)
            optimizer = first.optimizer
            plain = optimizer.name == "adamw" and not optimizer.group
            if plain and groups.device.type == "cpu":
                decays = {name: update_of(p, optimizer).decays for name, p in self.table.items()}
                self.compiled = CompiledAdamW(self.memory, decays)
        self.gradients = dict(self.memory.gradients.tensors)
        one_backward = self.micro_batches == 1 and groups.axes["samples"].size == 1
        self.as_made = self.compiled is not None and one_backward
        for name, parameter in self.stage.named_parameters():
            if name in self.trained:
                collector = self._collector(name)
                parameter.register_post_accumulate_grad_hook(collector)

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        """Makes the hook that adds a parameter's gradient to the array's.

        A step's first gradient overwrites the last step's; an only one is used without a copy.
        """
        into = self.gradients[name]

        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None, f"{name} has a gradient"
            if self.as_made:
                self.gradients[name] = parameter.grad
            else:
                (into.copy_ if name in self.fresh else into.add_)(parameter.grad)
            self.fresh.discard(name)
            parameter.grad = None

        return collect


def _losses(stage: Stage) -> Losses:
    """Makes the function (micro-batch, each model's factor [B]) -> (each model's sum of weighted
    losses [B], the scalar to differentiate)."""

    def losses(inputs: Inputs, factor_B: Tensor) -> tuple[Tensor, Tensor]:
        return stage.loss(stage(None, inputs), inputs, factor_B)

    return losses
