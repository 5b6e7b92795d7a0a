"""Seconds, volumes and FLOPs follow their closed forms; a prediction moves as physics says."""

from dataclasses import replace

import pytest
from published.software import PublishedWork

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan import communication as sent
from mtcli.core.plan.elements import RankElements
from mtcli.core.plan.gpu_time import attention_seconds, block_seconds, gemm_seconds
from mtcli.core.plan.hardware import GPUS, NAMES, Link, device_named
from mtcli.core.plan.physics import PHYSICS
from mtcli.core.plan.predict import predict, predict_workload, recomputed_share
from mtcli.core.plan.step_time import pipeline_seconds, simulated, step_costs
from mtcli.core.plan.tables import summary
from mtcli.core.plan.traffic import gradient_reduction
from mtcli.core.plan.workload import Workload

H100, A100 = GPUS["h100"], GPUS["a100-80gb"]
PERFECT = replace(
    PHYSICS,
    gemm=1.0,
    fill=0.0,
    attention=1.0,
    memory=1.0,
    link=1.0,
    network=1.0,
    kernel=0.0,
    call=0.0,
    collective=0.0,
)
IDEAL = replace(H100, physics=PERFECT)
# One link rate everywhere, so that volumes can be read off the seconds.
FLAT = replace(IDEAL, link=Link(1e9, 0.0), network=Link(1e9, 0.0))
LARGE = ModelConfig(
    num_layers=48, hidden_size=8192, num_heads=64, vocab_size=51200, max_seq_len=2048
)


def step(layout=None, model=LARGE, **fields):
    sizes = {"seq_len": 2048, "micro_batch_size": 1, "global_batch_size": 256}
    return Workload(model=model, layout=layout or ParallelLayout(1), **{**sizes, **fields})


def test_a_large_product_on_a_perfect_device_runs_at_its_sustained_rate():
    size = 16896  # 132 tiles of 128 a side: whole tiles, and whole waves of 132 processors
    seconds = gemm_seconds((size, size, size), step(), IDEAL)
    assert seconds == pytest.approx(2 * size**3 / (989.4e12 * H100.sustained), rel=1e-9)


def test_a_thin_product_is_bound_by_memory():
    columns, inner = 132 * 128, 8192
    seconds = gemm_seconds((1, columns, inner), step(), IDEAL)
    moved = 2 * (columns * inner + columns + inner)
    assert seconds == pytest.approx(moved / 3352e9, rel=1e-9)


def test_frozen_weights_have_no_gemm_of_their_gradients():
    free = replace(H100, memory_bandwidth=1e18, physics=replace(PERFECT, traffic=0.0))
    ours, frozen = (block_seconds(step(lora=LoraConfig(rank=rank)), free) for rank in (0, 8))
    attention = attention_seconds(step(), free)
    assert frozen.forward == ours.forward
    gemms = ours.backward - attention.backward
    assert frozen.backward - attention.backward == pytest.approx(gemms / 2, rel=0.05)


def test_a_short_inner_dimension_and_narrow_types_change_the_rate_as_stated():
    large = (8448, 8448, 8448)
    full, short = (
        gemm_seconds(large, step(), replace(H100, physics=replace(PERFECT, fill=fill)))
        for fill in (0.0, 8448.0)
    )
    assert short == pytest.approx(2 * full)
    narrow = replace(H100, physics=replace(PERFECT, narrow_gemm=1.0))
    fp8 = gemm_seconds(large, step(precision="fp8"), narrow)
    casts = 2 * 8448**2 * 4 / 3352e9 / 2
    assert fp8 == pytest.approx(full / 2 + casts, rel=1e-3)


