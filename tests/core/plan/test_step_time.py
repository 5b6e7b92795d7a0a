"""How the parts of a step add up: what hides behind what, and what a stage is made of."""

from dataclasses import replace

import pytest

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan import communication as sent
from mtcli.core.plan import traffic
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.gpu_time import (
    attention_seconds,
    elementwise_bytes,
    gemm_seconds,
    head_seconds,
)
from mtcli.core.plan.hardware import GPUS, Link
from mtcli.core.plan.orthogonalising import muon_seconds
from mtcli.core.plan.physics import PHYSICS
from mtcli.core.plan.step_time import simulated, stage_seconds, step_costs, weight_seconds
from mtcli.core.plan.workload import Workload

QUICK_HOST = replace(PHYSICS, call=0.0, collective=0.0)
H100 = replace(GPUS["h100"], physics=QUICK_HOST)
ALL_BANDWIDTH = replace(H100, physics=replace(QUICK_HOST, memory=1.0))
MODEL = ModelConfig(
    num_layers=8, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=8192
)


def step(layout, **fields):
    sizes = {"seq_len": 8192, "micro_batch_size": 1, "global_batch_size": 16}
    return Workload(model=MODEL, layout=layout, **{**sizes, **fields})


def network(rate):
    return replace(H100, link=Link(rate, 0.0), network=Link(rate, 0.0))


def test_a_context_ring_shows_only_where_it_outlasts_attention():
    work = step(ParallelLayout(4, cp=4))
    quick, slow = network(450e9), network(1e8)
    block = {device: step_costs(work, device).block for device in (quick, slow)}
    ring = sent.context_parallel(work, slow)
    attention = attention_seconds(work, slow)
    assert sent.context_parallel(work, quick).forward < attention.forward
    assert block[slow].forward - block[quick].forward == pytest.approx(
        ring.forward - attention.forward
    )
    assert block[slow].backward - block[quick].backward == pytest.approx(
        ring.backward - attention.backward
    )


def test_tensor_traffic_shows_in_full():
    costs = step_costs(step(ParallelLayout(4, tp=4)), H100)
    assert costs.tensor.forward > 0
    assert costs.block.forward == pytest.approx(costs.compute.forward + costs.tensor.forward)


def test_normalised_and_rotated_heads_are_each_read_and_written_once():
    rotated = MODEL.model_copy(update={"position": "rope"})
    both = rotated.model_copy(update={"qk_norm": "head"})
    plain, once, twice = (
        elementwise_bytes(replace(step(ParallelLayout(2, tp=2)), model=model), H100)
        for model in (MODEL, rotated, both)
    )
    moved = 2 * 8192 * (32 + 32) * 128 / 2 * 2  # by a rank, in bfloat16
    moved *= H100.physics.traffic
    assert [once - plain, twice - once] == pytest.approx([moved, moved])


def test_muon_multiplies_every_matrix_of_every_layer():
    """A step of Newton-Schulz on X [n, m] is half of X X^T, half of that one's square, and a
    product with X; a layer has four matrices of n = m and two of m = 4 n."""
    work, n = step(ParallelLayout(1), optimizer=OptimizerConfig(name="muon")), 4096
    square, long, wide = (
        gemm_seconds(shape, replace(work, precision="bf16"), H100)
        for shape in ((n, n, n), (n, n, 4 * n), (n, 4 * n, n))
    )
    layer = 4 * 2 * square + 2 * ((long + square) / 2 + wide)
    expected = 8 * work.optimizer.ns_steps * layer
    assert muon_seconds(work, 0, H100) == pytest.approx(expected, rel=1e-9)
    assert muon_seconds(step(ParallelLayout(1)), 0, H100) == 0


