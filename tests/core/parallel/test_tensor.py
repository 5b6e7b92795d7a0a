"""Tensor parallel layers against the dense layer's closed form, and the loss against torch's."""

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import ColumnLinear, RowLinear, TensorParallelLayers
from mtcli.core.parallel.vocab_parallel import VocabEmbedding, VocabLoss
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.traffic import Traffic

T, D, H = 8, 6, 12  # tokens, columns, inner columns
SIZES = [(1, True), (2, True), (2, False), (4, True), (4, False)]  # tp, sequence parallel


def seeded(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(runtime, sequence_parallel, vocab=1):
    table = [
        Parameter("up.weight", (H, D), ("tp", None), "normal", 0),
        Parameter("up.bias", (H,), ("tp",), "zeros", 0),
        Parameter("down.weight", (D, H), (None, "tp"), "residual", 0),
        Parameter("down.bias", (D,), (None,), "zeros", 0),
        Parameter("table.weight", (vocab, D), ("tp", None), "normal", "first", padded=0),
    ]
    groups = make_groups(ParallelLayout(runtime.world, tp=runtime.world), runtime.rank, "cpu")
    named = {parameter.name: parameter for parameter in table}
    return TensorParallelLayers(named, groups, torch.float64, sequence_parallel)


def fill(parameter, name, whole, build):
    """Puts this rank's rectangle of a global tensor into a parameter, and nothing elsewhere."""
    box = build.table[name].box(build.groups.layout, build.groups.rank)
    with torch.no_grad():
        parameter.zero_()
        parameter[tuple(slice(n) for n in box.size)] = whole[box.slices]


def two_layers(runtime, sequence_parallel):
    made = build(runtime, sequence_parallel)
    up, down = ColumnLinear("up", made), RowLinear("down", made)
    fill(up.weight, "up.weight", seeded(H, D, seed=1), made)
    fill(up.bias, "up.bias", seeded(H, seed=2), made)
    fill(down.weight, "down.weight", seeded(D, H, seed=3), made)
    fill(down.bias, "down.bias", seeded(D, seed=4), made)
    x = made.my_tokens(seeded(T, D, seed=5)).requires_grad_()
    y = down(up(x))
    y.backward(made.my_tokens(seeded(T, D, seed=6)))
    grads = {"up.weight": up.weight, "up.bias": up.bias, "down.weight": down.weight}
    return y.detach(), x.grad, {n: p.grad for n, p in grads.items()}, down.bias.grad


@pytest.mark.parametrize(("tp", "sequence_parallel"), SIZES)
def test_a_column_and_a_row_layer_are_the_dense_layers(tp, sequence_parallel):
    a, b, c, d = seeded(H, D, seed=1), seeded(H, seed=2), seeded(D, H, seed=3), seeded(D, seed=4)
    x, dy = seeded(T, D, seed=5), seeded(T, D, seed=6)
    inner, d_inner = x @ a.T + b, dy @ c
    grads = {"up.weight": d_inner.T @ x, "up.bias": d_inner.sum(0), "down.weight": dy.T @ inner}
    ranks = run_ranks(tp, two_layers, sequence_parallel)
    join = torch.cat if sequence_parallel else (lambda parts: parts[0])
    torch.testing.assert_close(join([y for y, *_ in ranks]), inner @ c.T + d)
    torch.testing.assert_close(join([dx for _, dx, *_ in ranks]), d_inner @ a)
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        torch.testing.assert_close(torch.cat([r[2][name] for r in ranks], dim), grads[name])
    bias = [r[3] for r in ranks]  # partial sums under sequence parallelism, else each the whole
    torch.testing.assert_close(sum(bias) if sequence_parallel else bias[-1], dy.sum(0))


QUERIES, W = 4, 8  # query heads in all, and the columns of a head


def head_weights(kv_heads):
    """The table, and whole values of its two parameters."""
    shape, cut = (kv_heads, QUERIES // kv_heads + 2, W), ("tp", None, "tp")
    weight = Parameter("qkv.weight", (*shape, D), (*cut, None), "normal", 0)
    bias = Parameter("qkv.bias", shape, cut, "zeros", 0)
    values = {"qkv.weight": seeded(*shape, D, seed=1), "qkv.bias": seeded(*shape, seed=2)}
    return {"qkv.weight": weight, "qkv.bias": bias}, values


def some_heads(runtime, kv_heads, sequence_parallel):
    """(this rank's heads [T, _, W], gradient of x, others with their boxes, bytes sent forward)."""
    (table, values), tp, recorder = head_weights(kv_heads), runtime.world, FlightRecorder()
    groups = make_groups(ParallelLayout(tp, tp=tp), runtime.rank, "cpu", recorder=recorder)
    made = TensorParallelLayers(table, groups, torch.float64, sequence_parallel)
    layer, share = made.column_linear("qkv"), made.share_heads("qkv")
    boxes = {name: table[name].box(groups.layout, runtime.rank).slices for name in table}
    for name, parameter in (("qkv.weight", layer.weight), ("qkv.bias", layer.bias)):
        parameter.data.copy_(values[name][boxes[name]].reshape(parameter.shape))
    x = made.my_tokens(seeded(T, D, seed=5)).requires_grad_()
    recorder.traffic = Traffic()
    heads = share(layer(x)).view(T, -1, W)
    sent = {one.receiver: one.bytes for one in recorder.traffic.sent}
    heads.backward(seeded(*heads.shape, seed=10 + runtime.rank))
    grads = {"qkv.weight": layer.weight.grad, "qkv.bias": layer.bias.grad}
    found = {
        name: (grad.view(values[name][box].shape), box)
        for (name, grad), box in zip(grads.items(), boxes.values(), strict=True)
    }
    return heads.detach(), x.grad, found, sent


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (2, 1), (4, 2), (4, 1)])
def test_ranks_that_share_a_key_value_head_each_have_it_whole(tp, kv_heads, sequence_parallel):
    _, values = head_weights(kv_heads)
    x, sharers, queries = seeded(T, D, seed=5), max(1, tp // kv_heads), QUERIES // tp
    every = torch.einsum("td,gqwd->tgqw", x, values["qkv.weight"]) + values["qkv.bias"]
    d_every = torch.zeros_like(every)
    ranks = run_ranks(tp, some_heads, kv_heads, sequence_parallel)
    for rank, (heads, *_) in enumerate(ranks):
        group, first = rank // sharers, rank % sharers * queries
        chosen = [*range(first, first + queries), -2, -1]  # its queries, and key and value
        torch.testing.assert_close(heads, every[:, group, chosen])
        d_every[:, group, chosen] += seeded(*heads.shape, seed=10 + rank)
    dx = torch.einsum("tgqw,gqwd->td", d_every, values["qkv.weight"])
    parts = [dx_rank for _, dx_rank, *_ in ranks]
    torch.testing.assert_close(torch.cat(parts) if sequence_parallel else parts[-1], dx)
    grads = {
        "qkv.weight": torch.einsum("tgqw,td->gqwd", d_every, x),
        "qkv.bias": d_every.sum(0),
    }
    for _, _, found, _ in ranks:
        for name, (grad, box) in found.items():
            torch.testing.assert_close(grad, grads[name][box])


def test_ranks_that_share_a_head_send_each_its_columns_of_what_it_needs():
    for rank, (*_, sent) in enumerate(run_ranks(4, some_heads, 2, False)):
        columns = (1 + 2) * W // 2  # of the other's one query head, of key and of value: one half
        assert sent == {rank ^ 1: T * columns * 8}


# 255: the first id past a shard of 128 and the last; 128 of 2 shards: the second is all padding
VOCABS = [101, 128, 255, 300]
SCORED = [(101, False), (101, True), (300, False), (300, True)]  # vocabulary, equal maxima


def embed_and_lose(runtime, sequence_parallel):
    return [_embed_and_lose(runtime, sequence_parallel, vocab) for vocab in VOCABS]


def _embed_and_lose(runtime, sequence_parallel, vocab):
    made = build(runtime, sequence_parallel, vocab)
    table = VocabEmbedding("table", made)
    fill(table.weight, "table.weight", seeded(vocab, D, seed=1), made)
    ids, labels = ids_and_labels(vocab)
    embedded = table(ids)
    x = made.my_tokens(seeded(T, D, seed=2)).requires_grad_()
    losses = VocabLoss(table).losses(x, labels)
    losses.backward(seeded(T, seed=3))
    return embedded.detach(), losses.detach(), x.grad, table.weight.grad, made.groups.tp.rank


def ids_and_labels(vocab):
    """Ids at the borders of shards and of the vocabulary, and labels in another order."""
    edges = [0, 1, 126, 127, 128, 129, vocab - 2, vocab - 1]
    ids = torch.tensor([min(id, vocab - 1) for id in edges])
    return ids, ids.flip(0)


@pytest.mark.parametrize(("tp", "sequence_parallel"), SIZES)
def test_the_vocabulary_parallel_table_embeds_and_loses_like_torch(tp, sequence_parallel):
    by_vocab = zip(*run_ranks(tp, embed_and_lose, sequence_parallel), strict=True)
    for vocab, ranks in zip(VOCABS, by_vocab, strict=True):
        check_table(vocab, ranks, sequence_parallel)


def check_table(vocab, ranks, sequence_parallel):
    whole = seeded(vocab, D, seed=1).requires_grad_()
    x = seeded(T, D, seed=2).requires_grad_()
    ids, labels = ids_and_labels(vocab)
    expected = F.cross_entropy(x @ whole.T, labels, reduction="none")
    expected.backward(seeded(T, seed=3))
    join = torch.cat if sequence_parallel else (lambda parts: parts[0])
    torch.testing.assert_close(join([r[0] for r in ranks]), whole.detach()[ids])
    torch.testing.assert_close(join([r[2] for r in ranks]), x.grad)
    weight = torch.cat([r[3] for r in ranks])
    torch.testing.assert_close(weight[:vocab], whole.grad)
    assert not weight[vocab:].any(), "rows that pad the vocabulary get no gradient"
    for _, losses, *_ in ranks:
        torch.testing.assert_close(losses, expected.detach())


def score(runtime):
    return [_score(runtime, *case) for case in SCORED]


def _score(runtime, vocab, tied_maxima):
    made = build(runtime, False, vocab)
    table = VocabEmbedding("table", made)
    logits = score_logits(vocab, tied_maxima)
    padded = F.pad(logits, (0, table.weight.shape[0] * runtime.world - vocab), value=1e9)
    shard = padded.chunk(runtime.world, 1)[runtime.rank].contiguous()
    output = VocabLoss(table)
    whole = output.all_logits(shard, vocab)
    return *output.score(shard.clone(), ids_and_labels(vocab)[1]), whole


def score_logits(vocab, tied_maxima):
    logits = seeded(T, vocab, seed=9)
    if tied_maxima:  # the lowest of equal maxima is the argmax, on whichever shard it is
        logits[:, [0, vocab - 1]] = 9.0
        logits[: T // 2, 0] = -9.0
    return logits


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_scores_are_the_whole_vocabularys(tp):
    answers = [one for rank in run_ranks(tp, score) for one in zip(SCORED, rank, strict=True)]
    for (vocab, tied_maxima), (logprobs, greedy, whole) in answers:
        logits, targets = score_logits(vocab, tied_maxima), ids_and_labels(vocab)[1]
        expected = logits.log_softmax(-1)[torch.arange(T), targets]
        torch.testing.assert_close(logprobs, expected)
        lowest = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
        assert torch.equal(greedy, lowest == targets)
        assert torch.equal(whole, logits)