def test_weights_that_float8_does_not_take_are_multiplied_at_the_rate_of_bfloat16():
    ragged = LARGE.model_copy(update={"num_heads": 63, "num_kv_heads": 63, "head_dim": 80})
    plain, fp8 = (
        block_seconds(step(model=ragged, precision=name), IDEAL) for name in ("bf16", "fp8")
    )
    rowwise, blockwise = (
        block_seconds(step(precision="fp8", fp8_scaling=scaling), IDEAL)
        for scaling in ("rowwise", "blockwise")
    )
    assert fp8.forward < plain.forward and rowwise == blockwise
    blocks = block_seconds(step(model=ragged, precision="fp8", fp8_scaling="blockwise"), IDEAL)
    qkv = gemm_seconds((2048, 3 * 63 * 80, LARGE.hidden_size), step(), IDEAL)
    assert fp8.forward < blocks.forward < plain.forward
    assert blocks.forward - fp8.forward > 0.3 * qkv


def test_flash_attention_computes_half_the_square_and_two_and_a_half_of_it_backwards():
    times = attention_seconds(step(), IDEAL)
    flops = 4 * 2048 * 2048 * 64 * 128 / 2
    assert times.forward == pytest.approx(flops / (989.4e12 * H100.sustained))
    assert times.backward == pytest.approx(2.5 * times.forward)


def test_full_attention_costs_the_whole_square():
    full = attention_seconds(step(model=LARGE.model_copy(update={"causal": False})), IDEAL)
    assert full.forward == pytest.approx(2 * attention_seconds(step(), IDEAL).forward)
    assert full.backward == pytest.approx(2.5 * full.forward)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_moves_the_published_volume(tp):
    """algorithms.md 1.1: 8 b s h (t - 1) / t elements a layer, forward and backward."""
    times = sent.tensor_parallel(step(ParallelLayout(tp, tp=tp)), FLAT)
    elements = 8 * 2048 * 8192 * (tp - 1) / tp
    assert (times.forward + times.backward) * 1e9 == pytest.approx(2 * elements)


def test_ranks_that_share_a_key_value_head_exchange_whole_heads_and_pass_them_round_a_ring():
    grouped = LARGE.model_copy(update={"num_kv_heads": 2})  # 64 query heads of 128 columns
    each, shared = (
        sent.tensor_parallel(step(ParallelLayout(8, tp=8), model=m), FLAT) for m in (LARGE, grouped)
    )
    exchanged = 2048 * (64 / 8 + 2) * 128 * 3 / 4  # elements: all but the rank's own quarter
    assert (shared.forward - each.forward) * 1e9 == pytest.approx(2 * exchanged)
    assert (shared.backward - each.backward) * 1e9 == pytest.approx(2 * exchanged)
    ring = sent.context_parallel(step(ParallelLayout(32, tp=8, cp=4), model=grouped), FLAT)
    assert ring.forward * 1e9 == pytest.approx(2 * 2048 * 2 * 128 * 3 / 4)  # a head of each rank


def reduced(work):
    return sent.passes(gradient_reduction(RankElements(1000, 0, 0), work), FLAT)


def test_gradients_are_reduced_in_float32_and_zero_1_gathers_weights_in_theirs():
    layout = ParallelLayout(8)
    plain = reduced(step(layout))
    cut = reduced(step(layout, zero=1))
    assert plain.backward * 1e9 == pytest.approx(2 * 4 * 1000 * 7 / 8)
    assert cut.backward * 1e9 == pytest.approx(4 * 1000 * 7 / 8)
    assert (plain.forward, cut.forward * 1e9) == (0, pytest.approx(2 * 1000 * 7 / 8))