def hidden(work, device, option):
    """Seconds that an overlap takes off a block's passes, and the block's costs without it."""
    alone, beside = (step_costs(replace(work, **{option: on}), device) for on in (False, True))
    ways = ("forward", "backward")
    return Pass(*(getattr(alone.block, way) - getattr(beside.block, way) for way in ways)), alone


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_traffic_hides_behind_the_gemms_it_travels_beside(sequence_parallel):
    work = step(ParallelLayout(2, tp=2), sequence_parallel=sequence_parallel)
    share = PHYSICS.data_overlap
    short, costs = hidden(work, network(1e15), "tp_overlap")
    # of four collectives each way, gathers hide in full, and sums of outputs but for their first
    # of four chunks; without sequence parallelism each pass has two sums
    forward = (2 + 2 * 3 / 4) / 4 if sequence_parallel else 3 / 4
    assert short.forward == pytest.approx(share * costs.tensor.forward * forward, rel=1e-5)
    assert short.backward == pytest.approx(share * costs.tensor.backward, rel=1e-5)
    slow = network(1e6)
    n, d = work.tokens, MODEL.hidden_size
    shapes = [(n, 3 * d // 2, d), (n, d, d // 2), (n, 2 * d, d), (n, d, 2 * d)]
    qkv, out, up, down = (gemm_seconds(shape, work, slow) for shape in shapes)
    gathers = (qkv + up) / 2 if sequence_parallel else 0.0
    long, _ = hidden(work, slow, "tp_overlap")
    assert long.forward == pytest.approx(share * (gathers + (out + down) * 3 / 4), rel=1e-5)


@pytest.mark.parametrize(
    ("padded", "rate"), [(False, 1e15), (False, 1e6), (True, 1e15), (True, 1e6)]
)
def test_the_dispatch_hides_behind_the_shared_expert(padded, rate):
    experts = {"num_experts": 16, "top_k": 2, "moe_ffn_hidden_size": 1024}
    experts |= {"shared_expert_ffn_hidden_size": 2048, "capacity_factor": 1.0}
    model = MODEL.model_copy(update=experts | {"pad_to_capacity": padded})
    work, device = replace(step(ParallelLayout(8, ep=8)), model=model), network(rate)
    (short, costs), n, d = hidden(work, device, "ep_overlap"), work.tokens, MODEL.hidden_size
    down, up = (gemm_seconds(shape, work, device) for shape in ((n, d, 2048), (n, 2048, d)))
    # the dispatch is one of two all-to-alls of equal bytes
    one = costs.expert.backward / 2
    expected = min(one, down) + min(one, up) * padded
    assert short.forward == pytest.approx(PHYSICS.data_overlap * expected, rel=1e-5)


@pytest.mark.parametrize("rate", [450e9, 1e9])
def test_sharded_weights_are_fetched_behind_as_much_work_as_overlaps(rate):
    costs = step_costs(step(ParallelLayout(4), zero=3), network(rate))
    hidden = PHYSICS.shard_overlap * min(costs.sharded.forward, costs.compute.forward)
    assert costs.sharded.forward > 0
    assert costs.block.forward == pytest.approx(
        costs.compute.forward + costs.sharded.forward - hidden
    )
    weights = 12 * 4096**2 * 2  # bytes of a block, gathered from 4 ranks
    device = replace(network(rate), physics=replace(QUICK_HOST, link=1.0, network=1.0))
    gather = sent.passes(traffic.sharded_block(block(), step(ParallelLayout(4), zero=3)), device)
    assert gather.forward == pytest.approx(weights * 3 / 4 / rate, rel=0.01)
    assert gather.backward == pytest.approx(2 * gather.forward)


def block():
    from mtcli.core.plan.elements import block_elements

    return block_elements(step(ParallelLayout(4)))


def hop(work, device):
    return sent.collective_seconds(traffic.pipeline_hop(work), device)


def test_a_hop_sends_each_tensor_ranks_own_part():
    work = step(ParallelLayout(64, tp=4, pp=2))
    whole = replace(H100, physics=replace(QUICK_HOST, link=1.0, network=1.0))
    moved = 8192 * 4096 * 2 / 4
    assert hop(work, whole) == pytest.approx(moved / 50e9 + 2.7e-6)
    near = step(ParallelLayout(8, tp=4, pp=2))
    assert hop(near, whole) == pytest.approx(moved / 450e9 + 0.6e-6)
    assert hop(step(ParallelLayout(8)), H100) == 0.0


SHAPES = [(1, 1, 4), (4, 1, 8), (4, 2, 8), (2, 4, 2), (2, 4, 6)]


@pytest.mark.parametrize(("pp", "vpp", "m"), SHAPES)
def test_gradients_are_reduced_behind_the_backwards_that_follow_a_chunks_last(pp, vpp, m):
    """Of rank 0, as its schedule has them, and the chunk's own last one."""
    name = "interleaved" if vpp > 1 else "1f1b"
    layout = ParallelLayout(pp * 2, pp=pp, vpp=vpp)
    work = step(layout, schedule_name=name, global_batch_size=2 * m)
    costs = step_costs(work, network(1e7))
    backwards = [op.stage for op in work.schedule(m).ops[0] if op.kind == "B"]
    last = {stage: i for i, stage in enumerate(backwards)}
    behind = len(backwards) - min(last.values())
    hidden = costs.gradients - costs.gradients_exposed
    chunk = costs.block.backward * 8 / (pp * vpp)
    assert hidden == pytest.approx(behind * chunk * PHYSICS.data_overlap)


def test_the_exchange_of_gradients_waits_for_the_networks_other_users():
    """Two nodes share a block's 16 experts: while tokens cross, gradients do not."""
    experts = {"num_experts": 16, "top_k": 2, "moe_ffn_hidden_size": 4096}
    work = replace(
        step(ParallelLayout(32, ep=16)),
        model=MODEL.model_copy(update=experts),
        global_batch_size=32,
    )
    costs = step_costs(work, replace(H100, network=Link(1e9, 0.0)))
    free = costs.block.backward - costs.expert.backward
    assert costs.expert.backward > 0.1 * costs.block.backward
    hidden = MODEL.num_layers * free * PHYSICS.data_overlap
    assert costs.gradients_exposed == pytest.approx(costs.gradients - hidden)


@pytest.mark.parametrize(("m", "zero", "moved"), [(1, 0, 6), (4, 0, 9), (4, 1, 9), (4, 3, 6)])
def test_gradients_are_copied_to_wide_buckets_and_later_ones_added(m, zero, moved):
    """2 bytes are read and 4 written; where others are there already, 4 more are read."""
    work = step(ParallelLayout(2), zero=zero, global_batch_size=2 * m)
    costs = step_costs(work, network(1e15))
    weights = block().total
    seconds = moved * weights / (H100.memory_bandwidth * PHYSICS.memory)
    assert costs.block.backward - costs.compute.backward == pytest.approx(seconds, rel=1e-3)


def test_the_halves_of_a_split_backward_are_the_whole():
    work = step(ParallelLayout(2, pp=2), schedule_name="zero_bubble")
    costs = step_costs(work, H100)
    spans = simulated(work, costs, 2).spans
    stages, weights = stage_seconds(work, costs), weight_seconds(work, costs)
    length = {str(span.op): span.end - span.start for span in spans}
    for stage in (0, 1):
        halves = length[f"I0.{stage}"] + length[f"W0.{stage}"]
        assert halves == pytest.approx(stages[stage].backward)
        assert length[f"W0.{stage}"] == pytest.approx(weights[stage])


def test_the_ends_of_the_pipeline_hold_the_embedding_and_the_head():
    costs = step_costs(step(ParallelLayout(4, pp=4)), H100)
    stages = stage_seconds(step(ParallelLayout(4, pp=4)), costs)
    assert stages[0].forward - stages[1].forward == pytest.approx(costs.first.forward)
    assert stages[3].backward - stages[1].backward == pytest.approx(costs.last.backward)


def test_the_head_stays_wide_under_8_bit_products():
    narrow, wide = (
        head_seconds(step(ParallelLayout(1), precision=name), H100) for name in ("fp8", "bf16")
    )
    assert narrow == wide


def test_the_optimizer_moves_gradients_states_and_weights_once_or_twice():
    """bf16: gradients 4 B read twice, master and moments 12 B read and written, weights 2 B."""
    work = step(ParallelLayout(1))
    whole = step_costs(work, ALL_BANDWIDTH).optimizer
    elements = 8 * 12 * 4096**2 + (32000 + 8192) * 4096
    assert whole == pytest.approx(elements * (2 * 4 + 2 * 12 + 2) / 3352e9, rel=0.01)
    cut = step_costs(step(ParallelLayout(4), zero=1), ALL_BANDWIDTH)
    assert cut.optimizer == pytest.approx(whole / 4)


def test_lamb_reads_masters_and_moments_once_more():
    """4 B of master, or of a float32 weight, and 8 B of moments."""
    elements = 8 * 12 * 4096**2 + (32000 + 8192) * 4096
    for precision in ("bf16", "fp32"):
        plain, lamb = (
            step_costs(
                step(ParallelLayout(1), precision=precision, optimizer=OptimizerConfig(name=name)),
                ALL_BANDWIDTH,
            ).optimizer
            for name in ("adamw", "lamb")
        )
        assert lamb - plain == pytest.approx(elements * 12 / 3352e9, rel=0.01)
