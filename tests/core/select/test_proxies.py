"""Proxies against gradients of transformers' GPT-2 by autograd, on any layout; their sketch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from indexed_dataset import write_dataset
from ranks import run_ranks

from mtcli.core.data.subset import TokenSequences
from mtcli.core.inference.model import open_model
from mtcli.core.select.coreset import Quota, Work, choose, evenly_weighed, judge, random_orders
from mtcli.core.select.distance_sketch import COPIES, Sketch
from mtcli.core.select.proxies import sequence_proxies

SEQ_LEN, VOCAB = 12, 101


@pytest.fixture
def prefix(tmp_path):
    """Token data of 38 sequences, the last ten of which are the first ten again."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 28 * SEQ_LEN)
    write_dataset(tmp_path / "data", [np.tile(tokens, 2)[: 38 * SEQ_LEN + 1]], np.dtype("<u2"))
    return str(tmp_path / "data")


def proxies(runtime, folder, prefix, overrides, *kinds):
    """The proxies of each kind, by one model."""
    model = open_model(folder, [*overrides, "train.precision=fp64"], runtime).scorer
    sequences, found = TokenSequences([prefix], "1", SEQ_LEN), []
    for kind in kinds:
        told = []
        found.append(sequence_proxies(model, sequences, kind, told.append).double().numpy())
        assert sum(told) == len(sequences) == 38
    return found


def gradients(model, prefix):
    """(the mean loss's gradients by logits summed over tokens [n, V], by the last layer's weight
    [n, V, D], mean hidden states [n, D]) by autograd."""
    rows = torch.from_numpy(TokenSequences([prefix], "1", SEQ_LEN).rows(np.arange(38)))
    of_logits, of_weights, features = [], [], []
    model = model.double().eval()
    for row in rows:
        hidden = model.transformer(row[None, :-1]).last_hidden_state[0].detach()
        weight = model.lm_head.weight.detach().clone().requires_grad_()
        logits = hidden @ weight.T
        logits.retain_grad()
        F.cross_entropy(logits, row[1:]).backward()
        of_logits.append(logits.grad.sum(0))
        of_weights.append(weight.grad)
        features.append(hidden.mean(0))
    return [torch.stack(part).numpy() for part in (of_logits, of_weights, features)]


LAYOUTS = {
    "1": [],
    "2": [],
    "2, and the second shard of the vocabulary is all padding": ["parallel.tp=2"],
    "4 in a pipeline": ["parallel.tp=2", "parallel.pp=2"],
    "4 in two dimensions": ["parallel.tp=4", "parallel.tp_mode=2d"],
}


def test_proxies_are_the_last_layers_gradients_on_every_layout(gpt2, prefix, subtests):
    model, checkpoint = gpt2
    of_logits, of_weights, features = gradients(model, prefix)
    flat = torch.from_numpy(of_weights).flatten(1)
    sketched = torch.zeros(len(flat), 256, dtype=torch.float64)
    Sketch(flat.shape[1], 256, 1234).add(sketched, flat, 0)
    kinds = {  # the formula, and its tolerances
        "gradient": (of_logits, 1e-5, 1e-7),
        "features": (features, 1e-5, 1e-7),
        "kronecker": (sketched.numpy(), 1e-4, 1e-6),
    }
    for name, layout in LAYOUTS.items():
        arguments = (str(checkpoint.folder), prefix, layout, *kinds)
        for of_kinds in run_ranks(int(name[0]), proxies, *arguments):
            for found, (expected, rtol, atol) in zip(of_kinds, kinds.values(), strict=True):
                with subtests.test(name):
                    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_sequences_of_the_same_tokens_have_the_same_bits(gpt2, prefix):
    ((found,),) = run_ranks(1, proxies, str(gpt2[1].folder), prefix, [], "kronecker")
    assert np.array_equal(found[28:], found[:10])
    assert len(np.unique(found, axis=0)) == 28


def test_the_bound_holds_for_true_last_layer_gradients_and_their_error_is_below_random(
    gpt2, prefix
):
    model, checkpoint = gpt2
    of_logits, of_weights, _ = gradients(model, prefix)
    ((found,),) = run_ranks(1, proxies, str(checkpoint.folder), prefix, [], "gradient")
    points, groups = torch.from_numpy(found).float(), [np.arange(38)]
    from mtcli.core.parallel.groups import world_axis
    from mtcli.core.runtime.health.flight_recorder import FlightRecorder

    work = Work(world_axis(0, 1, FlightRecorder()), torch.device("cpu"), 0)
    chosen = choose(points, groups, Quota([8]), work)

    def error(subset, truth):
        flat = truth.reshape(38, -1)
        return np.linalg.norm(flat.sum(0) - subset.weights @ flat[subset.indices])

    assert error(chosen, of_logits) <= chosen.bound * (1 + 1e-5)
    random = [
        evenly_weighed(judge(points, groups, random_orders(groups, [8], seed), work), groups)
        for seed in range(20)
    ]
    assert error(chosen, of_logits) < np.mean([error(one, of_logits) for one in random])
    assert chosen.bound < min(one.bound for one in random)


@pytest.mark.parametrize("size", [3000, 40_000])
def test_a_sketch_keeps_squared_distances_to_its_stated_error(size):
    """Differences of a few large elements and many small ones, as those of p - y are."""
    random = np.random.default_rng(size)
    ratios = []
    for seed in range(200):
        x = random.normal(size=size) * (np.arange(1, size + 1) ** -0.8)
        out = torch.zeros(1, 256, dtype=torch.float64)
        Sketch(size, 256, seed).add(out, torch.from_numpy(x)[None], 0)
        ratios.append(float(out.square().sum()) / float(x @ x))
    stated = (2.0 / 256) ** 0.5
    assert abs(np.mean(ratios) - 1.0) < 4.0 * stated / 200**0.5
    assert 0.4 * stated < np.std(ratios) < 1.2 * stated


def test_the_sketches_of_the_parts_of_a_vector_add_up_and_short_ones_are_kept_whole():
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 1000)))
    whole, parts = (torch.zeros(3, 64, dtype=torch.float64) for _ in range(2))
    sketch = Sketch(1000, 64, 7)
    sketch.add(whole, x, 0)
    for first in range(0, 1000, 300):
        sketch.add(parts, x[:, first : first + 300], first)
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)
    short = torch.zeros(3, 60, dtype=torch.float64)
    assert Sketch(60, 64, 7).width == 60 and 64 % COPIES == 0
    Sketch(60, 64, 7).add(short, x[:, :60], 0)
    assert torch.equal(short, x[:, :60])
