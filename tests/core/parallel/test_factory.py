"""The factory of a model's layers: what an engine of its own takes, and that models name none."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parity_factors import row_of
from parity_runs import curve_off, oracle, train_on
from ranks import run_ranks
from tiny import LLAMA, run_config
from torch import nn

import mtcli.core.model
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel import engines
from mtcli.core.parallel.factory import LayerFactory
from mtcli.core.parallel.groups import make_groups


class DenseLayers(LayerFactory):
    """Plain torch on one rank: no shards, no collectives, no kernels of ours."""

    def column_linear(self, name):
        return Dense(self, name)

    row_linear = column_linear

    def embedding(self, name):
        return Dense(self, name)

    def norm(self, name, model):
        return DenseNorm(self, name, model)

    def add_norm(self, name, model):
        return DenseAddNorm(self, name, model)

    def loss(self, table, bias=None, cap=0.0):
        return DenseLoss(table.weight[: self.table["embedding.weight"].shape[0]])


class Dense(nn.Module):
    def __init__(self, build, name):
        super().__init__()
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")
        self.flat_bias = None

    def forward(self, x, with_bias=True, numbers=None, trains_bias=True):
        if not x.is_floating_point():
            return self.weight[x]
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias.flatten()

    def of_activated(self, activation, x, inner_bias=None, with_bias=True, numbers=None):
        if x.shape[-1] == self.weight.shape[1]:
            return self(F.gelu(x))
        gate, up = x.chunk(2, -1)
        return self(F.silu(gate) * up)


class DenseNorm(nn.Module):
    def __init__(self, build, name, model):
        super().__init__()
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")
        self.eps = model.norm_eps

    def forward(self, x):
        if self.bias is None:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class DenseAddNorm(DenseNorm):
    def forward(self, x, y=None, y_bias=None):
        x = x if y is None else x + y
        return x, super().forward(x)


class DenseLoss:
    def __init__(self, weight):
        self.weight = weight

    def losses(self, x, labels):
        return F.cross_entropy(x @ self.weight.T, labels, reduction="none")

    def loss(self, x, labels, weights, scale):
        losses = self.losses(x, labels)
        total = (losses if weights is None else losses * weights).sum()
        return total.detach(), total * scale


def train_densely(runtime, config, samples):
    engines.TensorParallelLayers = DenseLayers  # of this process
    return train_on(runtime, config, samples)


@pytest.mark.parametrize(
    "levels",
    [
        {"dropout": "yes", "samples": "weights"},
        {"model": "llama", "samples": "documents"},
        {"model": "moe capped", "samples": "weights"},
    ],
    ids=str,
)
def test_another_engine_trains_the_same_model_to_the_same_numbers(levels):
    row = row_of(levels)
    ours, (theirs,) = oracle(row), run_ranks(1, train_densely, row.config(), row.samples)
    assert curve_off(theirs, ours) < 1e-10
    gradients = ours.replicas[0].gradients
    assert set(gradients) == set(theirs.gradients)
    for name, (gradient, _) in gradients.items():
        error = theirs.gradients[name][0] - gradient
        assert error.norm() < 1e-10 * gradient.norm(), name


def test_models_import_no_engine():
    sources = Path(mtcli.core.model.__file__).parent.glob("*.py")
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "mtcli.core.parallel.factory" in modules
    assert not modules & {"mtcli.core.parallel.tensor", "mtcli.core.parallel.vocab_parallel"}


def norm_of_a_head(runtime, config):
    groups = make_groups(ParallelLayout.of_run(config, 4), runtime.rank, runtime.device)
    factory = engines.layer_factory(config, groups, torch.float64, runtime.device)
    weight = Parameter("head.weight", (6,), (None,), "ones", 0)
    layer = replace(factory, table={**factory.table, "head.weight": weight}).norm(
        "head", config.model
    )
    scale = torch.arange(1.0, 7.0, dtype=torch.float64)
    layer.weight.data.copy_(scale)
    x = torch.randn(
        5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(runtime.rank)
    )
    torch.testing.assert_close(layer(x), F.rms_norm(x, (6,), scale, config.model.norm_eps))


def test_a_norm_whose_weight_no_rank_of_a_grid_shards_is_over_what_a_rank_has():
    parallel, batch = {"tp": 4, "tp_mode": "2d"}, {"micro_batch_size": 2}
    run_ranks(4, norm_of_a_head, run_config(LLAMA, parallel=parallel, batch=batch))
