"""Gradients that GEMMs add into buckets are those that a pass after each micro-batch adds."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config
from torch import nn

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.all_reduce import Bucket, BucketedDataParallel
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.gemm import (
    DEFAULT_GEMMS,
    LinearFunction,
    add_batch_,
    adds_to,
    set_bfloat16_in_float32,
)
from mtcli.kernels.gradient_sink import GradientSink, GradientSinks

BATCH = {"seq_len": 8, "micro_batch_size": 1}


def trained(runtime, config, by_pass=False, steps=2):
    """(reduced gradients of the last step, losses, names that a pass added) of a rank."""
    put, passed = Bucket.put, set()

    def noting(bucket, name, grad, first):
        passed.add(name)
        put(bucket, name, grad, first)

    of = (lambda sinks, weight: None) if by_pass else GradientSinks.of
    with patch.object(Bucket, "put", noting), patch.object(GradientSinks, "of", of):
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        losses = [trainer.train_step(loader).loss for _ in range(steps)]
        loader.close()
    return {n: g.clone() for n, g in trainer.strategy.gradients.items()}, losses, passed


def by_gemms(names):
    """The weights of linear layers, experts, heads and tables of tokens, whose GEMMs add."""
    ends = ("qkv", "out", "up", "gate_up", "down", "embedding", "head", "position_embedding")
    return {
        n
        for n in names
        if n.removesuffix(".weight").rsplit(".", 1)[-1] in ends and n.endswith(".weight")
    }


def both(world, precision="fp64", micro_batches=3, model=GPT, **parallel):
    """[(rank's results by sinks, its results by passes)]."""
    shards = world // (parallel.get("tp", 1) * parallel.get("pp", 1))
    config = run_config(
        model,
        batch=BATCH | {"global_batch_size": micro_batches * shards},
        train={"precision": precision},
        parallel=parallel,
    )
    return list(
        zip(
            run_ranks(world, trained, config),
            run_ranks(world, partial(trained, by_pass=True), config),
            strict=True,
        )
    )


LAYOUTS = {
    "gpt": (1, {}),
    "llama": (1, {"model": LLAMA}),
    "moe": (1, {"model": MOE}),
    "owners of experts": (2, {"model": MOE, "zero": 1}),
    "owners of parts of experts": (3, {"model": MOE, "zero": 1}),
    "experts of ranks": (2, {"model": MOE, "ep": 2, "zero": 1}),
    "replicas": (2, {}),
    "owners": (2, {"zero": 1}),
    "owners of rows that do not divide": (3, {"zero": 1, "model": LLAMA}),
    "tp": (2, {"tp": 2, "model": LLAMA}),
    "recomputed": (1, {"recompute": "full"}),
    "zero bubble": (2, {"pp": 2, "schedule": "zero_bubble"}),
    "interleaved, tied": (2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sums_are_those_of_passes(name, micro_batches):
    world, options = LAYOUTS[name]
    if options.get("vpp"):
        micro_batches += 1  # a multiple of pp
    for (ours, losses, passed), (theirs, expected, by_pass) in both(
        world, micro_batches=micro_batches, **options
    ):
        weights = by_gemms(by_pass)
        assert weights and not weights & passed, weights & passed
        assert losses == pytest.approx(expected, rel=1e-12, abs=0)
        for key, gradient in theirs.items():
            # of two steps, whose first has moved the weights
            error = (ours[key] - gradient).norm() / gradient.norm().clamp(min=1e-30)
            assert error < 1e-12, (key, error)
            if micro_batches == 1 and options.get("zero", 0) == 0:
                assert torch.equal(ours[key], gradient), key


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4))


def summed(runtime):
    """[(sum of a step's micro-batches, what it has to be)] of three steps."""
    groups = make_groups(ParallelLayout(1), 0, runtime.device)
    table = {"weight": Parameter("weight", (6, 4), (None, None), "normal", 0)}
    ownership = Ownership(groups, table, sequence_parallel=True, shard=False)
    module, sinks, found = Layer(), GradientSinks(), []
    strategy = BucketedDataParallel({0: module}, ownership, 1e9, sinks)
    generator = torch.Generator().manual_seed(0)
    for micro_batches in (3, 2, 0):
        strategy.before_step()
        expected = torch.zeros(6, 4)
        for _ in range(micro_batches):
            x, grad = (torch.randn(5, n, generator=generator) for n in (4, 6))
            sink = sinks.of(module.weight)
            LinearFunction.apply(x, module.weight, None, DEFAULT_GEMMS, None, sink).backward(grad)
            expected += grad.T @ x
        strategy.after_backward()
        found.append((strategy.gradients["weight"].clone(), expected))
    return found


def test_each_step_sums_its_own_micro_batches():
    for ours, expected in run_ranks(1, summed)[0]:
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def early(runtime, config):
    """The buckets whose reductions are on their way when the last backward has ended, of all."""
    found = []
    after_backward = BucketedDataParallel.after_backward

    def noting(strategy):
        found.append([bucket.work is not None for bucket in strategy.buckets])
        after_backward(strategy)

    with patch.object(BucketedDataParallel, "after_backward", noting):
        trained(runtime, config)
    return found


def test_buckets_leave_once_gemms_and_passes_have_filled_them():
    batch = BATCH | {"global_batch_size": 6}
    parallel = {"bucket_mib": 0.01, "zero": 1}
    config = run_config(batch=batch, parallel=parallel, train={"precision": "fp64"})
    for steps in run_ranks(2, early, config):
        assert len(steps) == 2 and all(map(all, steps)) and len(steps[0]) > 4, steps


def test_frozen_weights_have_no_sink_and_adapters_train_as_before():
    (ours, losses, _), (theirs, expected, _) = [
        run_ranks(1, partial(trained, by_pass=by_pass), run_config(lora={"rank": 2, "alpha": 4.0}))[
            0
        ]
        for by_pass in (False, True)
    ]
    assert losses == expected and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("widens", [True, False])
def test_bfloat16_adds_by_gemms_where_they_run_in_float32(widens):
    """Elsewhere a pass adds their results, which a CPU computes faster in bfloat16."""
    before = set_bfloat16_in_float32(widens)
    try:
        x = torch.zeros(1, 1, dtype=torch.bfloat16)
        assert adds_to(x, x, torch.float32) == widens
    finally:
        set_bfloat16_in_float32(before)


@pytest.mark.parametrize(
    ("tokens", "width", "by_gemm"), [(128, 512, True), (129, 512, False), (128, 511, False)]
)
def test_float32_adds_by_gemms_on_a_cpu_where_tokens_are_few_and_weights_large(
    tokens, width, by_gemm
):
    x, weight = torch.empty(tokens, 512), torch.empty(width, 512)
    assert adds_to(x, weight, torch.float32) == by_gemm
    assert adds_to(x.to("meta"), weight, torch.float32)


@pytest.mark.parametrize(("owners", "rows"), [(1, 7), (2, 6), (3, 7), (4, 9), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_each_owner_are_added_where_they_are(owners, rows, dtype):
    """The first product overwrites what is there, NaN too; padding stays as it is."""
    each, generator = -(-rows // owners), torch.Generator().manual_seed(1)
    memory = torch.full((owners, 3 + each * 4 + 2), torch.nan, dtype=dtype)
    blocks = memory[:, 3:-2].view(owners, each, 4)
    counts = iter([0, 1, 1])
    sink = GradientSink(blocks, rows, lambda: next(counts))
    weight = torch.zeros(rows, 4, dtype=dtype, requires_grad=True)
    expected = torch.zeros(rows, 4, dtype=dtype)
    for _ in range(3):
        grad, x = (torch.randn(5, n, generator=generator, dtype=dtype) for n in (rows, 4))
        y = LinearFunction.apply(x, weight, None, DEFAULT_GEMMS, None, sink)
        y.backward(grad)
        expected += grad.T @ x
    assert weight.grad is None
    in_rows = blocks.reshape(-1, 4)
    torch.testing.assert_close(in_rows[:rows], expected, rtol=1e-5, atol=1e-6)
    assert in_rows[rows:].isnan().all() and memory[:, :3].isnan().all()


@pytest.mark.parametrize("beta", [0, 1])
def test_a_batch_of_owners_is_their_gemms(beta):
    """A GPU's way, in a bucket that has other numbers between the owners' rows."""
    generator = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(5, n, generator=generator).double() for n in (6, 4))
    memory = torch.full((3, 3 + 8), torch.nan if beta == 0 else 2.0, dtype=torch.float64)
    sink = GradientSink(memory[:, 3:].view(3, 2, 4), 6, lambda: 1 / 0)
    add_batch_(sink, grad, x, beta)
    torch.testing.assert_close(sink.blocks_ORD.reshape(6, 4), 2.0 * beta + grad.T @ x)
    assert memory[:, :3].isnan().all() if beta == 0 else (memory[:, :3] == 2.0).all()


def test_a_product_without_such_a_gemm_is_returned():
    sink = GradientSink(torch.zeros(1, 2, 3), 2, lambda: 1 / 0)
    weight = torch.zeros(2, 3, requires_grad=True)
    gemms = DEFAULT_GEMMS._replace(add_wgrad=None)
    LinearFunction.apply(torch.ones(4, 3), weight, None, gemms, None, sink).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 4.0))


def test_nothing_is_summed_without_a_backward():
    sinks, weight = GradientSinks(), torch.zeros(2, 3)
    sink = GradientSink(torch.zeros(1, 2, 3), 2, lambda: 0)
    sinks.add(weight, sink)
    assert sinks.of(weight) is sink and sinks.of(torch.zeros(2, 3)) is None
    with torch.no_grad():
        assert sinks.of(weight) is None
