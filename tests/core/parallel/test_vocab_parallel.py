"""The GPU's way to the loss, interpreted, beside cross entropy of the whole product in float64."""

import importlib.util
from itertools import chain, repeat

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel import vocab_parallel
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.parallel.vocab_parallel import VocabEmbedding, VocabLoss
from mtcli.kernels.gradient_sink import GradientSink
from mtcli.kernels.triton_launch import interpreted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
T, D, SCALE = 8, 6, 0.25
VOCABS = [101, 128, 300]  # 128 of 2 shards: the second is all padding


def seeded(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_of(vocab):
    return torch.arange(T) * 37 % vocab


def weights_of(weighted):
    """Loss weights [T], or None; some are 0."""
    if not weighted:
        return None
    return torch.tensor([0.5, 0.0, 1.0, 0.75, 1.25, 1.0, 0.0, 0.25])


def lost(runtime, dtype, chunk_bytes, weighted, by_sink):
    """Of each vocabulary (its losses, its scaled sum, gradients of x and table, losses alone)."""
    vocab_parallel.LOSS_CHUNK_BYTES = chunk_bytes, chunk_bytes  # of this forked process
    with interpreted():
        weights = weights_of(weighted)
        return [_lost(runtime, dtype, vocab, weights, by_sink) for vocab in VOCABS]


def _lost(runtime, dtype, vocab, weights, by_sink):
    parameter = Parameter("table.weight", (vocab, D), ("tp", None), "normal", "first", padded=0)
    groups = make_groups(ParallelLayout(runtime.world, tp=runtime.world), runtime.rank, "cpu")
    build = TensorParallelLayers({parameter.name: parameter}, groups, dtype, sequence_parallel=True)
    table = VocabEmbedding("table", build)
    box = parameter.box(groups.layout, groups.rank)
    with torch.no_grad():
        table.weight.zero_()
        table.weight[: box.size[0]] = seeded(vocab, D, seed=1)[box.slices]
    x = build.my_tokens(seeded(T, D, seed=2)).to(dtype).requires_grad_()
    if by_sink:
        sums = torch.full((1, *table.weight.shape), torch.nan)
        sink = GradientSink(sums, len(table.weight), chain([0], repeat(1)).__next__)
        build.gradient_sinks.add(table.weight, sink)
        total, scaled = VocabLoss(table).loss(x, labels_of(vocab), weights, 3.0 * SCALE)
        scaled.backward()
        assert table.weight.grad is None
        grads, scaled = (x.grad, sums[0]), scaled.detach() / 3.0
    else:
        total, scaled = VocabLoss(table).loss(x, labels_of(vocab), weights, SCALE)
        (3.0 * scaled).backward()
        grads = x.grad, table.weight.grad
    with torch.no_grad():
        alone = VocabLoss(table).losses(x, labels_of(vocab))
    return total, scaled.detach(), grads, alone


# 300 columns of 4 bytes and less: one row at a time, 3 rows and all rows
@pytest.mark.parametrize("by_sink", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("tp", "dtype", "chunk_bytes"),
    [
        (1, torch.float32, 1),
        (1, torch.bfloat16, 3000),
        (2, torch.float32, 3 * 1024),
        (2, torch.float32, 2**20),
    ],
)
def test_the_loss_in_chunks_is_cross_entropy_whatever_the_chunks(
    tp, dtype, chunk_bytes, weighted, by_sink
):
    ranks = run_ranks(tp, lost, dtype, chunk_bytes, weighted, by_sink)
    weights = torch.ones(T).double() if not weighted else weights_of(True).double()
    # with weights fewer labels average their bfloat16 rounding
    tight = {torch.float32: 2e-6, torch.bfloat16: 8e-3 if weighted else 6e-3}[dtype]
    for vocab, parts in zip(VOCABS, zip(*ranks, strict=True), strict=True):
        whole = seeded(vocab, D, seed=1).to(dtype).double().requires_grad_()
        x = seeded(T, D, seed=2).to(dtype).double().requires_grad_()
        expected = F.cross_entropy(x @ whole.T, labels_of(vocab), reduction="none")
        expected.backward(3.0 * SCALE * weights)
        for total, scaled, _, alone in parts:
            torch.testing.assert_close(alone.double(), expected.detach(), rtol=tight, atol=tight)
            torch.testing.assert_close(
                total.double(), (expected.detach() * weights).sum(), rtol=tight, atol=0.0
            )
            assert by_sink or scaled == total * SCALE
            assert float(scaled) == pytest.approx(float(total) * SCALE, rel=1e-6)
        of_x, of_table = (torch.cat(grads) for grads in zip(*(p[2] for p in parts), strict=True))
        assert apart(of_x, x.grad) < tight
        assert (
            of_table.dtype == (torch.float32 if by_sink else dtype) and not of_table[vocab:].any()
        )
        assert apart(of_table[:vocab], whole.grad) < tight


def apart(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


def scored(runtime, dtype):
    """(log-probabilities, whether greedy) of each vocabulary."""
    groups = make_groups(ParallelLayout(runtime.world, tp=runtime.world), runtime.rank, "cpu")
    found = []
    for vocab in VOCABS:
        parameter = Parameter("t.weight", (vocab, D), ("tp", None), "normal", "first", padded=0)
        build = TensorParallelLayers({parameter.name: parameter}, groups, dtype, False)
        table, box = VocabEmbedding("t", build), parameter.box(groups.layout, groups.rank)
        logits = torch.full((T, len(table.weight)), 9.0, dtype=dtype)  # padding is above all others
        logits[:, : box.size[0]] = tied_logits(vocab)[:, box.slices[0]]
        found.append(VocabLoss(table).score(logits, targets_of(vocab)))
    return found


def tied_logits(vocab):
    """[T, vocab] whose largest of a row is there several times."""
    return seeded(T, vocab, seed=3).clamp(-2.0, 1.0)


def targets_of(vocab):
    """The first of a row's largest logits, the last of them, and others."""
    best = (tied_logits(vocab) == 1.0).int()
    last = vocab - 1 - best.flip(-1).argmax(-1)
    return torch.where(torch.arange(T) % 3 == 0, best.argmax(-1), last).where(
        torch.arange(T) % 3 < 2, labels_of(vocab)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_score_is_of_all_shards_and_of_equal_logits_the_first_is_greedy(tp, dtype):
    for parts in run_ranks(tp, scored, dtype):
        for vocab, (logprobs, greedy) in zip(VOCABS, parts, strict=True):
            logits, targets = tied_logits(vocab).to(dtype), targets_of(vocab)
            expected = logits.double().log_softmax(-1)[torch.arange(T), targets]
            torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
            first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
            assert torch.equal(greedy, first == targets) and greedy.any() and not greedy.all()


def test_chunks_fit_their_bytes_and_cover_every_row(monkeypatch):
    for tokens, columns, chunk_bytes, lengths in (
        (1000, 50, 2 * 50 * 300, [256, 256, 256, 232]),
        (1000, 50, 2 * 50 * 400, [384, 384, 232]),
        (10, 50, 2 * 50 * 4, [4, 4, 2]),
        (3, 50, 1, [1, 1, 1]),
        (5, 50, 2**28, [5]),
    ):
        x, weight = torch.empty(tokens, 2, dtype=torch.bfloat16), torch.empty(columns, 2)
        monkeypatch.setattr(vocab_parallel, "LOSS_CHUNK_BYTES", (chunk_bytes, chunk_bytes))
        rows = vocab_parallel.chunks(x, weight)
        assert [part.stop - part.start for part in rows] == lengths
        assert torch.equal(
            torch.cat([torch.arange(tokens)[part] for part in rows]), torch.arange(tokens)
        )
