"""A step on a measured CPU is the sum of what it counts, each at its price: closed forms."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.calibration import Amounts, AttentionRow, Calibration
from mtcli.core.plan.communication import NETWORK_DEVICE
from mtcli.core.plan.cpu_time import row_at
from mtcli.core.plan.hardware import HERE, Link
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.search import lower_bound
from mtcli.core.plan.workload import Workload

MADE_UP = Calibration.of(json.loads((Path(__file__).parents[2] / "calibration.json").read_text()))
NOTHING = AttentionRow(64.0, *[0.0] * 6)
FREE = replace(
    MADE_UP,
    memory_bandwidth=float("inf"),
    forward=Amounts(),
    backward=Amounts(),
    attention=(NOTHING,),
    update=(0.0, 0.0),
    overhead=0.0,
    links=dict.fromkeys(MADE_UP.links, (0.0, 0.0)),
    arithmetic=dict.fromkeys(MADE_UP.arithmetic, (0.0, 0.0)),
)
D, L, V, S, HEADS = 256, 4, 1024, 128, 4
GPT = ModelConfig(num_layers=L, hidden_size=D, num_heads=HEADS, vocab_size=V, max_seq_len=S)
MOE = ModelConfig(
    architecture="mixtral", num_layers=L, hidden_size=D, num_heads=HEADS, vocab_size=V,
    max_seq_len=S, ffn_hidden_size=512, num_experts=8, top_k=2,
)  # fmt: skip


def step(known, model=GPT, world=1, micro_batches=4, **fields):
    """Predicted step of micro-batches of 2 sequences on some ranks, laid out by the axes given."""
    axes = {
        name: fields.pop(name) for name in ("tp", "pp", "cp", "ep", "tp_rows") if name in fields
    }
    layout = ParallelLayout(world, **axes)
    sizes = {"seq_len": S, "micro_batch_size": 2, "precision": "fp32"}
    sizes["global_batch_size"] = 2 * micro_batches * layout.dp
    work = Workload(model=model, layout=layout, **sizes, **fields)
    return predict_workload(work, replace(HERE, calibration=known))


def priced(**prices):
    return replace(FREE, forward=Amounts(**prices), backward=Amounts(**prices))


def test_flops_cost_three_forward_passes_of_every_product():
    flops = 2 * 2 * S * (12 * D * D * L + V * D)
    assert step(priced(flops=1e-9)).step_seconds == pytest.approx(4 * 3 * flops * 1e-9)
    halves = step(priced(flops=1e-9), world=2, tp=2).step_seconds
    assert halves == pytest.approx(4 * 3 * flops * 1e-9 / 2)
    again = step(priced(flops=1e-9), recompute="full").step_seconds
    head = 2 * 2 * S * V * D
    assert again == pytest.approx(4 * (4 * flops - head) * 1e-9)


def test_frozen_weights_cost_two_forward_passes_of_every_product():
    flops = 2 * 2 * S * (12 * D * D * L + V * D)
    adapters = step(priced(flops=1e-9), lora=LoraConfig(rank=1))
    assert adapters.step_seconds == pytest.approx(4 * 2 * flops * 1e-9)


def test_a_pipeline_takes_its_schedules_time():
    """1F1B: (m + pp - 1) (t_F + t_B), of 2 blocks and an end worth half of one each."""
    assert step(priced(launches=1.0)).step_seconds == pytest.approx(4 * 2 * (L + 1))
    piped = step(priced(launches=1.0), world=2, pp=2, micro_batches=6)
    assert piped.step_seconds == pytest.approx((6 + 1) * 2 * 2.5)
    sent = replace(priced(launches=1.0), links=FREE.links | {"hop": (0.25, 1e-6)})
    hop = 0.25 + 1e-6 * 2 * S * D * 4
    first = step(sent, world=2, pp=2, micro_batches=1).step_seconds
    assert first == pytest.approx(4 * 2.5 + 2 * hop)


def test_elements_are_those_of_the_tensors():
    tokens = 2 * S
    assert step(priced(inner=1e-6)).step_seconds == pytest.approx(8e-6 * tokens * 4 * D * L)
    assert step(priced(logits=1e-6)).step_seconds == pytest.approx(8e-6 * tokens * V)
    whole = 8e-6 * tokens * D * (L + 1)
    assert step(priced(residual=1e-6)).step_seconds == pytest.approx(whole)
    cut = step(priced(residual=1e-6), world=2, cp=2).step_seconds
    assert cut == pytest.approx(whole / 2)


def test_weights_are_read_forward_and_given_gradients_backward():
    block = 12 * D * D + 13 * D
    forward = replace(FREE, forward=Amounts(weights=1e-9))
    assert step(forward).step_seconds == pytest.approx(4e-9 * (L * block + V * D))
    backward = replace(FREE, backward=Amounts(weights=1e-9))
    assert step(backward).step_seconds == pytest.approx(4e-9 * (L * block + 2 * V * D))


def test_experts_cost_their_rows_copies_and_calls():
    tokens = 2 * S
    rows = tokens * 2
    assert step(priced(experts=1.0), MOE).step_seconds == pytest.approx(4 * 2 * 8 * L)
    assert step(priced(copies=1e-6), MOE).step_seconds == pytest.approx(8e-6 * rows * D * L)
    flops = 2 * L * (tokens * 4 * D * D + rows * 3 * 512 * D) + 2 * tokens * V * D
    assert step(priced(flops=1e-9), MOE).step_seconds == pytest.approx(12e-9 * flops)
    shared = step(priced(experts=1.0), MOE, world=2, ep=2, micro_batches=4)
    assert shared.step_seconds == pytest.approx(4 * 2 * 4 * L)


def test_rows_from_several_ranks_are_copied_in_the_order_of_experts_and_back_both_ways():
    copies = 2 * S * 2 * D * L  # read and written, twice there and twice on the way back
    known = replace(priced(launches=1.0), memory_bandwidth=1e6)
    passes = 4 * 2 * (L + 1)
    found = step(known, MOE, world=2, ep=2).step_seconds
    assert found == pytest.approx(passes + 4 * 2 * 2 * 2 * 4 * copies / 1e6)
    assert step(known, MOE).step_seconds == pytest.approx(passes)


def test_a_ring_passes_keys_and_values_on_and_their_gradients_home():
    known = replace(FREE, links=FREE.links | {"gather": (0.25, 1e-6)})
    moved = 2 * (2 * S // 2) * D * 4  # bytes of a rank's keys and values
    found = step(known, world=2, cp=2).step_seconds
    assert found == pytest.approx(4 * L * (1 + 1 + 2) * (0.25 + 1e-6 * moved))


def test_attention_costs_its_scores():
    row = AttentionRow(64.0, 1e-6, 3e-6, 5e-6, 7e-6, 2e-6, 4e-6)
    scores = 2 * HEADS * S * S * L
    known = replace(FREE, attention=(row,))
    assert step(known).step_seconds == pytest.approx(4 * 4e-6 * scores)
    ring = step(known, world=2, cp=2).step_seconds  # its own square, and half of another
    assert ring == pytest.approx(4 * (5e-6 + 7e-6 + 1e-6 + 2e-6) * scores / 4)


def test_heads_that_change_places_see_whole_rows_of_fewer_heads():
    row = AttentionRow(64.0, 1e-6, 3e-6, 5e-6, 7e-6, 2e-6, 4e-6)
    links = FREE.links | {"exchange": (0.0, 1e-9)}
    known = replace(FREE, attention=(row,), links=links)
    scores = 2 * HEADS * S * S * L
    sent = 2 * 2 * (2 * S // 2) * D * 4 / 2 * L  # bytes of queries, keys, values and results
    found = step(known, world=2, cp=2, cp_mode="a2a").step_seconds
    assert found == pytest.approx(4 * (4e-6 * scores / 2 + 2e-9 * sent))


def test_a_length_between_two_has_a_cost_between():
    rows = (AttentionRow(64.0, *[4.0] * 6), AttentionRow(256.0, *[2.0] * 6))
    found = [row_at(rows, length).forward for length in (32, 64, 128, 256, 512)]
    assert found == pytest.approx([4.0, 4.0, 3.0, 2.0, 2.0])


def test_tensor_parallel_blocks_gather_and_scatter_twice_each_way():
    links = FREE.links | {"gather": (1.0, 0.0), "scatter": (10.0, 1e-6), "reduce": (0.5, 0.0)}
    known = replace(FREE, links=links)
    sent = 10.0 + 1e-6 * 2 * S * D * 4 / 2
    entries = L * 2 + 2 * 0.5  # of blocks, and of the embedding and the head
    agreed = 0.5
    both = step(known, world=2, tp=2).step_seconds
    assert both == pytest.approx(4 * 2 * entries * (1.0 + sent) + agreed)
    reduced = step(known, world=2, tp=2, sequence_parallel=False).step_seconds
    assert reduced == pytest.approx(4 * 2 * entries * 0.5 + agreed)


def test_a_grid_sends_panels_of_activations_along_rows_and_of_weights_down_columns():
    known = replace(FREE, links=FREE.links | {"gather": (0.25, 1e-6)})
    model = GPT.model_copy(update={"norm": "rmsnorm", "num_kv_heads": GPT.num_heads})
    costs = step(known, model, world=4, tp=4, tp_rows=2).costs
    ffn = model.ffn_hidden_size
    weights = (3 * D * D + D * D + 2 * D * ffn) / 2 * 4
    inputs = (
        2 * S / 2 * (D + D + D + D) * 4
    )  # of column-parallel GEMMs, and outputs of row-parallel
    norms = 2 * 2 * 2 * S / 2 * 4  # two of them, two numbers of a token
    panels = 2 * 4 * 2  # of four GEMMs, along rows and down columns
    sent = (weights + inputs + norms) / 2
    assert costs.tensor.forward == pytest.approx(panels * 0.25 + 1e-6 * sent)


def test_ranks_that_share_a_key_value_head_exchange_whole_heads():
    known = replace(FREE, links=FREE.links | {"exchange": (0.25, 1e-6)})
    one_key = GPT.model_copy(update={"num_kv_heads": 1})
    heads = 2 * S * (HEADS / 2 + 2) * (D / HEADS) * 4  # bytes of a rank's queries, key and value
    found = step(known, one_key, world=2, tp=2).step_seconds
    assert found == pytest.approx(4 * 2 * L * (0.25 + 1e-6 * heads / 2))


def test_gradients_of_data_ranks_are_reduced_in_full_view():
    known = replace(MADE_UP, links=FREE.links | {"reduce": (0.0, 1e-9)})
    elements = 12 * D * D * L + 13 * D * L + 2 * D + V * D + S * D
    costs = step(known, world=2).costs
    assert costs.gradients == pytest.approx(1e-9 * 4 * elements / 2)
    assert costs.gradients_exposed == costs.gradients


def test_the_ends_of_a_pipeline_sum_a_tied_embeddings_gradients():
    known = replace(priced(launches=1.0), links=FREE.links | {"reduce": (0.0, 1e-9)})
    assert step(known, world=2, pp=2).costs.gradients == pytest.approx(1e-9 * 4 * V * D / 2)
    own = GPT.model_copy(update={"tie_embeddings": False})
    assert step(known, own, world=2, pp=2).costs.gradients == 0.0


def test_the_update_costs_blocks_and_elements_and_zero_cuts_these():
    known = replace(priced(launches=1.0), update=(1.0, 1e-6), overhead=0.125)
    passes = 4 * 2 * (L + 1)
    elements = 12 * D * D * L + 13 * D * L + 2 * D + V * D + S * D
    assert step(known).step_seconds == pytest.approx(passes + L + 1e-6 * elements + 0.125)
    cut = step(known, world=2, zero=1).step_seconds
    assert cut == pytest.approx(passes + L + 1e-6 * elements / 2 + 0.125)


def test_lamb_sums_its_norms_over_the_ranks_once_more():
    known = replace(priced(launches=1.0), links=FREE.links | {"reduce": (0.5, 0.0)})
    plain, lamb = (step(known, world=2, optimizer=name).step_seconds for name in ("adamw", "lamb"))
    assert lamb - plain == pytest.approx(0.5)
    assert step(known, optimizer="lamb").step_seconds == step(known).step_seconds, "nobody to ask"


def test_ranks_beyond_those_measured_take_turns():
    known = replace(MADE_UP, ranks=2)
    alone, crowd = step(known, world=2, tp=2), step(replace(known, ranks=1), world=2, tp=2)
    assert crowd.step_seconds == pytest.approx(2 * alone.step_seconds)


@pytest.mark.parametrize("micro_batches", [1, 2, 30])
def test_stages_on_one_core_take_what_one_process_takes(micro_batches):
    """While one waits for the other, that has the core: no bubble is left."""
    known = replace(priced(launches=1.0), ranks=1)
    alone = step(known, micro_batches=micro_batches)
    turns = step(known, world=2, pp=2, micro_batches=micro_batches)
    assert turns.step_seconds == pytest.approx(alone.step_seconds)
    assert turns.bubble_fraction == pytest.approx(0.0)


def test_stages_on_fewer_cores_wait_where_too_few_are_at_work():
    """Four of one micro-batch on two cores: one works at a time, and each as fast as on four."""
    price = priced(launches=1.0)
    few, many = (
        step(replace(price, ranks=ranks), world=4, pp=4, micro_batches=1) for ranks in (2, 4)
    )
    assert few.step_seconds == pytest.approx(many.step_seconds)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"zero": 1}, {"zero": 3}])
def test_a_searchs_bound_holds_on_a_measured_cpu(axes):
    for ranks in (1, 2):
        p = step(replace(MADE_UP, ranks=ranks), world=2, **axes)
        assert 0 < lower_bound(p.work, p.device) <= p.step_seconds * (1 + 1e-9)


def over_network(known, world, bandwidth, **fields):
    """Predicted costs of ranks that each have a link of so many bytes a second."""
    layout = ParallelLayout(world, **({"replicas": world} if fields else {}))
    sizes = {"seq_len": S, "micro_batch_size": 2, "precision": "fp32"}
    work = Workload(
        model=GPT, layout=layout, global_batch_size=2 * world, steps=16, **sizes, **fields
    )
    here = replace(HERE, node_size=1, host_network=Link(bandwidth, 0.0))
    crowd = known.crowd(world)
    return predict_workload(work, replace(here, calibration=known, crowd=crowd)).costs


def test_ranks_that_share_a_core_share_no_link():
    elements = 12 * D * D * L + 13 * D * L + 2 * D + V * D + S * D
    crossing = 2 * 3 / 4 * 4 * elements / 1e6
    free = priced(launches=1.0)
    for ranks in (4, 1):
        assert over_network(replace(free, ranks=ranks), 4, 1e6).gradients == pytest.approx(crossing)
    sockets = replace(free, socket=3e-6 / NETWORK_DEVICE)
    slower = over_network(replace(sockets, ranks=2), 4, 1e6).gradients
    assert slower == pytest.approx(2 * 3 * crossing), "two ranks on a core, each 3 us for a byte"


@pytest.mark.parametrize(
    ("sync", "tensors"),
    [
        ({"method": "decentlam"}, 2),  # to both neighbours
        ({"method": "decentlam", "topology": "star"}, 3),  # the centre, to all others
        ({"method": "lsgd", "group_size": 2}, 1 / 4 + 2 / 16),  # a pair, and a tree of four
        ({"method": "easgd"}, 2 * 3 / 4 / 4),
    ],
)
def test_an_exchange_takes_as_long_as_its_busiest_rank_sends(sync, tensors):
    elements = 12 * D * D * L + 13 * D * L + 2 * D + V * D + S * D
    costs = over_network(priced(launches=1.0), 4, 1e6, sync=SyncConfig(**sync), optimizer="sgd")
    assert costs.gradients == pytest.approx(tensors * 4 * elements / 1e6)
