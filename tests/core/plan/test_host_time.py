"""The host's calls cost time: on a CPU beside all else, on a GPU where they are slower."""

from dataclasses import replace

import pytest

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.hardware import GPUS, HERE, Link
from mtcli.core.plan.physics import PHYSICS, Physics, host_physics
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.search import lower_bound
from mtcli.core.plan.step_time import UPDATE_CALLS
from mtcli.core.plan.workload import Workload

D, L, V, S = 256, 4, 1024, 128
GPT = ModelConfig(num_layers=L, hidden_size=D, num_heads=4, vocab_size=V, max_seq_len=S)
FREE = replace(
    HERE,
    flops={"fp32": 1e30},
    memory_bandwidth=1e30,
    processors=1,
    link=Link(1e30, 0.0),
    physics=host_physics(0.0, 0.0),
)
REAL = replace(
    FREE,
    flops={"fp32": 1e11},
    memory_bandwidth=1e10,
    link=Link(2e9, 2e-5),
    physics=host_physics(2e-6, 1e-9),
)


def step(device, world=1, micro_batches=4, model=GPT, **fields):
    """Predicted step of micro-batches of 2 sequences on some ranks, laid out by the axes given."""
    axes = {name: fields.pop(name) for name in ("tp", "pp", "cp", "ep") if name in fields}
    layout = ParallelLayout(world, **axes)
    sizes = {"seq_len": S, "micro_batch_size": 2, "precision": fields.pop("precision", "fp32")}
    sizes["global_batch_size"] = 2 * micro_batches * layout.dp
    return predict_workload(Workload(model=model, layout=layout, **sizes, **fields), device)


def paid(**prices):
    return replace(FREE, physics=replace(host_physics(0.0, 0.0), **prices))


def test_flops_cost_three_forward_passes_of_every_product():
    flops = 2 * 2 * S * (12 * D * D * L + V * D)
    device = replace(FREE, flops={"fp32": 1e9})
    whole = replace(device, physics=replace(device.physics, gemm=1.0, fill=0.0, attention=1e30))
    assert step(whole).step_seconds == pytest.approx(4 * 3 * flops / 1e9)
    frozen = step(whole, lora=LoraConfig(rank=8)).step_seconds
    assert frozen == pytest.approx(4 * 2 * flops / 1e9)


def test_a_function_costs_each_element_of_the_inner_layer_and_twice_in_the_backward():
    elements = 4 * L * 2 * S * 4 * D
    assert step(paid(element=1e-6)).step_seconds == pytest.approx(3e-6 * elements)


def test_the_host_costs_calls_of_blocks_ends_and_updates():
    calls = 4 * 2.5 * (450 * L + 2 * 100) + UPDATE_CALLS * L
    assert step(paid(call=1e-6)).step_seconds == pytest.approx(1e-6 * calls)
    mixture = GPT.model_copy(update={"num_experts": 8, "moe_ffn_hidden_size": 512, "top_k": 2})
    more = step(paid(call=1e-6), model=mixture).step_seconds - 1e-6 * calls
    assert more == pytest.approx(1e-6 * 4 * 2.5 * L * 8 * 75)


QUICK = replace(
    GPUS["h100"],
    flops={"bf16": 1e30},
    memory_bandwidth=1e30,
    link=Link(1e30, 0.0),
    physics=replace(PHYSICS, kernel=0.0, step_overhead=0.0),
)


def on_gpu(device=QUICK, **fields):
    prices = replace(device.physics, call=1e-6, collective=1e-5)
    return step(replace(device, physics=prices), precision="bf16", **fields)


def test_a_gpu_waits_for_a_slower_host():
    """450 calls of a forward pass, and half as many more of its backward; with full recomputation
    the forward's again. Ends have 100, the update 80 for each layer."""
    plain, again = on_gpu(), on_gpu(recompute="full")
    assert plain.costs.block == Pass(pytest.approx(450e-6), pytest.approx(675e-6))
    assert again.costs.block == Pass(pytest.approx(450e-6), pytest.approx(1125e-6))
    calls = 4 * 2.5 * (450 * L + 2 * 100) + UPDATE_CALLS * L
    assert plain.step_seconds == pytest.approx(1e-6 * calls) and plain.waits_for_host


