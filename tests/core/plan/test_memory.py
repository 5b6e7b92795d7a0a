"""Bytes are those of the parameters a rank holds, and of the papers' activation formulas."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published.software import PublishedWork

from mtcli.core.config.loading import load_config
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters, stage_parameters
from mtcli.core.mesh.parameters import stage_layers as even_stages
from mtcli.core.plan.elements import rank_elements
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.memory import each_stage, memory
from mtcli.core.plan.workload import Workload, spread

H100 = GPUS["h100"]


def gpt(**fields):
    shape = {"num_layers": 8, "hidden_size": 64, "num_heads": 8, "vocab_size": 1000}
    return ModelConfig.model_validate({**shape, "max_seq_len": 32, **fields})


def mixture(**fields):
    experts = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96, "num_kv_heads": 4}
    return gpt(architecture="mixtral", **{**experts, **fields})


def step(model, layout=None, **fields):
    sizes = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 64}
    kind = PublishedWork if "flash" in fields else Workload
    return kind(model=model, layout=layout or ParallelLayout(1), **{**sizes, **fields})


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([gpt(), gpt(architecture="llama", ffn_hidden_size=96), mixture()]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_a_rank_holds_the_elements_of_its_stages_parameters(model, tp, pp, vpp, ep):
    layout = ParallelLayout(tp * pp * 4, tp=tp, pp=pp, vpp=vpp if pp > 1 else 1, ep=ep)
    work = step(model, layout)
    stages = even_stages(model, layout, ())
    for pp_rank in range(pp):
        ids = layout.stages(pp_rank)
        layers = [layer for stage in ids for layer in stages[stage]]
        held = stage_parameters(parameters(model), layers, 0 in ids, layout.num_stages - 1 in ids)
        expected = sum(prod(p.local_shape(layout)) for p in held)
        experts = sum(prod(p.local_shape(layout)) for p in held if p.is_expert)
        assert rank_elements(work, pp_rank).total == expected
        assert rank_elements(work, pp_rank).experts == experts


@pytest.mark.parametrize(
    ("zero", "bytes_each"), [(0, 2 + 4 + 8), (1, 2 + (4 + 8) / 4), (3, (2 + 4 + 8) / 4)]
)
def test_a_save_beside_training_copies_weights_masters_and_moments_to_the_host(zero, bytes_each):
    work = step(gpt(), ParallelLayout(4), precision="bf16", zero=zero)
    elements = rank_elements(work, 0).total
    saving = replace(work, async_save=True)
    for device, on_device in ((H100, 0), (replace(H100, name="cpu"), elements * bytes_each)):
        assert memory(work, device).host == 0
        assert memory(saving, device).host == elements * bytes_each
        assert memory(saving, device).other == memory(work, device).other + on_device


def test_many_data_ranks_share_fused_matrices_of_few_leading_dimensions_evenly():
    """Query, key and value have 8 groups and gate and up are 2: 64 ranks share their rows."""
    model, layout = load_config("llama-3.1-8b").model, ParallelLayout(64)
    held = rank_elements(step(model, layout), 0)
    assert held.total / 64 <= held.shard < 1.01 * held.total / 64
    assert held.padded < 1.01 * held.total


def korthikanti(s, b, h, a, t, recompute, sequence_parallel):
    """arXiv:2205.05198, table 2, in bytes of one layer with 16-bit activations and dropout."""
    if recompute == "full":
        return 2 * s * b * h / (t if sequence_parallel else 1)
    scores = 0 if recompute == "selective" else 5 * a * s / h
    if sequence_parallel:
        return s * b * h / t * (34 + scores)
    return s * b * h * (10 + 24 / t + scores / t)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_dense_layer_saves_what_the_paper_counts(recompute, sequence_parallel, tp):
    model = gpt(dropout=0.1, attention_dropout=0.1)
    work = step(
        model,
        ParallelLayout(tp, tp=tp),
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        flash=False,
    )
    one, two = (
        memory(replace(work, model=model.model_copy(update={"num_layers": n})), H100).activations
        for n in (1, 2)
    )
    expected = korthikanti(32, 2, 64, 8, tp, recompute, sequence_parallel)
    assert two - one == pytest.approx(expected, rel=1e-9)


def published(**fields):
    """A step as the papers count it: a block's tensors, and nothing of how our code runs them."""
    return step(gpt(), ParallelLayout(1), flash=False, recompute="selective", **fields)


SIZES = (32700, 16300)  # of vocabularies, padded to multiples of 128 on each of two ranks


def test_the_head_saves_its_inputs_and_takes_a_row_of_logits_per_token():
    models = (gpt(num_layers=1, vocab_size=size) for size in SIZES)
    wide, narrow = (
        step(model, ParallelLayout(2, tp=2), micro_batch_size=32, global_batch_size=64)
        for model in models
    )
    tokens, hidden = 32 * 32, 64
    difference = memory(wide, H100).besides_state - memory(narrow, H100).besides_state
    assert difference == pytest.approx(2 * tokens * (16384 - 8192))
    two = memory(replace(wide, model=gpt(num_layers=2, vocab_size=SIZES[0])), H100).besides_state
    ends = 2 * memory(wide, H100).besides_state - two
    entered = tokens * hidden * 2  # the head's input on all tp ranks, and its gradient
    assert ends == tokens // 2 * hidden * 2 + 2 * entered + 2 * tokens * 16384


