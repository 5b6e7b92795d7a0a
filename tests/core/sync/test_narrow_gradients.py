"""Sums of gradients in bfloat16 beside those in float32, of the same gradients.

A rounding to bfloat16 is 2**-7 / sqrt(12) of a number's power of two, 0.0016 of the number. Of the
3 micro-batches of 2 ranks up to 5 sums are rounded, most of them of fewer terms: 0.0016 sqrt(5 / 2)
= 0.0025 of the norm of a gradient.
"""

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.embedding import embedding
from mtcli.kernels.gemm import set_bfloat16_in_float32
from mtcli.kernels.gradient_sink import GradientSink

ROUNDED = 0.004  # of a gradient's norm
LAYOUTS = {
    "one rank": (1, {}),
    "replicas": (2, {}),
    "many buckets": (2, {"bucket_mib": 0.001}),
    "owners": (2, {"zero": 1}),
    "owners of rows that do not divide": (3, {"zero": 1, "model": LLAMA}),
    "shards": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "recomputed experts of ranks": (2, {"model": MOE, "ep": 2, "zero": 1, "recompute": "full"}),
    "zero bubble": (2, {"pp": 2, "schedule": "zero_bubble", "model": LLAMA}),
}


def config_of(gradients, steps=1, model=GPT, shards=1, optimizer=None, **parallel):
    return run_config(
        model,
        batch={"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 3 * shards},
        optimizer=optimizer or {"clip": 0.0},  # which would scale wide sums in place
        train={"precision": "bf16", "gradients": gradients, "steps": steps},
        parallel=parallel,
    )


def trained(runtime, config, in_float32=False):
    """(the first step's reduced gradients, its norm, all losses) of a rank."""
    set_bfloat16_in_float32(in_float32)
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    first = trainer.train_step(loader)
    gradients = {n: x.clone() for n, x in trainer.strategy.gradients.items()}
    losses = [first.loss] + [trainer.train_step(loader).loss for _ in range(config.train.steps - 1)]
    loader.close()
    set_bfloat16_in_float32(False)
    return gradients, first.grad_norm, losses


def both(name, steps=1, **options):
    """[(rank's results with narrow sums, with wide ones)], of equal sums of weights."""
    world, parallel = LAYOUTS[name]
    model_ranks = parallel.get("tp", 1) * parallel.get("pp", 1)
    given = {"shards": world // model_ranks, "steps": steps} | parallel | options
    runs = (run_ranks(world, trained, config_of(kind, **given)) for kind in ("bf16", "fp32"))
    return list(zip(*runs, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_narrow_sums_are_the_wide_ones_to_their_rounding(name):
    for (narrow, norm, _), (wide, expected, _) in both(name):
        dtypes = {x.dtype for x in narrow.values()}
        assert dtypes == {torch.float32 if name == "shards" else torch.bfloat16}
        errors = {}
        for parameter, sums in wide.items():
            errors[parameter] = (narrow[parameter].float() - sums).norm().item()
        whole = torch.stack([x.norm() for x in wide.values()]).norm().item()
        rounded = sum(x**2 for x in errors.values()) ** 0.5 / whole
        assert 0.0003 < rounded < ROUNDED, rounded
        for parameter, error in errors.items():
            bound = 2 * ROUNDED * wide[parameter].norm().item()
            assert error <= bound, (parameter, error, bound)
        assert norm == pytest.approx(expected, rel=1e-3)


def test_sums_are_as_near_where_a_pass_adds_what_gemms_made_in_float32():
    """On a CPU whose GEMMs of bfloat16 are those of float32 no GEMM adds to a narrow sum."""
    configs = [config_of(kind) for kind in ("bf16", "fp32")]
    (narrow, *_), (wide, *_) = (run_ranks(1, trained, config, True)[0] for config in configs)
    for parameter, sums in wide.items():
        error = (narrow[parameter].float() - sums).norm().item()
        assert error <= 2 * ROUNDED * sums.norm().item(), parameter


ADAMW = {"name": "adamw", "lr": 3e-3}
MUON = {"name": "muon", "lr": 1e-2, "other": {"lr": 3e-3}}


@pytest.mark.parametrize(
    ("name", "optimizer"), [("one rank", ADAMW), ("shards", ADAMW), ("owners", MUON)], ids=str
)
def test_a_run_with_narrow_sums_stays_near_the_one_with_wide_ones(name, optimizer):
    """Losses of 20 steps of 12 micro-batches, all of them clipped, fall by 0.14 or 0.16 of 4.6. On
    one rank they are at most 1 part in 425 of that apart."""
    rule = optimizer | {"clip": 0.05}
    for (_, _, narrow), (_, _, wide) in both(name, steps=20, shards=4, optimizer=rule):
        assert wide[0] - wide[-1] > 0.12
        gaps = [abs(a - b) for a, b in zip(narrow, wide, strict=True)]
        assert 0.0 < max(gaps) < (wide[0] - wide[-1]) / 100, gaps


@pytest.mark.parametrize("owners", [1, 2])
def test_a_token_s_many_gradients_are_not_lost_in_a_narrow_sum(owners, monkeypatch):
    """1500 ones are 1500 to 1 part in 256; index_put_, a GPU's way, rounds after each of them, and
    would stay at 256."""

    def put(rows, dim, at, x):
        return rows.index_put_((at,), x, accumulate=True)

    monkeypatch.setattr(torch.Tensor, "index_add_", put)
    memory = torch.zeros(owners, 6 // owners, 2, dtype=torch.bfloat16)
    counts = iter([0, 1])
    sink = GradientSink(memory, 6, lambda: next(counts))
    table = torch.zeros(6, 2, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.tensor([4] * 1500 + [1] * 3 + [5, 0])
    for _ in range(2):
        embedding(ids, table, sink).sum().backward()
    rows = memory.reshape(6, 2).float()
    expected = 2.0 * torch.bincount(ids, minlength=6)[:, None].expand(6, 2)
    torch.testing.assert_close(rows, expected, rtol=2**-8, atol=0)
    assert table.grad is None
