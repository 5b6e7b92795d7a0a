"""The mean of replicas by signs, on tensors of odd sizes: the paper's figure 1 by hand."""

import pytest
import torch
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import Axis, make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.two_phase import Chunks, CompressedMean

SHAPES = {"a": (7, 3), "b": (1,), "c": (2, 11), "zeros": (5,), "d": (13,)}
STEPS = 6


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8, 40])
def test_chunks_are_whole_rows_and_tile_the_vector(replicas):
    rows = []
    for rank in range(replicas):
        chunks = Chunks(SHAPES, Axis("replicas", tuple(range(replicas)), rank, None, None))
        assert sum(chunks.lengths) == sum(chunks.sizes) == 62
        assert chunks.owned.stop - chunks.owned.start == chunks.lengths[rank]
        rows.append(chunks.own_rows())
    for name, shape in SHAPES.items():
        kept = [row for one in rows for row in range(shape[0])[one[name]]]
        assert kept == list(range(shape[0])), "each row has one server"
    assert max(chunks.lengths) <= 62 / replicas + 11, "equal but for a row"


def values(seed, step):
    """What a replica has: one tensor is always 0, and so is a row of another."""
    random = torch.Generator().manual_seed(1000 * seed + step)
    found = {n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in SHAPES.items()}
    found["zeros"].zero_()
    found["a"][4] = 0.0
    return found


def live():
    masks = {n: torch.ones(s, dtype=torch.bool) for n, s in SHAPES.items() if n in ("a", "zeros")}
    masks["a"][4] = masks["zeros"][:] = False
    return masks


COUNT = 62 - 3 - 5  # elements that are not always 0


def averaged(runtime, dtype, masked):
    layout = ParallelLayout(runtime.world, replicas=runtime.world)
    groups = make_groups(layout, runtime.rank, runtime.device)
    table = {n: Parameter(n, s, (None,) * len(s), "normal", 0) for n, s in SHAPES.items()}
    ownership = Ownership(groups, table, sequence_parallel=True, shard=False)
    like = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    mean, outputs = CompressedMean(like, ownership), []
    for step in range(STEPS):
        sent = ((n, x.to(dtype)) for n, x in values(runtime.rank, step).items())
        means = mean(sent, live() if masked else {}, COUNT if masked else 62)
        outputs.append({name: x.clone() for name, x in means.items()})
    return outputs, mean.errors, {n: (mean.rows[n], x) for n, x in mean.server_errors.items()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float64), (3, torch.float32)])
def test_what_signs_lose_is_in_the_errors(world, dtype, masked):
    """The sum of all means is that of the replicas' values, less their mean error and the
    server's: nothing else is lost. Every replica has the same means."""
    ranks = run_ranks(world, averaged, dtype, masked)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name in SHAPES:
        means = sum(step[name] for step in ranks[0][0])
        sums = sum(values(r, s)[name] for r in range(world) for s in range(STEPS)) / world
        error = sum(errors[name] for _, errors, _ in ranks) / world
        for _, _, servers in ranks:
            rows, part = servers[name]
            error[rows] += part
        torch.testing.assert_close((means + error).double(), sums, rtol=0, atol=tolerance)
        for outputs, *_ in ranks[1:]:
            for ours, first in zip(outputs, ranks[0][0], strict=True):
                assert torch.equal(ours[name], first[name])
    if masked:
        assert not any(step["zeros"].any() or step["a"][4].any() for step in ranks[0][0])


def by_hand(world, masks, count):
    """The means of each step, a sign at a time."""
    worker, server, found = [{} for _ in range(world)], {}, []
    mask = {n: masks.get(n, torch.ones(s, dtype=torch.bool)) for n, s in SHAPES.items()}

    def signs(of_one):
        scale = (sum(float((y**2).sum()) for y in of_one.values()) / count) ** 0.5
        return {n: scale * (2.0 * (y >= 0).double() - 1.0) * mask[n] for n, y in of_one.items()}

    for step in range(STEPS):
        sent = []
        for rank in range(world):
            y = {n: x + worker[rank].get(n, 0.0) for n, x in values(rank, step).items()}
            sent.append(signs(y))
            worker[rank] = {n: y[n] - sent[-1][n] for n in y}
        mean = {n: sum(q[n] for q in sent) / world + server.get(n, 0.0) for n in SHAPES}
        found.append(signs(mean))
        server = {n: mean[n] - found[-1][n] for n in SHAPES}
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_means_are_the_paper_s_by_hand(masked):
    masks, count = (live(), COUNT) if masked else ({}, 62)
    expected = by_hand(3, masks, count)
    for outputs, *_ in run_ranks(3, averaged, torch.float64, masked):
        for found, hand in zip(outputs, expected, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(found[name], hand[name], rtol=1e-12, atol=0)


def uncompressed(runtime, sent):
    groups = make_groups(
        ParallelLayout(runtime.world, replicas=runtime.world), runtime.rank, runtime.device
    )
    chunks = Chunks(SHAPES, groups.replicas)
    vector = torch.cat([x.flatten() for x in values(runtime.rank, 0).values()])
    chunks.mean_(vector, sent)
    return vector


@pytest.mark.parametrize("sent", [torch.float64, torch.bfloat16])
def test_an_uncompressed_mean_is_rounded_as_it_is_sent_and_summed_wide(sent):
    each = [torch.cat([x.flatten() for x in values(r, 0).values()]) for r in range(3)]
    expected = (sum(x.to(sent).double() for x in each) / 3).to(sent).double()
    for vector in run_ranks(3, uncompressed, sent):
        assert torch.equal(vector, expected)
