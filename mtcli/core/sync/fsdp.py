"""Shards parameters by rows over data-parallel ranks (zero = 3), by torch's FSDP2.

A block's weights are all-gathered before its forward and again before its backward and freed after
each; its gradients are reduce-scattered after every micro-batch's backward (arXiv:1910.02054,
section 5.3; arXiv:2304.11277). Shards are float32 where training is in 16 bits, so they are the
optimizer's master weights, and no second copy exists. Ranks sum a micro-batch's gradients in
float32, or in bfloat16 where train.gradients says so; micro-batches are summed in the shards'
dtype. Experts are sharded over edp, all else over dp * cp, frozen weights too; routers' biases are
replicated.
"""

from collections.abc import Mapping
from typing import Any, cast
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
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import OwnedShard, Ownership, unsharded
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.sync.flat import flatten, unflatten
from mtcli.core.sync.strategy import Strategy, is_block, sum_tied_gradients_


class FullyShardedDataParallel(Strategy):
    """The strategy of zero = 3: every data rank holds some rows of each trained parameter."""

    recorded = False  # FSDP2 has collectives of its own

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ownership: Ownership,
        dtype: torch.dtype,
        least: torch.dtype = torch.float32,
    ) -> None:
        """`stages` are on the meta device, and compute in `dtype`. Ranks sum gradients in `least`,
        or in `dtype` where that is wider."""
        _shard(stages, ownership, dtype, torch.promote_types(dtype, least))
        self.stages, self.ownership, self.dtype = stages, ownership, dtype
        table = ownership.table
        self.sharded = {
            name: cast(DTensor, parameter)
            for stage in stages.values()
            for name, parameter in stage.named_parameters()
            if table[name].trained or table[name].frozen
        }
        self.parameters = {name: x for name, x in self.sharded.items() if table[name].trained}
        self.shards = unsharded(stages, table) | {
            name: OwnedShard(table[name], parameter.to_local().data, ownership.rows(name))
            for name, parameter in self.sharded.items()
        }
        for name, (_, tensor, rows) in self.shards.items():
            assert len(tensor) == rows.stop - rows.start, f"{name}: {len(tensor)} rows, not {rows}"
        self.before_step()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """This rank's reduced gradients, by name: [owned rows, ...]."""
        return {name: cast(DTensor, p.grad).to_local() for name, p in self.parameters.items()}

    def weights(self) -> dict[str, Tensor]:
        """The owned rows of trained parameters: all that this rank has of them."""
        return {name: self.shards[name].tensor for name in self.parameters}

    @torch.no_grad()
    def full_weights(self) -> dict[str, Tensor]:
        """Gathers the rows of sharded parameters, in the dtype of computation. Collective."""
        gathered = {
            name: cast(DTensor, parameter.to(self.dtype)).full_tensor()
            for name, parameter in self.sharded.items()
        }
        return super().full_weights() | gathered

    def gradient_buffers(self) -> list[Tensor]:
        """Lists the memory that gradients take."""
        return list(self.gradients.values())

    def before_step(self, from_zero: bool = True) -> None:
        """Starts a step, always from zero: backward passes add to it."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()

    def before_last_backward(self, stage: int) -> None:
        """Does nothing: gradients are reduced after every micro-batch."""

    def after_backward(self) -> None:
        """Sums gradients that are partial over tp too: norm weights, under sequence parallelism."""
        gradients = self.gradients
        partial: dict[str, tuple[Axis, list[Tensor]]] = {}
        for name, gradient in gradients.items():
            axis = self.ownership.rest(name)
            if axis.size > 1:
                partial.setdefault(axis.name, (axis, []))[1].append(gradient)
        for axis, parts in partial.values():
            sums = unflatten(all_reduce(flatten(parts), axis), [part.shape for part in parts])
            for part, summed in zip(parts, sums, strict=True):
                part.copy_(summed)
        sum_tied_gradients_(gradients, self.ownership)

    def after_update(self) -> None:
        """Does nothing: the next forward all-gathers the updated rows."""

    def saves(self, name: str) -> bool:
        """Whether this rank is the first that owns these rows."""
        return self.ownership.answers_for(name)


def _shard(
    stages: Mapping[int, nn.Module], ownership: Ownership, dtype: torch.dtype, reduced: torch.dtype
) -> None:
    """Shards stages that were built on the meta device and allocates them, uninitialised.

    Blocks and stages compute in `dtype`; gradients are summed over ranks in `reduced`, not
    averaged.
    """
    filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nobody writes to
    groups, table = ownership.groups, ownership.table
    device = groups.device.type
    data, experts = (_mesh(groups.axes[name], device) for name in ("data", "edp"))
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    for stage in stages.values():
        biases = {
            parameter
            for name, parameter in stage.named_parameters()
            if not (table[name].trained or table[name].frozen)
        }
        for name, module in reversed(list(stage.named_modules())):  # children before parents
            if _is_expert_array(name):
                fully_shard(module, mesh=experts, mp_policy=policy)
            elif is_block(name):
                fully_shard(module, mesh=data, mp_policy=policy, ignored_params=biases)
        fully_shard(stage, mesh=data, mp_policy=policy, ignored_params=biases)
        for reads_head in ("loss", "losses"):
            register_fsdp_forward_method(stage, reads_head)
        _prefetch(stage)
        for name, module in stage.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_CountedAllGather(groups.world.recorder))
                module.set_custom_reduce_scatter(_CountedReduceScatter(groups.world.recorder))
                if (experts if _is_expert_array(name) else data).size() > 1:  # one copies to divide
                    module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        stage.to_empty(device=groups.device)


class _CountedAllGather(DefaultAllGather):
    """FSDP2's all-gather, which reports its bytes to the traffic counter."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if self.recorder.sync_traffic is not None:
            self.recorder.sync_traffic.add((group.size() - 1) * input_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _CountedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, which reports its bytes to the traffic counter."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.recorder.sync_traffic is not None:
            self.recorder.sync_traffic.add((group.size() - 1) * output_tensor.nbytes)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _prefetch(stage: nn.Module) -> None:
    """Has each block's backward prefetch the weights of the block whose backward is next.

    FSDP2's default follows the forwards since the last backward: in a pipeline those of other
    micro-batches, or none.
    """
    wrapped = [(name, x) for name, x in stage.named_modules() if isinstance(x, FSDPModule) and name]
    last_first = sorted(wrapped, key=lambda pair: int(pair[0].split(".")[1]), reverse=True)
    going = [module for _, module in last_first]
    for module, following in zip(going, [*going, cast(FSDPModule, stage)][1:], strict=True):
        module.set_modules_to_backward_prefetch([following])


def _mesh(axis: Axis, device: str) -> DeviceMesh:
    group = axis.group or dist.new_group(list(axis.ranks), use_local_synchronization=True)
    return DeviceMesh.from_group(group, device)


def _is_expert_array(name: str) -> bool:
    return name.endswith(".mlp.experts")
