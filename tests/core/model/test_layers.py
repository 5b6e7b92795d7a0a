"""Dropout as a function of global numbers, and attention dropout written out."""

import math

import pytest
import torch
from tiny import GPT, LLAMA, run_config
from visibilities import Chunks, sees

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.visibility import Visibility
from mtcli.core.model.attention import Attention, attend_after
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import initialise
from mtcli.core.model.inputs import KVCache, make_inputs, token_positions
from mtcli.core.model.transformer import Dropout, rounded
from mtcli.core.parallel.attention_mask import AttentionMask, restarted
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.kernels.dropout import dropout_stream
from mtcli.kernels.random import keep_mask, stream_key

B, S = 2, 8


def alone():
    return make_groups(ParallelLayout(1), 0, torch.device("cpu"))


def test_any_rows_of_a_dropout_mask_are_those_of_the_whole():
    layer = Dropout(dropout_stream("site", 0.3, 7))
    x, numbers = torch.ones(40, 24), torch.arange(100, 140)
    unsharded = layer(x, numbers)
    for rows in (slice(0, 10), slice(10, 40), slice(39, 40), slice(3, 37, 2)):
        assert torch.equal(layer(x[rows], numbers[rows]), unsharded[rows])


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    drop, shape = 0.25, (500, 200)
    y = Dropout(dropout_stream("site", drop, 7))(torch.ones(shape), torch.arange(500))
    assert sorted(y.unique().tolist()) == pytest.approx([0.0, 1.0 / (1.0 - drop)])
    width = math.sqrt(drop / (1.0 - drop) / y.numel())  # of the mean of n elements
    assert abs(y.double().mean().item() - 1.0) < 4.0 * width


def test_dropout_differs_by_site_seed_and_token():
    x, numbers = torch.ones(20, 50), torch.arange(20)
    masks = [
        Dropout(dropout_stream("a", 0.5, 7))(x, numbers),
        Dropout(dropout_stream("b", 0.5, 7))(x, numbers),
        Dropout(dropout_stream("a", 0.5, 8))(x, numbers),
        Dropout(dropout_stream("a", 0.5, 7))(x, numbers + 20),
    ]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (mask == other).double().mean() < 0.6


def test_no_numbers_or_no_probability_is_no_dropout():
    x = torch.randn(4, 6)
    assert Dropout(dropout_stream("site", 0.5, 7))(x, None) is x
    assert Dropout(dropout_stream("site", 0.0, 7))(x, torch.arange(4)) is x


