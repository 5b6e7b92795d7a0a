"""Training in float8: layouts against one rank, checkpoints into other precisions, and the CLI.

Two layouts round a gradient's operands apart where they cut its tokens or its contraction, so their
gradients differ by a share of 2**-4, float8's rounding, which averages out over a norm.
"""

from functools import cache

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, run_config
from trained import train_and_save

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.inference.model import open_inference_model
from mtcli.core.inference.scoring import ScoreBatch

WIDE = {"hidden_size": 64, "ffn_hidden_size": 128, "num_layers": 2}
BLOCKS = {"hidden_size": 256, "ffn_hidden_size": 256, "num_kv_heads": 4, "num_layers": 2}
MODELS = {
    "gpt": GPT | WIDE,
    "llama": LLAMA | WIDE,
    "moe": MOE | WIDE | {"moe_ffn_hidden_size": 32},
    "blocks": LLAMA | BLOCKS,
}
TALL = {"micro_batch_size": 2}
ROWS = [  # model, ranks, parallel, scaling
    ("llama", 2, {"tp": 2, "sequence_parallel": False, "recompute": "full"}, "tensorwise"),
    ("blocks", 2, {"tp": 2}, "blockwise"),
    ("gpt", 2, {"pp": 2, "schedule": "zero_bubble"}, "rowwise"),
    ("llama", 2, {"cp": 2, "recompute": "selective"}, "rowwise"),
    ("llama", 2, {"zero": 3}, "rowwise"),
    ("moe", 2, {"tp": 2, "etp": 2, "dispatcher": "all_gather"}, "rowwise"),
]


def config_of(name, scaling, parallel=None, **train):
    settings = {"precision": "fp8", "fp8_scaling": scaling, "steps": 4} | train
    return run_config(MODELS[name], parallel=parallel or {}, batch=TALL, train=settings)


def trained(*arguments):
    """(loss, gradient norm) of each step of `train_and_save`."""
    return [(step.loss, step.grad_norm) for step in train_and_save(*arguments)]


@cache
def alone(name, scaling):
    return run_ranks(1, trained, config_of(name, scaling))[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_trains_as_one_rank_does_up_to_float8_s_rounding(row):
    name, world, parallel, scaling = row
    found = run_ranks(world, trained, config_of(name, scaling, parallel))[0]
    expected = alone(name, scaling)
    for (loss, _), (theirs, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(theirs, rel=2.5e-3)
    assert found[0][1] == pytest.approx(expected[0][1], rel=4e-3), "the first gradient's norm"
    if {"pp", "zero"} & set(parallel):
        assert found[0][0] == expected[0][0], "no scale is another, and no sum of the forward"


def test_each_scaling_is_another_rounding_than_bfloat16_s():
    losses = [alone("blocks", scaling)[0][0] for scaling in ("rowwise", "blockwise", "tensorwise")]
    wide = config_of("blocks", "rowwise", precision="bf16")
    losses.append(run_ranks(1, trained, wide, None, 0, 1)[0][0][0])
    assert len(set(losses)) == 4
    assert losses == pytest.approx([losses[-1]] * 4, rel=5e-3)


def test_activations_that_are_computed_again_are_the_same():
    again = config_of("llama", "rowwise", {"recompute": "full"})
    assert run_ranks(1, trained, again)[0] == alone("llama", "rowwise")


def test_a_checkpoint_is_that_of_bfloat16_and_a_run_goes_on_from_it(tmp_path):
    config = config_of("moe", "rowwise", {"ep": 2})
    whole = run_ranks(2, trained, config)[0]
    first = run_ranks(2, trained, config, tmp_path, 0, 2)[0]
    assert first + run_ranks(2, trained, config, tmp_path, 2, 4)[0] == whole
    wide = config_of("moe", "rowwise", precision="bf16")
    ((loss, _),) = run_ranks(1, trained, wide, tmp_path, 2, 3)[0]
    assert loss == pytest.approx(whole[2][0], rel=2.5e-3)


def test_evaluation_multiplies_in_float8_where_asked_and_a_row_s_score_is_its_own(tmp_path):
    run_ranks(1, trained, config_of("llama", "rowwise"), tmp_path, 0, 2)
    narrow, others, shared, wide = run_ranks(1, scores, tmp_path / "step-00000002")[0]
    assert narrow[0] == others[0] and narrow[1] != others[1]
    assert shared[0] != narrow[0], "all tokens share a factor"
    assert narrow != wide and narrow == pytest.approx(wide, rel=2.5e-3)


def scores(runtime, checkpoint):
    """Of rowwise float8, with other rows beside the first, in tensorwise float8, in bfloat16."""
    rowwise, tensorwise = "train.precision=fp8", "train.fp8_scaling=tensorwise"
    ways = [
        ([rowwise], 7),
        ([rowwise], 5),
        ([rowwise, tensorwise], 7),
        (["train.precision=bf16"], 7),
    ]
    opened = open_checkpoint(checkpoint)
    return [scored(open_inference_model(opened, way, runtime), factor) for way, factor in ways]


def scored(engine, factor):
    """The log-probabilities of two rows of tokens, of which the second follows from the factor."""
    tokens = torch.stack([torch.arange(16), factor * torch.arange(16)]) % engine.vocab_size
    places, at = torch.arange(16).expand(2, 16), torch.arange(32).view(2, 16)[:, :-1].flatten()
    batch = ScoreBatch(tokens, places, None, at, tokens[:, 1:].flatten())
    return engine.score(batch)[0].view(2, 15).double().sum(1).tolist()