def test_context_and_expert_traffic_have_their_volumes():
    ring = sent.context_parallel(step(ParallelLayout(4, cp=4)), FLAT)
    assert ring.forward * 1e9 == pytest.approx(2 * 2 * 2048 * 8192 * 3 / 4)
    gathered = sent.context_parallel(step(ParallelLayout(4, cp=4), cp_mode="all_gather"), FLAT)
    assert gathered.forward == gathered.backward == pytest.approx(ring.forward)
    heads = sent.context_parallel(step(ParallelLayout(4, cp=4), cp_mode="a2a"), FLAT)
    assert heads.forward * 1e9 == pytest.approx(4 * 2 * 512 * 8192 * 3 / 4)  # q, k, v and outputs
    moe = ModelConfig.model_validate(
        {
            **LARGE.model_dump(exclude={"architecture"}),
            "num_experts": 8,
            "top_k": 2,
            "moe_ffn_hidden_size": 32768,
        }
    )
    routed = sent.expert_parallel(step(ParallelLayout(8, ep=8), model=moe), FLAT)
    copies = 2 * 2048 * 8192 * 2  # two experts a token, 2 bytes an element
    # Dispatch and combine, each moving 7/8 of the copies.
    assert routed.backward * 1e9 == pytest.approx(2 * copies * 7 / 8)
    counts = 8 * 8 * 7 / 8  # of each expert's rows, int64, before the forward's
    assert (routed.forward - routed.backward) * 1e9 == pytest.approx(counts)


def test_only_a_ring_hides_behind_attention():
    layout = ParallelLayout(4, cp=4)
    for mode, hides in (("ring", True), ("all_gather", False), ("a2a", False)):
        costs = step_costs(step(layout, cp_mode=mode, sequence_parallel=False), FLAT)
        apart = costs.compute + costs.context
        assert (costs.block.forward != pytest.approx(apart.forward)) == hides


def test_a_group_across_nodes_shares_the_network_links_of_its_members():
    reached = replace(PERFECT, link=0.8, network=0.5)

    def bandwidth(size, stride, device=H100):
        return sent.group_bandwidth(size, stride, replace(device, physics=reached))

    assert bandwidth(8, 1) == 0.8 * H100.link.bandwidth
    assert bandwidth(16, 8) == 0.5 * H100.network.bandwidth
    assert bandwidth(16, 2) == 4 * 0.5 * H100.network.bandwidth
    assert bandwidth(64, 1, GPUS["gb200"]) == 0.8 * GPUS["gb200"].link.bandwidth
    assert bandwidth(144, 1, GPUS["gb200"]) == 0.8 * GPUS["gb200"].link.bandwidth  # 72 links out


def test_an_all_reduce_is_a_ring_of_large_tensors_and_a_tree_of_small_ones():
    slow = replace(FLAT, link=Link(1e9, 1e-4), network=Link(1e9, 1e-3))  # 8 nodes of 8
    ring = 2 * sent.ring_seconds(64e9, 64, 1, slow)
    assert sent.all_reduce_seconds(64e9, 64, 1, slow) == ring
    assert ring == pytest.approx(2 * (64 * 63 / 64 + 7 * 1e-3 + 56 * 1e-4))
    few = sent.all_reduce_seconds(64e3, 64, 1, slow)
    assert few == pytest.approx(2 * (64e-6 + 3 * 1e-3 + 3 * 1e-4))  # a tree of 8, and in each 8


@pytest.mark.parametrize("q", [2, 4, 8])
def test_two_dimensional_tensor_parallelism_moves_the_published_volume(q):
    """algorithms.md 5: 7bsh + 12h^2 elements forward and twice that backward, over sqrt(p)."""
    layout = ParallelLayout(q * q, tp=q * q, tp_rows=q)
    plain = step(layout, micro_batch_size=q)
    work = PublishedWork(**vars(plain))
    times = sent.tensor_parallel(work, FLAT)
    elements = 7 * q * 2048 * 8192 + 12 * 8192**2
    assert times.forward * 1e9 == pytest.approx(2 * elements / q)
    assert times.backward == pytest.approx(2 * times.forward)


