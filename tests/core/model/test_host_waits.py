"""Operations of a MoE layer for which a host waits for a GPU, counted on fake tensors.

The layer takes a GPU's path on tensors of the device `meta`, as in a dry run.
"""

import pytest
import torch
from tiny import BIASED, MOE, run_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.inputs import make_inputs
from mtcli.core.model.moe import MixtureOfExperts
from mtcli.core.parallel.fp8 import fp8_gemms
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.rehearse.fake_world import fake_world

B, S = 2, 8
GPU = torch.device("meta")
aten = torch.ops.aten
# Their results' shapes are values of their arguments; bincount reads the largest one.
SIZED_BY_VALUES = {"nonzero", "bincount", "masked_select", "_unique2", "unique_consecutive"}


make_tensor = torch.tensor


class HostWaits(TorchDispatchMode):
    """Collects the names of operations for which the host waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __enter__(self):
        torch.tensor = self._tensor
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = make_tensor
        return super().__exit__(*error)

    def _tensor(self, *args, **kwargs):
        """torch.tensor, which copies from pageable memory and on meta is no operation."""
        found = make_tensor(*args, **kwargs)
        if found.device == GPU:
            self.names.append("tensor")
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = func(*args, **kwargs)
        if self._waits(func, given, kwargs, found):
            self.names.append(str(func))
        return found

    def _waits(self, func, given, kwargs, found):
        name = func._schema.name.removeprefix("aten::")
        places = {x.device for x in given if x.dim() or name in ("_to_copy", "copy_")}
        if name == "_local_scalar_dense" or name in SIZED_BY_VALUES:
            return GPU in {x.device for x in given}
        if name == "repeat_interleave":
            return GPU in places and kwargs.get("output_size") is None
        if name == "_to_copy":
            places.add(found.device)
        return len(places) > 1


def waits(changes, world=1, gemms=None, **parallel):
    """What a forward and backward of a MoE layer waits for."""
    model, seen = run_config(MOE | changes).model, HostWaits()
    with fake_world(0, world, model, seen, on_gpu=True):
        groups = make_groups(ParallelLayout(world, **parallel), 0, GPU)
        build = TensorParallelLayers(parameters(model), groups, torch.bfloat16, gemms=gemms)
        layer = MixtureOfExperts("blocks.0.mlp", model, build)
        tokens = torch.empty(B, S, dtype=torch.int64, device=GPU)
        inputs = make_inputs(model, torch.bfloat16, tokens, aux_scale=0.5)
        x = torch.empty(B * S, model.hidden_size, dtype=torch.bfloat16, device=GPU)
        x.requires_grad_()
        seen.names.clear()
        y = layer(x, inputs)
        y.backward(torch.empty_like(y))
        assert x.grad.shape == x.shape
    return seen.names


ALONE = {
    "losses over sequences": {},
    "losses over the batch": {"aux_loss_coeff": 0.01, "sequence_aux_loss_coeff": 0.0},
    "both": {"aux_loss_coeff": 0.01},
    "neither": {"sequence_aux_loss_coeff": 0.0, "z_loss_coeff": 0.0},
    "biases": BIASED,
}


@pytest.mark.parametrize("case", ALONE)
def test_a_layer_of_one_rank_never_waits(case):
    assert waits(ALONE[case]) == []


def test_a_layer_of_a_float8_run_has_grouped_gemms_too():
    sizes = {"hidden_size": 64, "moe_ffn_hidden_size": 128}
    assert waits(sizes, gemms=fp8_gemms("rowwise")) == []


@pytest.mark.parametrize("parallel", [{"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2}], ids=str)
def test_a_layer_of_several_ranks_waits_once_for_the_rows_they_send(parallel):
    world = parallel.get("ep", 1) * parallel.get("etp", 1)
    assert waits({}, world, **parallel) == ["aten._to_copy.default"]


def test_ranks_that_pad_to_capacity_know_the_rows_they_send():
    capacity = {"capacity_factor": 1.0, "pad_to_capacity": True, "drop_scope": "sub_sequence"}
    assert waits(capacity, 2, ep=2) == []


def test_what_waits_is_seen():
    seen = HostWaits()
    with fake_world(0, 1, run_config(MOE).model, seen, on_gpu=True):
        x, host = torch.arange(3, device=GPU), torch.arange(3)
        for wait in (
            lambda: x.sum().item(),
            lambda: x.cpu(),
            lambda: host.to(GPU),
            lambda: torch.tensor(1.0, device=GPU),
            lambda: torch.bincount(x, minlength=3),
            lambda: torch.repeat_interleave(x, x),
            lambda: x[host],
        ):
            before = len(seen.names)
            wait()
            assert len(seen.names) > before