@pytest.mark.parametrize("masked", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "model", [GPT, LLAMA, LLAMA | {"attention_softcap": 0.3}], ids=["heads", "grouped", "capped"]
)
def test_attention_dropout_is_the_formula_one_head_and_token_at_a_time(model, causal, masked):
    config = run_config(model | {"attention_dropout": 0.4, "causal": causal}).model
    build = TensorParallelLayers(parameters(config), alone(), torch.float64)
    attention = Attention(1, config, build, seed=7)
    h, g, d = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = torch.randn(B, S, g, h // g + 2, d, dtype=torch.float64)
    numbers = torch.arange(B * S).view(B, S) + 1000
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
    documents = documents if masked else torch.zeros(B, S)
    inputs = make_inputs(
        config,
        torch.float64,
        torch.zeros(B, S, dtype=torch.int64),
        positions=restarted(documents),
        documents=documents if masked else None,
        numbers=numbers,
    )
    attention.table = None
    mixed = attention.mix(qkv.view(B * S, -1), inputs).view(B, S, h, d)
    key = stream_key(7, "dropout", "blocks.1.attention.probabilities")
    for b in range(B):
        for head in range(h):
            group, query = divmod(head, h // g)
            q, k, v = (qkv[b, :, group, i] for i in (query, -2, -1))
            for t in range(S):
                seen = torch.arange(t + 1 if causal else S)
                seen = seen[documents[b, seen] == documents[b, t]]
                scores, cap = k[seen] @ q[t] / math.sqrt(d), config.attention_softcap
                p = (cap * (scores / cap).tanh() if cap else scores).softmax(0)
                index = (numbers[b, t] * h + head) * S + seen
                kept = keep_mask(key, index, 0.4) / 0.6
                torch.testing.assert_close(mixed[b, t, head], (p * kept) @ v[seen])


def made(model, **sections):
    config = run_config(model, **sections)
    (stage,) = build_stages(config, alone()).values()
    shards = unsharded({0: stage}, parameters(config.model))
    initialise(shards, config.model, alone(), config.seed, torch.float32)
    return config, stage


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_stage_holds_every_parameter_under_its_canonical_name(model):
    config, stage = made(model)
    layout = ParallelLayout(1)
    expected = {n: p.stored_shape(layout) for n, p in parameters(config.model).items()}
    assert {n: tuple(p.shape) for n, p in stage.named_parameters()} == expected


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_precision_is_the_dtype_of_weights_and_activations(precision, dtype):
    config, stage = made(LLAMA, train={"precision": precision})
    assert {p.dtype for p in stage.parameters()} == {dtype}
    ids = torch.arange(S).view(1, S)
    inputs = make_inputs(config.model, dtype, ids, labels=ids)
    x_TD = stage(None, inputs)
    assert x_TD.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert stage.losses(x_TD, inputs).dtype == wide


@pytest.mark.parametrize(("hidden", "scale"), [(2304, 48.0), (2560, 50.5), (5376, 73.5)])
def test_gemma_s_scale_of_embeddings_is_rounded_to_their_dtype(hidden, scale):
    assert rounded(hidden**0.5, torch.bfloat16) == scale
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert rounded(hidden**0.5, dtype) == torch.tensor(hidden**0.5, dtype=dtype).item()
    for precision, factor in (("bf16", 4.90625), ("fp32", torch.tensor(24.0).sqrt().item())):
        _, stage = made(LLAMA | {"embedding_scale": 24**0.5} | WIDE, train={"precision": precision})
        assert stage.embedding_scale == factor


WIDE = {"hidden_size": 24}
WINDOWED = [Visibility(2, 0), Visibility(), Visibility(4, 0), Visibility(0, 0)]


@pytest.fixture(
    params=[{}, {"attention_softcap": 0.3}, {"attention_sinks": True}],
    ids=["plain", "capped", "with sinks"],
)
def windowed(request):
    """A stage whose layers see differently far, and its model."""
    config, stage = made(LLAMA | request.param | {"init_std": 0.3})
    stage.double().requires_grad_(False)
    for block, visibility in zip(stage.blocks.values(), WINDOWED, strict=True):
        block.attention.visibility = visibility
    return config.model, stage


def alone_of(model, stage, ids):
    return stage(None, make_inputs(model, torch.float64, ids[None]))


def test_cached_steps_of_layers_with_windows_are_the_whole_row_at_once(windowed):
    model, stage = windowed
    ids, cache, outputs = torch.arange(14) % 11, KVCache(), []
    for start, stop in ((0, 6), (6, 7), (7, 11), (11, 14)):
        positions, new = torch.arange(start, stop)[None], ids[None, start:stop]
        given = {"positions": positions, "cache": cache}
        outputs.append(stage(None, make_inputs(model, torch.float64, new, **given)))
    torch.testing.assert_close(torch.cat(outputs), alone_of(model, stage, ids))


@pytest.mark.parametrize("branches", [1, 2])
def test_rows_after_a_prefix_of_layers_with_windows_are_as_if_alone(windowed, branches):
    model, stage = windowed
    before, prefix = torch.arange(5) % 7, KVCache()
    stage(None, make_inputs(model, torch.float64, before[None], cache=prefix))
    trunk, ends = torch.tensor([3, 1, 4]), torch.tensor([[9, 2, 6, 5], [8, 7, 9, 3]])[:branches]
    row = torch.cat([trunk, *ends])
    positions = torch.cat([torch.arange(3), *[torch.arange(3, 7)] * branches])[None] + 5
    paths = torch.ones(len(row), len(row), dtype=torch.bool).tril()
    paths[7:, 3:7] = False
    given = {"positions": positions, "prefix": prefix}
    given |= {"paths": paths[None]} if branches > 1 else {}
    found = stage(None, make_inputs(model, torch.float64, row[None], **given))
    for number, end in enumerate(ends):
        alone = alone_of(model, stage, torch.cat([before, trunk, end]))[5:]
        torch.testing.assert_close(found[:3], alone[:3])
        torch.testing.assert_close(found[3 + 4 * number : 7 + 4 * number], alone[3:])


def test_a_token_moves_no_output_further_than_the_windows_reach(windowed):
    model, stage = windowed
    ids = torch.arange(14) % 11
    stage.blocks["1"].attention.visibility = Visibility(1, 0)
    rows = ids, ids.index_fill(0, torch.tensor(2), 12)
    plain, changed = (alone_of(model, stage, row) for row in rows)
    moved = plain != changed
    assert moved.any(1).nonzero().flatten().tolist() == [*range(2, 2 + 2 + 1 + 4 + 0 + 1)]


def test_padding_longer_than_the_context_has_positions_of_the_context():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
    model = run_config(GPT | {"max_seq_len": 4}, batch={"seq_len": 4}).model
    assert token_positions(documents, model).tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 3],
        [0, 1, 2, 3, 3, 3, 3, 3],
    ]


@pytest.mark.parametrize("visibility", [Visibility(), Visibility(8, 0), Chunks()], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_follow_a_prefix_see_what_they_see_behind_it(visibility, packed):
    rows, size, before = 3, 5, 6
    config, random = run_config(LLAMA).model, torch.Generator().manual_seed(3)
    tokens = torch.zeros(rows, size, dtype=torch.int64)
    positions = before + torch.arange(size).repeat(rows, 1)
    paths = torch.ones(size, size).tril().bool().repeat(rows, 1, 1) if packed else None
    inputs = make_inputs(config, torch.float64, tokens, positions=positions, paths=paths)
    q, k, v = torch.randn(3, rows, 2, size, 4, dtype=torch.float64, generator=random)
    prefix = torch.randn(2, 1, 2, before, 4, dtype=torch.float64, generator=random)
    mixed = attend_after((prefix[0], prefix[1]), (q, k, v), AttentionMask(visibility), inputs)
    keys, values = (
        torch.cat([ahead.expand(rows, -1, -1, -1), x], 2)
        for ahead, x in zip(prefix, (k, v), strict=True)
    )
    mask = torch.tensor(
        [[sees(visibility, before + i, j) for j in range(before + size)] for i in range(size)]
    )
    scores = (q @ keys.mT / 2.0).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(mixed, scores.softmax(-1) @ values)
