"""Bucketed gradient reduction on modules small enough to sum by hand."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from torch import nn

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.grad_norm import square_sum
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.all_reduce import BucketedDataParallel
from mtcli.kernels.gradient_sink import GradientSinks

NAMES = ["a", "b", "c", "unused"]
SIZE = 5  # elements of each: 20 bytes of float32


class Sum(nn.Module):
    """sum(a * x) + 2 sum(b * x) + 3 sum(c * x): gradients are x, 2 x and 3 x."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.zeros(SIZE, dtype=dtype)))

    def forward(self, x):
        return ((self.a + 2 * self.b + 3 * self.c) * x).sum()


def table(cut=None):
    return {name: Parameter(name, (SIZE,), (cut,), "normal", 0) for name in NAMES}


def made(runtime, bucket_bytes, dtype=torch.float32, least=torch.float32, **layout):
    module = Sum(dtype)
    groups = make_groups(ParallelLayout(runtime.world, **layout), runtime.rank, runtime.device)
    ownership = Ownership(groups, table(), sequence_parallel=True, shard=False)
    sinks = GradientSinks()
    return module, BucketedDataParallel({0: module}, ownership, bucket_bytes, sinks, least)


def x_of(rank, micro_batch):
    return torch.arange(SIZE, dtype=torch.float32) + 10.0 * rank + 100.0 * micro_batch


def reduced(runtime, bucket_bytes, steps=2, micro_batches=3):
    module, strategy = made(runtime, bucket_bytes)
    for _ in range(steps):  # the second step must not see the first's gradients
        strategy.before_step()
        for m in range(micro_batches):
            if m == micro_batches - 1:
                strategy.before_last_backward(0)
            module(x_of(runtime.rank, m)).backward()
        strategy.after_backward()
    left = [name for name, p in module.named_parameters() if p.grad is not None]
    return {n: v.clone() for n, v in strategy.gradients.items()}, len(strategy.buckets), left


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"), [(1e-6, 4), (20, 4), (40, 2), (60, 2), (79, 2), (80, 1), (1e9, 1)]
)
def test_gradients_are_summed_over_ranks_and_micro_batches_in_buckets_of_any_size(
    bucket_bytes, buckets
):
    x = sum(x_of(rank, m) for rank in range(2) for m in range(3))
    for views, count, left in run_ranks(2, reduced, bucket_bytes):
        assert count == buckets and not left
        for factor, name in enumerate(["a", "b", "c"], start=1):
            assert torch.equal(views[name], factor * x)
        assert not views["unused"].any(), "what no backward touches is zero"


def test_one_rank_adds_up_micro_batches_alone():
    ((views, *_),) = run_ranks(1, reduced, 40)
    assert torch.equal(views["b"], 2 * sum(x_of(0, m) for m in range(3)))


def overlap(runtime):
    """Which buckets are on their way after the last backward, and before it."""
    module, strategy = made(runtime, 20)
    strategy.before_step()
    seen = []
    for m in range(2):
        if m == 1:
            strategy.before_last_backward(0)
        module(x_of(runtime.rank, m)).backward()
        seen.append({n for b in strategy.buckets if b.work is not None for n in b.slots})
    strategy.after_backward()
    return seen


def test_buckets_leave_during_the_last_backward_and_not_before():
    for before, after in run_ranks(2, overlap):
        assert before == set() and after == {"a", "b", "c"}


def dtypes(runtime):
    return {
        dtype: made(runtime, 1e9, dtype)[1].buckets[0].flat.dtype
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }


def test_sums_are_kept_in_float32_or_wider():
    wide = {torch.bfloat16: torch.float32, torch.float32: torch.float32}
    assert run_ranks(1, dtypes) == [wide | {torch.float64: torch.float64}]


def narrow(runtime):
    """The dtypes of sums that may be bfloat16, and how many buckets of 20 bytes they are."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        buckets = made(runtime, 20, dtype, torch.bfloat16)[1].buckets
        found[dtype] = buckets[0].flat.dtype, len(buckets)
    return found


def test_sums_are_bfloat16_where_they_may_and_parameters_are():
    assert run_ranks(1, narrow) == [
        {
            torch.bfloat16: (torch.bfloat16, 2),  # of 10 bytes each
            torch.float16: (torch.float32, 4),
            torch.float32: (torch.float32, 4),
            torch.float64: (torch.float64, 4),
        }
    ]


def test_norms_of_narrow_gradients_are_summed_in_float32():
    gradients = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (999, 70)]
    narrow = [x.bfloat16() for x in gradients]
    exact = sum(x.double().square().sum().item() for x in narrow)
    assert float(square_sum(narrow)) == pytest.approx(exact, rel=2e-6)


def squares(runtime):
    module, strategy = made(runtime, 1e9, tp=2)
    strategy.before_step()
    strategy.before_last_backward(0)
    module(x_of(0, 0)).backward()
    strategy.after_backward()
    before = square_sum(strategy.counted_gradients())
    strategy.scale_gradients_(0.5)
    return before, square_sum(strategy.counted_gradients())


def test_a_replicated_parameter_counts_once_in_the_norm():
    total = 2.0 * x_of(0, 0)  # both tp ranks add the same partial sum
    expected = (1 + 4 + 9) * total.double().square().sum().item()
    answers = run_ranks(2, squares)
    assert sum(before for before, _ in answers) == pytest.approx(expected)
    assert answers[1] == (0.0, 0.0)
    assert answers[0][1] == pytest.approx(expected / 4)


def test_no_more_than_two_buckets_of_updated_weights_are_gathered_at_a_time():
    events = []

    def start(tensors):
        events.append(1)
        return lambda: events.append(-1)

    strategy = object.__new__(BucketedDataParallel)
    strategy.shards, strategy.gathering, strategy.gathers_ahead = {}, {}, False
    strategy.bucket_of = {}
    owners = SimpleNamespace(size=2)
    strategy.buckets = [SimpleNamespace(owners=owners, start_all_gather=start) for _ in range(5)]
    strategy.after_update()
    assert events.count(1) == 5 and sum(events) == 0 and max(accumulate(events)) == 2