def test_two_dimensional_products_are_the_whole_ones_cut_in_three():
    """Each of p ranks makes 1/p of a product, in sqrt(p) pieces; a piece may be less efficient."""
    one, cut = (
        block_seconds(step(layout, micro_batch_size=16), IDEAL)
        for layout in (ParallelLayout(1), ParallelLayout(16, tp=16, tp_rows=4))
    )
    whole = block_seconds(step(micro_batch_size=16, sequence_parallel=True), IDEAL)
    assert one == whole
    assert 1 / 16 <= cut.forward / one.forward < 1.15 / 16


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "gpipe", "interleaved"])
@pytest.mark.parametrize("micro_batches", [3, 64, 101])
def test_continuing_a_repeating_pipeline_equals_simulating_all_of_it(name, micro_batches):
    layout = ParallelLayout(8, pp=8, vpp=3 if name == "interleaved" else 1)
    work = step(layout, schedule_name=name, global_batch_size=micro_batches)
    costs = step_costs(work, H100)
    seconds, bubble = pipeline_seconds(work, costs)
    whole = simulated(work, costs, micro_batches)
    assert seconds == pytest.approx(whole.end, rel=2e-3)
    assert bubble == pytest.approx(whole.bubble_fraction, abs=3e-3)


@pytest.mark.parametrize(
    ("vpp", "layers"), [(1, (1, 5, 1, 0, 1, 2, 1, 2)), (2, ())], ids=["given", "25 over 16 chunks"]
)
def test_stages_of_any_sizes_find_their_pace_before_the_pipeline_is_continued(vpp, layers):
    model = LARGE.model_copy(update={"num_layers": sum(layers) or 25})
    name = "interleaved" if vpp > 1 else "1f1b"
    sizes = {"global_batch_size": 160, "schedule_name": name, "stage_sizes": layers}
    work = step(ParallelLayout(8, pp=8, vpp=vpp), model, **sizes)
    costs = step_costs(work, H100)
    seconds, bubble = pipeline_seconds(work, costs)
    whole = simulated(work, costs, 160)
    assert seconds == pytest.approx(whole.end, rel=2e-3)
    assert bubble == pytest.approx(whole.bubble_fraction, abs=3e-3)


def test_without_a_pipeline_nothing_is_idle_however_sums_are_rounded():
    for micro_batches in range(1, 65):
        found = predict_workload(step(global_batch_size=micro_batches), H100)
        assert 0 <= found.bubble_fraction < 1e-12
        assert 0 <= found.timeline().bubble_fraction < 1e-12


def test_the_update_waits_for_the_rank_with_most_layers_wherever_it_is():
    early, late = (
        step_costs(step(ParallelLayout(8, pp=4), stage_sizes=layers, zero=1), H100)
        for layers in ((1, 45, 1, 1), (1, 1, 45, 1))
    )
    assert early.optimizer == late.optimizer
    assert early.gradients == late.gradients > 0


def test_a_pipelines_bubble_is_the_closed_form_but_for_its_ends():
    deep = LARGE.model_copy(update={"vocab_size": 128})  # embedding and head hardly matter
    work = step(ParallelLayout(8, pp=8), model=deep)
    assert predict_workload(work, H100).bubble_fraction == pytest.approx(7 / 256, rel=0.1)


def test_model_flops_are_those_of_the_paper():
    """arXiv:2104.04473, equation 3, without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    p = predict_workload(step(ParallelLayout(8)), H100)
    s, h, layers, vocab = 2048, 8192, 48, 51200
    flops = 72 * 256 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert p.model_flops_per_gpu * p.step_seconds * 8 == pytest.approx(flops, rel=1e-3)
    assert p.mfu == pytest.approx(p.model_flops_per_gpu / 989.4e12)


def test_hardware_flops_count_what_is_computed_again():
    """arXiv:2205.05198, appendix A: the head is never computed again; selective only attention."""
    full, selective = (step(recompute=kind) for kind in ("full", "selective"))
    s, h, layers, vocab = 2048, 8192, 48, 51200
    forward = 24 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert 3 * recomputed_share(full) == pytest.approx(1 - 2 * vocab * h / forward, rel=1e-3)
    assert 3 * recomputed_share(selective) == pytest.approx(4 * s * h * layers / forward, rel=1e-3)
    p = predict_workload(full, H100)
    assert p.hfu / p.mfu == pytest.approx(1 + recomputed_share(full))


def test_full_recomputation_costs_about_a_third_more_and_saves_memory():
    """Korthikanti 2022, table 4: 36 to 39 % of a layer's time."""
    plain, full = (predict_workload(step(recompute=kind), A100) for kind in ("none", "full"))
    assert 1.25 < full.step_seconds / plain.step_seconds < 1.45
    assert full.memory.activations < plain.memory.activations / 4


