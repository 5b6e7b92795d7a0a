"""Tensor parallel layers that exchange beside their GEMMs, against the dense layers."""

from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel import collectives, overlap, tensor
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.activation import ACTIVATIONS

D, F = 5, 12  # columns, inner columns
EXACT = {"rtol": 1e-12, "atol": 1e-12}
TABLE = [
    Parameter("up.weight", (F, D), ("tp", None), "normal", 0),
    Parameter("up.bias", (F,), ("tp",), "zeros", 0),
    Parameter("down.weight", (D, F), (None, "tp"), "residual", 0),
]


def seeded(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(ranks):
    """(up, its bias, down, x, gradient of y) of 7 tokens of each rank."""
    shapes = (F, D), (F,), (D, F), (7 * ranks, D), (7 * ranks, D)
    return [seeded(*shape, seed=number) for number, shape in enumerate(shapes)]


def overlapping(chunks):
    """Has layers exchange beside their GEMMs on a CPU too, in as many chunks."""
    return (
        patch.object(tensor, "hides_collectives", lambda x: True),
        patch.object(overlap, "exchange_chunks", lambda moved: chunks),
    )


def mlp(runtime, sequence_parallel, chunks, recomputes, splits):
    """(y, gradients of x, up, its bias and down) of a rank, down's input being gelu of up's output
    with `recomputes`."""
    groups = make_groups(ParallelLayout(runtime.world, tp=runtime.world), runtime.rank, "cpu")
    passes = WeightPasses() if splits else None
    table = {parameter.name: parameter for parameter in TABLE}
    build = TensorParallelLayers(
        table, groups, torch.float64, sequence_parallel, weight_passes=passes
    )
    up, down = build.column_linear("up"), build.row_linear("down")
    *whole, x, grad = values(runtime.world)
    parameters = {"up.weight": up.weight, "up.bias": up.bias, "down.weight": down.weight}
    for tensor_of_all, (name, parameter) in zip(whole, parameters.items(), strict=True):
        parameter.data.copy_(tensor_of_all[table[name].box(groups.layout, runtime.rank).slices])
    x = build.my_tokens(x).clone().requires_grad_()
    first, second = overlapping(chunks)
    with first, second, patch.object(TensorParallelLayers, "recomputes", lambda *_: recomputes):
        if recomputes:
            y = down.of_activated(ACTIVATIONS["gelu"], up(x, with_bias=False), up.flat_bias)
        else:
            y = down(up(x))
        if passes is None:
            y.backward(build.my_tokens(grad))
        else:
            with passes.collecting() as left:
                y.backward(build.my_tokens(grad))
            assert len(left) == 2 and up.weight.grad is None
            for weight_pass in left:
                weight_pass()
    return y.detach(), x.grad, up.weight.grad, up.bias.grad, down.weight.grad


CASES = {  # ranks, sequence parallel, chunks, gelu recomputed, backward split
    "gathered": (2, True, 1, False, False),
    "in chunks": (2, True, 3, False, False),
    "of four": (4, True, 4, False, False),
    "replicated": (2, False, 1, False, False),
    "replicated in chunks": (3, False, 4, False, False),
    "recomputed": (2, True, 2, True, False),
    "replicated, recomputed": (2, False, 2, True, False),
    "split": (2, True, 3, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_the_dense_ones(case):
    ranks, shards, *options = CASES[case]
    *whole, x, grad = values(ranks)
    found = run_ranks(ranks, mlp, shards, *options)
    for tensor_of_all in (*whole, x):
        tensor_of_all.requires_grad_()
    up, bias, down = whole
    inner = x @ up.T + bias
    y = (torch.nn.functional.gelu(inner) if options[1] else inner) @ down.T
    y.backward(grad)
    join = torch.cat if shards else (lambda parts: parts[-1])
    torch.testing.assert_close(join([rank[0] for rank in found]), y.detach(), **EXACT)
    torch.testing.assert_close(join([rank[1] for rank in found]), x.grad, **EXACT)
    for index, (tensor_of_all, dim) in enumerate(((up, 0), (bias, 0), (down, 1)), 2):
        gradient = torch.cat([rank[index] for rank in found], dim)
        torch.testing.assert_close(gradient, tensor_of_all.grad, **EXACT)


def order(runtime, sequence_parallel):
    """What a rank does in a forward and a backward of two layers, in order."""
    events = []

    def noting(name, function):
        def noted(*arguments):
            events.append(name)
            return function(*arguments)

        return noted

    started = collectives.Pending.__init__

    def start(pending, call, begin):
        events.append(call.op)
        started(pending, call, begin)

    with (
        patch.object(collectives.Pending, "__init__", start),
        patch.object(collectives.Pending, "wait", noting("wait", collectives.Pending.wait)),
        patch.object(overlap, "matmul_into", noting("gemm", overlap.matmul_into)),
        patch.object(overlap, "matmul", noting("gemm", overlap.matmul)),
        patch.object(overlap, "weight_gradient", noting("wgrad", overlap.weight_gradient)),
    ):
        mlp(runtime, sequence_parallel, 2, False, False)
    return events


GATHER = ["all_gather", "gemm", "wait", "gemm"]  # this rank's tokens, then the other's
ORDERS = {
    True: [
        *GATHER,
        *("gemm", "reduce_scatter", "gemm", "reduce_scatter", "wait", "wait"),
        *GATHER,
        "wgrad",
        *("gemm", "reduce_scatter", "wgrad", "wait"),
    ],
    False: [
        *("gemm", "all_reduce", "gemm", "all_reduce", "wait", "wait"),
        *("gemm", "wgrad"),
        *("gemm", "all_reduce", "wgrad", "wait"),
    ],
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_collective_has_a_gemm_between_its_start_and_its_end(sequence_parallel):
    for events in run_ranks(2, order, sequence_parallel):
        assert events == ORDERS[sequence_parallel]


def trained(runtime, config, chunks):
    """(losses, gradient norms, whether a layer overlapped) of two steps of a rank."""
    used = []
    first, second = overlapping(chunks)
    apply = overlap.OverlappedRow.apply
    noting = lambda *arguments: used.append(True) or apply(*arguments)  # noqa: E731
    with first, second, patch.object(overlap.OverlappedRow, "apply", noting):
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        steps = [trainer.train_step(loader) for _ in range(2)]
        loader.close()
    return [step.loss for step in steps], [step.grad_norm for step in steps], bool(used)


RUNS = {
    "gpt": (2, GPT, {"tp": 2}),
    "whole sequences": (2, GPT, {"tp": 2, "sequence_parallel": False}),
    "llama, tp=4": (4, LLAMA, {"tp": 4}),
    "experts": (2, MOE, {"tp": 2, "ep": 2}),
    "recomputed": (2, LLAMA, {"tp": 2, "recompute": "full"}),
    "zero bubble": (4, GPT, {"tp": 2, "pp": 2, "schedule": "zero_bubble"}),
    "zero 1": (4, LLAMA, {"tp": 2, "zero": 1}),
    "zero 3": (4, LLAMA, {"tp": 2, "zero": 3}),
}


def config_of(model, parallel):
    batch = {"seq_len": 12, "micro_batch_size": 1, "global_batch_size": 4}
    return run_config(model, batch=batch, parallel=parallel, train={"precision": "fp64"})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_rank(name):
    world, model, parallel = RUNS[name]
    losses, norms, _ = run_ranks(1, trained, config_of(model, {}), 3)[0]
    for ours, our_norms, overlapped in run_ranks(world, trained, config_of(model, parallel), 3):
        assert overlapped
        assert ours == pytest.approx(losses, rel=1e-12, abs=0)
        assert our_norms == pytest.approx(norms, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("settings", "on_gpu", "overlaps"),
    [({}, True, True), ({}, False, False), ({"tp_overlap": False}, True, False)],
)
def test_only_a_gpu_overlaps_and_only_if_it_may(settings, on_gpu, overlaps):
    x = torch.empty(2, 2, device="meta" if on_gpu else "cpu")
    assert run_ranks(2, may_overlap, settings, on_gpu) == [overlaps] * 2
    assert overlap.hides_collectives(x) == on_gpu


def may_overlap(runtime, settings, on_gpu):
    groups = make_groups(ParallelLayout(2, tp=2), runtime.rank, "cpu")
    build = TensorParallelLayers({}, groups, torch.float32, **settings)
    x = torch.empty(2, 2, device="meta" if on_gpu else "cpu")
    return build.overlap(x, x) is not None
