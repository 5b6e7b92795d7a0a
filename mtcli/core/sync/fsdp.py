"""zero = 3: parameters cut by rows over data parallel ranks, by torch's FSDP2.

A block's weights are gathered before its forward and again before its backward and let go after
each; its gradients are reduce-scattered after every micro-batch's backward (arXiv:1910.02054,
section 5.3; arXiv:2304.11277). The rows kept are float32 where training is in 16 bits, so they are
the optimizer's masters, and no second copy exists. Experts are cut over edp, all else over dp * cp;
what is not trained stays whole on every rank.
"""

from collections.abc import Mapping
from typing import cast
from warnings import filterwarnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.ownership import OwnedShard, Ownership, unsharded
from mtcli.core.sync.all_reduce import sum_tied_


def shard(stages: Mapping[int, nn.Module], groups: Groups, dtype: torch.dtype) -> None:
    """Cuts stages that were built on the meta device and gives them memory, uninitialised.

    What a block and a whole stage compute with is `dtype`; gradients are summed in float32 or
    wider, and not averaged.
    """
    filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nobody writes to
    device = groups.device.type
    data, experts = (_mesh(groups.axes[name], device) for name in ("data", "edp"))
    wide = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=wide, cast_forward_inputs=False)
    for stage in stages.values():
        untrained = {p for p in stage.parameters() if not p.requires_grad}
        for name, module in reversed(list(stage.named_modules())):  # children before parents
            if _is_expert_array(name):
                fully_shard(module, mesh=experts, mp_policy=policy)
            elif _is_block(name):
                fully_shard(module, mesh=data, mp_policy=policy, ignored_params=untrained)
        fully_shard(stage, mesh=data, mp_policy=policy, ignored_params=untrained)
        for reads_head in ("loss", "losses"):
            register_fsdp_forward_method(stage, reads_head)
        _prefetch(stage)
        for name, module in stage.named_modules():
            if isinstance(module, FSDPModule):
                if (experts if _is_expert_array(name) else data).size() > 1:  # one copies to divide
                    module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        stage.to_empty(device=groups.device)


def _prefetch(stage: nn.Module) -> None:
    """While a block or its experts go back, what goes back after them is gathered.

    By itself FSDP2 looks for that among the forwards since the last backward, which are other
    micro-batches' in a pipeline, or none. The stage's own weights are there.
    """
    found = [(name, x) for name, x in stage.named_modules() if isinstance(x, FSDPModule) and name]
    last_first = sorted(found, key=lambda one: int(one[0].split(".")[1]), reverse=True)
    going = [module for _, module in last_first]
    for module, following in zip(going, [*going, stage][1:], strict=True):
        module.set_modules_to_backward_prefetch([following])


class ShardedGradients:
    """The Reduction of parameters of which every data rank holds some rows."""

    def __init__(self, stages: Mapping[int, nn.Module], ownership: Ownership) -> None:
        self.ownership = ownership
        self.parameters = {
            name: cast(DTensor, parameter)
            for stage in stages.values()
            for name, parameter in ownership.trained(stage)
        }
        self.held = unsharded(stages) | {
            name: OwnedShard(parameter.to_local().data, ownership.rows(name))
            for name, parameter in self.parameters.items()
        }
        for name, (tensor, rows) in self.held.items():
            assert len(tensor) == rows.stop - rows.start, f"{name}: {len(tensor)} rows, not {rows}"
        self.begin()

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients this rank keeps, by name: [rows of its share, ...]."""
        return {name: cast(DTensor, p.grad).to_local() for name, p in self.parameters.items()}

    def owned(self) -> dict[str, Tensor]:
        """The rows that this rank's optimizer updates: all that it holds of what is trained."""
        return {name: self.held[name].tensor for name in self.parameters}

    def buffers(self) -> list[Tensor]:
        """The memory that gradients take."""
        return list(self.views.values())

    def begin(self) -> None:
        """Starts a step from zero; backward passes add to it."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()

    def arm(self, stage: int) -> None:
        """Nothing: every micro-batch's gradients are reduced, as no rank has room for all rows."""

    def finish(self) -> None:
        """Sums what is partial over further axes: norms over tp, under sequence parallelism."""
        for axis, views in self._partial():
            flat = torch.cat([view.flatten() for view in views])
            parts = all_reduce(flat, axis).split([view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view_as(view))
        sum_tied_(self.views, self.ownership)

    def scale_(self, factor: float) -> None:
        """Multiplies every kept gradient in place."""
        for view in self.views.values():
            view.mul_(factor)

    def share_parameters(self) -> None:
        """Nothing: the backward let go of gathered rows, and the next forward gathers them anew."""

    def _partial(self) -> list[tuple[Axis, list[Tensor]]]:
        sets: dict[str, tuple[Axis, list[Tensor]]] = {}
        for name, view in self.views.items():
            axis = self.ownership.rest(name)
            if axis.size > 1:
                sets.setdefault(axis.name, (axis, []))[1].append(view)
        return list(sets.values())


def _mesh(axis: Axis, device: str) -> DeviceMesh:
    group = axis.group or dist.new_group(list(axis.ranks), use_local_synchronization=True)
    return DeviceMesh.from_group(group, device)


def _is_block(name: str) -> bool:
    return name.startswith("blocks.") and name.count(".") == 1


def _is_expert_array(name: str) -> bool:
    return name.endswith(".mlp.experts")