def test_hidden_data_traffic_costs_nothing_and_exposed_traffic_shows():
    work = step(ParallelLayout(64, tp=8), micro_batch_size=8)
    devices = (replace(H100, network=Link(rate, 0.0)) for rate in (450e9, 1e8))
    near, far = (predict_workload(work, device) for device in devices)
    assert near.costs.gradients > 0 and near.costs.gradients_exposed == 0
    assert far.costs.gradients_exposed > 0.9 * far.costs.gradients
    assert far.step_seconds - near.step_seconds == pytest.approx(
        far.costs.gradients_exposed - near.costs.gradients_exposed
    )


def test_a_prediction_of_a_config_refuses_an_illegal_one():
    config = load_config("gpt2-124m", ["parallel.tp=5"])
    with pytest.raises(MtcliError, match="tp=5 does not divide"):
        predict(config, 5, "h100")


def test_the_530b_preset_takes_the_published_time():
    """arXiv:2201.11990, section 2.4: 60.1 s on 280 DGX A100s, batch 1920 (here: 2240 GPUs)."""
    p = predict(load_config("mt-nlg-530b"), 2240, "a100-80gb")
    assert 0.55 < p.step_seconds / 60.1 < 1.1


def test_devices_have_sources_and_unknown_names_get_the_closest():
    for device in GPUS.values():
        assert device.source and device.peak("bf16") > 0 and device.peak("fp8") > 0
    assert set(NAMES) >= {"v100-32gb", "a100-40gb", "h200", "gb300", "rtx-5000", "cpu"}
    with pytest.raises(MtcliError, match="did you mean 'h100'"):
        device_named("h10")


@pytest.mark.parametrize(
    ("device", "precision", "rate"),
    [
        ("v100-32gb", "fp16", 125e12),
        ("v100-32gb", "bf16", 15.7e12),
        ("rtx-5000", "fp16", 89.2e12),
        ("a100-80gb", "fp16", 312e12),
        ("h100", "fp16", 989.4e12),
    ],
)
def test_products_of_16_bits_run_at_the_rate_of_what_the_device_has(device, precision, rate):
    assert GPUS[device].peak(precision) == rate
    p = predict(load_config("gpt2-345m", [f"train.precision={precision}"]), 1, device)
    assert p.mfu == pytest.approx(p.model_flops_per_gpu / rate)
    slow = [text for name, text in summary(p) if name == "precision"]
    if rate > 20e12:
        assert slow == []
    else:
        told = "bf16, taken at the rate of fp32: v100-32gb has fp64, fp32, fp16"
        assert slow == [told]


def test_float16_is_the_half_precision_of_boards_without_bfloat16():
    assert {name for name, d in GPUS.items() if d.half_precision == "fp16"} == {
        "v100-32gb",
        "rtx-5000",
    }


def test_each_kernel_of_a_block_takes_a_time_of_its_own():
    tiny = step(model=LARGE.model_copy(update={"hidden_size": 64, "ffn_hidden_size": 64}))
    slow, free = (replace(IDEAL, physics=replace(PERFECT, kernel=kernel)) for kernel in (1e-3, 0.0))
    block = block_seconds(tiny, slow).beyond(block_seconds(tiny, free))
    assert block.forward == pytest.approx(24e-3) and block.backward == pytest.approx(48e-3)