@pytest.mark.parametrize("pp", [2, 4])
def test_1f1b_keeps_a_whole_models_activations_on_its_first_rank(pp):
    """arXiv:2205.05198, section 4.2.3: p micro-batches of l / p layers, and their stages' ends."""
    piped = replace(published(), layout=ParallelLayout(pp, pp=pp))
    tokens = piped.seq_len * piped.micro_batch_size
    one_layer = korthikanti(32, 2, 64, 8, 1, "selective", False) - 2 * 64 * tokens  # no dropout
    stages = list(each_stage(piped, H100))
    sent = pp * tokens * 2 * 64  # hidden states
    assert stages[0].activations == pytest.approx(8 * one_layer + sent)
    if pp == 4:
        sent = 3 * tokens * 2 * 64
        assert stages[1].activations == pytest.approx(3 * 8 / 4 * one_layer + sent)


def test_interleaving_keeps_more_by_the_published_factor():
    base = replace(published(), layout=ParallelLayout(4, pp=4))
    more = replace(base, layout=ParallelLayout(4, pp=4, vpp=2), schedule_name="interleaved")
    ends = 64 * 2 * 64  # a stage's output, of which interleaving has vpp times as many
    plain, chunks = (list(each_stage(work, H100))[1] for work in (base, more))
    ratio = (chunks.activations - 9 * ends) / (plain.activations - 3 * ends)
    assert ratio == pytest.approx((4 * 2 + 1) / (3 * 2))  # 9 chunks of one layer, 3 of two


def test_gpipe_keeps_every_micro_batch():
    base = step(gpt(), ParallelLayout(2, pp=2))
    plain = list(each_stage(base, H100))[0].activations
    every = list(each_stage(replace(base, schedule_name="gpipe"), H100))[0].activations
    assert every / plain == pytest.approx(base.num_micro_batches / 2)
    long = replace(base, schedule_name="gpipe", global_batch_size=10**9)  # ops of no such schedule
    several = list(each_stage(long, H100))[0].activations
    assert several / every == pytest.approx(long.num_micro_batches / base.num_micro_batches)


def test_zero_bubble_keeps_the_inputs_and_gradients_that_its_weight_halves_wait_with():
    """Per waiting block, in 16 bits: inputs of h, h, h and 4h, gradients of 3h, h, 4h and h."""
    base = step(gpt(), ParallelLayout(4, pp=4))
    whole = replace(base, schedule_name="zero_bubble")
    stages, plain = list(each_stage(whole, H100)), list(each_stage(base, H100))
    tokens, layers = 64, 2
    for rank in (1, 2):
        halves, whole = layers * tokens * 2 * (7 + 9) * 64, plain[rank].activations / (4 - rank)
        after_an_i = (3 - rank) * whole + (rank + 1) * halves  # more: an I leaves a GELU made again
        assert after_an_i > plain[rank].activations + rank * halves
        assert stages[rank].activations == pytest.approx(after_an_i)


def test_experts_save_their_copies_inputs_insides_and_outputs():
    dense = gpt(architecture="llama", ffn_hidden_size=96, num_kv_heads=4)
    difference = [memory(step(model), H100).activations / 8 for model in (mixture(), dense)]
    tokens, width = 64, 96 * 2
    # Two copies: sent, received, gate and up; what they add to, and the router's scores.
    routed = 2 * (2 * 64 * 2 + 2 * width) + 2 * 64 * 2 + 3 * 4 * 8
    whole = 64 * 2 + 2 * width  # of a dense MLP
    assert difference[0] - difference[1] == pytest.approx(tokens * (routed - whole))


@pytest.mark.parametrize(("capacity", "load"), [(0.0, 1.25), (1.1, 1.1), (0.5, 0.5)])
def test_a_busy_ranks_experts_save_more_rows_up_to_their_capacity(capacity, load):
    model = load_config("mixtral-8x7b", [f"model.capacity_factor={capacity}"]).model
    layout = ParallelLayout(8, ep=8)
    even = Workload(model, layout, seq_len=4096, micro_batch_size=1, global_batch_size=8)
    busy = replace(even, imbalance=1.25)
    copies = 2 * 4096  # top-2
    assert busy.expert_rows == pytest.approx(copies * load)
    row = model.hidden_size + 2 * model.moe_ffn_hidden_size  # input, gate and up
    kept = [memory(work, H100).activations for work in (busy, even)]
    saved = 32 * copies * (load - min(1.0, load)) * row * 2  # of layers, in bf16
    assert kept[0] - kept[1] == pytest.approx(saved, rel=1e-9)


def test_the_megatron_530b_preset_needs_what_its_paper_says():
    """arXiv:2201.11990, 2.2: 8-way tp and 35-way pp on 80 GB A100s, activations recomputed."""
    config = load_config("mt-nlg-530b")
    used = memory(Workload.of(config, 2240), GPUS["a100-80gb"])
    elements = 530e9 / 280
    assert used.weights == pytest.approx(2 * elements, rel=0.15)
    assert used.total < 80 * 2**30


@given(st.integers(1, 130), st.integers(1, 40))
def test_layers_spread_evenly_with_lighter_ends(layers, stages):
    sizes = spread(layers, stages)
    assert sum(sizes) == layers and len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1
    if layers >= stages and stages > 2 and layers % stages <= stages - 2:
        assert sizes[0] == sizes[-1] == min(sizes)