def test_a_quick_host_is_hidden_behind_a_slow_gpu():
    slow = replace(QUICK, flops={"bf16": 1e9})
    p = on_gpu(slow)
    assert p.costs.block.total == pytest.approx(p.costs.busy.total) and not p.waits_for_host
    assert p.costs.busy.total > 100 * p.costs.host.total


def test_where_both_are_level_each_waits_for_the_other_now_and_then():
    same = Pass(1.0, 2.0)
    assert same.beside(same) == Pass(pytest.approx(2**0.25), pytest.approx(2 * 2**0.25))


@pytest.mark.parametrize(("axes", "waited"), [({"tp": 2}, 4), ({"tp": 4}, 8), ({"cp": 4}, 3)])
def test_a_collective_waits_for_the_slowest_of_its_ranks(axes, waited):
    """A block's forward has four over tp, all-gathers and reduce-scatters, or a ring's three hops
    between pairs."""
    p = on_gpu(world=max(axes.values()), **axes)
    assert p.costs.host.forward == pytest.approx(450e-6 + waited * 1e-5)
    sharded = on_gpu(world=2, zero=3).costs.host
    assert sharded == Pass(pytest.approx(460e-6), pytest.approx(695e-6))


def test_compiling_halves_the_hosts_time_and_cuda_graphs_leave_none_of_it():
    plain, compiled, graphed = (
        on_gpu(**{k: True} if k else {}).costs.host.total for k in ("", "compile", "cuda_graphs")
    )
    assert compiled == plain / 2 and graphed == pytest.approx(plain / 50)


def test_no_communication_is_hidden():
    slow = replace(REAL, link=Link(1e8, 0.0))
    fields = ({"tp": 2}, {"cp": 2}, {"zero": 1}, {})
    for axes in fields:
        quick, waits = (
            step(device, world=2, **axes) for device in (replace(slow, link=FREE.link), slow)
        )
        more = sum(waits.communication_seconds.values())
        assert more > 0 and waits.step_seconds - quick.step_seconds == pytest.approx(more), axes
    assert Physics().ring_overlap == 1.0


@pytest.mark.parametrize("micro_batches", [1, 2, 30])
def test_stages_on_one_core_take_what_one_process_takes(micro_batches):
    """While one waits for the other, that has the core: no bubble is left."""
    alone = step(paid(call=1e-6), micro_batches=micro_batches)
    turns = step(replace(paid(call=2e-6), crowd=2.0), world=2, pp=2, micro_batches=micro_batches)
    update = 2 * UPDATE_CALLS * L / 2 * 1e-6
    assert turns.step_seconds - update == pytest.approx(
        alone.step_seconds - UPDATE_CALLS * L * 1e-6
    )
    assert turns.bubble_fraction == pytest.approx(0.0)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"zero": 1}, {"zero": 3}])
def test_a_searchs_bound_holds_on_a_measured_cpu(axes):
    for crowd in (1.0, 2.0):
        p = step(replace(REAL, crowd=crowd), world=2, **axes)
        assert 0 < lower_bound(p.work, p.device) <= p.step_seconds * (1 + 1e-9)


def test_the_ends_of_a_pipeline_sum_a_tied_embeddings_gradients():
    tied = GPT.model_copy(update={"tie_embeddings": True})
    slow = replace(FREE, link=Link(1e6, 0.0))
    both = [step(slow, world=2, pp=2, model=model).costs.gradients for model in (tied, GPT)]
    untied = GPT.model_copy(update={"tie_embeddings": False})
    none = step(slow, world=2, pp=2, model=untied).costs.gradients
    assert both[0] - none == pytest.approx(V * D * 4 / 1e6)
