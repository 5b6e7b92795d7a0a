"""Padding is no token to a router: the same texts in any number of rows have the same step."""

from contextlib import closing

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import MOE, run_config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.inputs import make_inputs
from mtcli.core.model.router import Router
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
S, VOCAB = 16, MOE["vocab_size"]
LENGTHS = (9, 3, 5, 11, 2, 7, 4, 8, 6, 3, 5, 10, 2)  # of 13 texts


class Packed:
    """13 texts in so many rows: each in the first in which it has room."""

    def __init__(self, num_rows):
        random = np.random.default_rng(4)
        shape = num_rows, S + 1
        self.tokens, self.texts = np.full(shape, 7, np.int64), np.zeros(shape, np.int32)
        self.weights, self.is_padding = np.zeros(shape, np.float32), np.ones(shape, bool)
        ends, counts = np.zeros(num_rows, int), np.zeros(num_rows, int)
        for number, length in enumerate(LENGTHS):
            row = next(r for r in np.roll(range(num_rows), -number) if ends[r] + length <= S)
            at = slice(ends[row], ends[row] + length)
            self.tokens[row, at] = random.integers(0, VOCAB, length)
            self.weights[row, at] = np.append(0.0, random.integers(0, 2, length - 1))
            self.is_padding[row, at] = False
            ends[row], counts[row] = at.stop, counts[row] + 1
            self.texts[row, at.stop :] = counts[row]

    def __len__(self):
        return len(self.tokens)

    def batch(self, start, count):
        return self.tokens[start : start + count]

    def documents(self, start, count):
        return self.texts[start : start + count]

    def loss_weights(self, start, count):
        return self.weights[start : start + count, 1:]

    def padding(self, start, count):
        return self.is_padding[start : start + count, :-1]


def step(runtime, num_rows, parallel):
    """(loss, gradient norm, tokens, largest load, moved biases) of a step on all texts."""
    losses = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2, "sequence_aux_loss_coeff": 0.0}
    losses |= {"router_bias_update_rate": 0.1}
    config = run_config(
        MOE | losses | {"init_std": 0.3, "max_seq_len": S},
        batch={"seq_len": S, "micro_batch_size": num_rows, "global_batch_size": num_rows},
        data={"document_mask": True, "document_positions": True},
        train={"precision": "fp64", "matmul": "strict"},
        optimizer={"clip": 0.0},
        parallel=parallel,
    )
    trainer = Trainer(config, runtime)
    initialise(trainer)
    with closing(MicroBatchLoader(Packed(num_rows), config, trainer.groups)) as loader:
        made = trainer.train_step(loader)
    shards = trainer.strategy.shards.items()
    biases = {n: s.tensor.tolist() for n, s in shards if n.endswith("router.bias")}
    return made.loss, made.grad_norm, made.tokens, made.expert_load, biases


@pytest.mark.parametrize("num_rows", [8, 9, 12])
def test_a_step_is_the_same_in_however_many_rows_its_texts_are(num_rows):
    loss, norm, tokens, load, biases = step(ALONE, 7, {})
    assert tokens == sum(LENGTHS) and any(any(bias) for bias in biases.values())
    more = step(ALONE, num_rows, {})
    assert more[:3] == (pytest.approx(loss, rel=1e-12), pytest.approx(norm, rel=1e-10), tokens)
    assert more[3:] == (load, biases)


def test_ranks_that_share_rows_agree_on_what_is_padding():
    expected = step(ALONE, 8, {})
    for found in run_ranks(4, step, 8, {"tp": 2, "cp": 2, "etp": 2}):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-10)
        assert found[2:] == expected[2:]


def router_of(changes):
    model = run_config(MOE | {"num_experts": 8, "top_k": 2} | changes).model
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    build = TensorParallelLayers(parameters(model), groups, torch.float64)
    router = Router("blocks.0.mlp.router", model, build)
    with torch.no_grad():
        shape = router.weight.shape
        router.weight.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    return model, router


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_the_balancing_loss_is_that_of_transformers_with_its_attention_mask():
    alone = {"aux_loss_coeff": 0.5, "sequence_aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}
    model, router = router_of(alone)
    x = random(4 * S, model.hidden_size).requires_grad_()
    padding = random(4, S) < -0.5
    inputs = make_inputs(
        model, torch.float64, torch.zeros(4, S, dtype=torch.long), padding=padding, aux_scale=0.25
    )
    router(x, inputs)[0].backward(torch.zeros_like(x))
    y = x.detach().requires_grad_()
    theirs = load_balancing_loss_func((y @ router.weight.T,), 8, 2, (~padding).long())
    ours = 0.25 * 0.5 * int((~padding).sum()) * theirs / model.top_k  # theirs sums shares to top_k
    ours.backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("scope", ["full_sequence", "sub_sequence"])
def test_padding_takes_no_expert_s_capacity_and_gives_none(policy, scope):
    changes = {"capacity_factor": 0.6, "drop_policy": policy, "drop_scope": scope}
    model, router = router_of(changes)
    x, filled = random(S, model.hidden_size), 5  # in front, where a token is kept first

    def kept(first, padding=None):
        tokens = torch.zeros(1, S - first, dtype=torch.long)
        inputs = make_inputs(model, torch.float64, tokens, padding=padding)
        return router(x[first:], inputs)[1].kept

    alone, padded = kept(filled), kept(0, torch.arange(S)[None] < filled)
    assert torch.equal(padded[filled:], alone) and not padded[:filled].any()
    assert not torch.equal(kept(0)[filled:], alone), "the case is a case"
