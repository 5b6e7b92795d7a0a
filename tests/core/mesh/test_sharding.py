"""What ranks hold: slices tile every tensor on any layout, and gradients are partial sums."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter, boxes_of_at_most, owned_rows

GPT = ModelConfig(num_layers=1, hidden_size=32, num_heads=4, vocab_size=301, max_seq_len=8)
LLAMA = ModelConfig(
    architecture="llama", num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=4,
    ffn_hidden_size=24, vocab_size=700, max_seq_len=8,
)  # fmt: skip
TWO_KEYS = LLAMA.model_copy(update={"num_kv_heads": 2, "qkv_bias": True})
QWEN = ModelConfig(
    architecture="qwen2-moe", num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=4,
    ffn_hidden_size=8, moe_ffn_hidden_size=8, shared_expert_ffn_hidden_size=8, num_experts=8,
    top_k=2, vocab_size=260, max_seq_len=8,
)  # fmt: skip


@st.composite
def runs(draw):
    """A model and a layout that divides its heads, widths and experts."""
    model = draw(st.sampled_from([GPT, LLAMA, TWO_KEYS, QWEN]))
    tp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4, 8], [1, 2], [1, 2, 4]))
    stage = tp * cp * dp
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if stage % n == 0])) if model is QWEN else 1
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if stage // ep % n == 0]))
    etp = etp if model is QWEN else 1
    return model, ParallelLayout(stage, tp=tp, cp=cp, ep=ep, etp=etp)


@settings(max_examples=40, deadline=None)
@given(runs())
def test_the_primary_slices_tile_every_tensor_exactly_once(run):
    model, layout = run
    for parameter in parameters(model).values():
        held = np.zeros(parameter.shape, dtype=int)
        for rank in range(layout.world):
            if parameter.is_primary(layout, rank):
                held[parameter.box(layout, rank).slices] += 1
        assert (held == 1).all(), parameter.name


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(1, 5))
def test_the_rows_that_owners_share_are_blocks_that_tile_the_slice_in_order(run, owners):
    model, layout = run
    for parameter in parameters(model).values():
        whole = np.arange(parameter.numel).reshape(parameter.shape)
        local, stored = parameter.local_shape(layout), parameter.stored_shape(layout)
        assert prod(stored) == prod(local) and len(stored) <= 2
        for rank in range(layout.world):
            mine = np.full(local, -1)  # as it lies in memory, padding marked
            box = parameter.box(layout, rank)
            mine[box.inside] = whole[box.slices]
            mine, share = mine.reshape(stored), -(-stored[0] // owners)
            for first in range(0, stored[0], share):
                part = mine[first : first + share]
                found = np.full_like(part, -1)
                for rows, at in parameter.row_boxes(layout, rank, slice(first, first + len(part))):
                    found[rows] = whole[at.slices].reshape(found[rows].shape)
                assert (found == part).all(), parameter.name


@settings(max_examples=40, deadline=None)
@given(runs())
def test_ranks_apart_only_along_replicated_axes_hold_the_same_slice(run):
    model, layout = run
    for parameter in parameters(model).values():
        grid = layout.experts if parameter.is_expert else layout.attention
        for group in grid.groups(*parameter.replicated_over(layout)):
            slices = {parameter.box(layout, rank) for rank in group}
            assert len(slices) == 1, parameter.name
            assert sum(parameter.is_primary(layout, rank) for rank in group) == 1


@settings(max_examples=40, deadline=None)
@given(runs())
def test_a_rank_allocates_at_least_its_slice_and_only_vocabularies_are_padded(run):
    model, layout = run
    for parameter in parameters(model).values():
        local = parameter.local_shape(layout)
        for rank in range(layout.world):
            size = parameter.box(layout, rank).size
            if parameter.padded is None:
                assert size == local, parameter.name
            else:
                assert size[1:] == local[1:]
                assert size[0] <= local[0]
                assert local[0] % 128 == 0


def test_a_padded_vocabulary_leaves_the_last_ranks_short_or_empty():
    embedding = parameters(GPT)["embedding.weight"]  # 301 rows over 4 ranks of 128
    layout = ParallelLayout(4, tp=4)
    assert embedding.local_shape(layout) == (128, 32)
    rows = [embedding.box(layout, rank) for rank in range(4)]
    assert [(r.start[0], r.size[0]) for r in rows] == [(0, 128), (128, 128), (256, 45), (301, 0)]


@pytest.mark.parametrize("tp, rows", [(1, 50304), (2, 25216), (8, 6400)])
def test_gpt_2_s_vocabulary_is_padded_as_megatron_pads_it(tp, rows):
    # to a multiple of 128 * tp: 50304, 50432 and, at tp = 8, the paper's 51200 (arXiv:1909.08053)
    embedding = Parameter("e", (50257, 4), ("tp", None), "normal", "first", padded=0)
    assert embedding.local_shape(ParallelLayout(tp, tp=tp)) == (rows, 4)


def test_a_head_is_never_split_and_gate_and_up_are_cut_alike():
    layout = ParallelLayout(2, tp=2)
    qkv = parameters(LLAMA)["blocks.0.attention.qkv.weight"]
    assert qkv.shape == (4, 4, 4, 32)  # kv heads, 2 queries + key + value, head dim, hidden
    assert qkv.box(layout, 1) == Box((2, 0, 0, 0), (2, 4, 4, 32))
    gate_up = parameters(LLAMA)["blocks.0.mlp.gate_up.weight"]
    assert gate_up.box(layout, 1) == Box((0, 12, 0), (2, 12, 32))
    out = parameters(LLAMA)["blocks.0.attention.out.weight"]
    assert out.box(layout, 1) == Box((0, 16), (32, 16))


def test_ranks_beyond_the_key_value_heads_cut_the_columns_of_one_that_they_share():
    qkv, layout = parameters(TWO_KEYS)["blocks.0.attention.qkv.weight"], ParallelLayout(4, tp=4)
    assert qkv.shape == (2, 6, 4, 32)  # kv heads, 4 queries + key + value, head dim, hidden
    boxes = [qkv.box(layout, rank) for rank in range(4)]
    assert [box.start for box in boxes] == [(0, 0, 0, 0), (0, 0, 2, 0), (1, 0, 0, 0), (1, 0, 2, 0)]
    assert {box.size for box in boxes} == {(1, 6, 2, 32)}
    bias = parameters(TWO_KEYS)["blocks.0.attention.qkv.bias"]
    assert bias.box(layout, 3) == Box((1, 0, 2), (1, 6, 2))
    out = parameters(TWO_KEYS)["blocks.0.attention.out.weight"]
    assert out.box(layout, 3) == Box((0, 24), (32, 8)), "its queries follow each other"


def test_a_gradient_is_partial_over_data_and_under_sequence_parallelism_over_tp():
    layout = ParallelLayout(8, tp=2, cp=2)
    norm = parameters(LLAMA)["final_norm.weight"]
    matrix = parameters(LLAMA)["blocks.0.mlp.down.weight"]
    assert set(norm.gradient_axes(layout, sequence_parallel=True)) == {"tp", "cp", "dp"}
    assert set(norm.gradient_axes(layout, sequence_parallel=False)) == {"cp", "dp"}
    for sequence_parallel in (True, False):
        assert set(matrix.gradient_axes(layout, sequence_parallel)) == {"cp", "dp"}


def test_an_expert_s_gradient_is_partial_over_expert_data_only():
    layout = ParallelLayout(16, tp=2, ep=4, etp=2)
    expert = parameters(QWEN)["blocks.0.mlp.experts.down.weight"]
    router = parameters(QWEN)["blocks.0.mlp.router.weight"]
    assert expert.is_expert and not router.is_expert
    assert expert.gradient_axes(layout, sequence_parallel=True) == ("edp",)
    assert set(router.gradient_axes(layout, sequence_parallel=True)) == {"tp", "cp", "dp"}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_parameter_of_which_tp_ranks_use_parts_is_summed_over_them_in_any_case(sequence_parallel):
    layout = ParallelLayout(8, tp=2, cp=2)
    for_heads = Parameter("q_norm", (8,), (None,), "ones", 0, partial_over_tp=True)
    assert for_heads.gradient_axes(layout, sequence_parallel) == ("tp", "cp", "dp")
    sharded = Parameter("down", (8, 8), (None, "tp"), "normal", 0, partial_over_tp=True)
    assert sharded.gradient_axes(layout, sequence_parallel) == ("cp", "dp")


def test_a_rectangle_is_an_index_into_the_global_tensor():
    tensor = np.arange(24).reshape(4, 6)
    block = Box((1, 2), (2, 3))
    assert tensor[block.slices].tolist() == [[8, 9, 10], [14, 15, 16]]


@given(st.lists(st.integers(1, 7), max_size=4).map(tuple), st.integers(1, 60))
def test_slabs_are_the_elements_in_order_and_none_is_larger_than_said(shape, most):
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [whole[slab.slices].reshape(-1) for slab in boxes_of_at_most(shape, most)]
    assert np.array_equal(np.concatenate(found), whole.reshape(-1))
    assert max(map(len, found)) <= most
    inner = np.prod(shape[1:], dtype=int)  # rows are not torn where one fits
    assert inner > most or len(found) == -(-len(whole.reshape(-1)) // (most // inner * inner))


def test_owners_have_every_row_once_and_the_first_as_many_as_any():
    for rows in range(8):
        for owners in range(1, 6):
            shares = [range(rows)[owned_rows(rows, owner, owners)] for owner in range(owners)]
            assert [row for share in shares for row in share] == list(range(rows))
            assert len(shares[0]) == max(map(len, shares)) == -(-rows // owners)
