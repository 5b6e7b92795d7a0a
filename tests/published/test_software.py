"""Software of former years takes the time of its own attention, elements and collectives."""

from dataclasses import replace

import pytest
from published.software import (
    FUSED_ACCUMULATION,
    FUSED_SOFTMAX,
    HIDDEN_REDUCTION,
    PublishedWork,
    published,
    since,
)

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan import communication as sent
from mtcli.core.plan.elements import block_elements
from mtcli.core.plan.gpu_time import attention_seconds, elementwise_bytes
from mtcli.core.plan.hardware import GPUS, Link
from mtcli.core.plan.memory import memory
from mtcli.core.plan.physics import PHYSICS
from mtcli.core.plan.step_time import step_costs
from mtcli.core.plan.workload import Workload

H100 = published(GPUS["h100"])
LARGE = ModelConfig(
    num_layers=48, hidden_size=8192, num_heads=64, vocab_size=51200, max_seq_len=2048
)


def step(layout=None, model=LARGE, kind=PublishedWork, **fields):
    sizes = {"seq_len": 2048, "micro_batch_size": 1, "global_batch_size": 256}
    return kind(model=model, layout=layout or ParallelLayout(1), **{**sizes, **fields})


def test_unaligned_heads_slow_only_written_out_attention():
    narrow = LARGE.model_copy(update={"head_dim": 150})
    times = [attention_seconds(step(model=m, flash=False), H100) for m in (LARGE, narrow)]
    assert times[1].forward > 150 / 128 * times[0].forward * 1.2
    flash = [attention_seconds(step(model=m), H100) for m in (LARGE, narrow)]
    assert flash[1].forward == pytest.approx(150 / 128 * flash[0].forward)


def test_new_weights_gathered_ahead_hide_behind_the_next_forward_pass():
    slow = replace(H100, network=Link(1e8, 0.0))
    waits, ahead = (
        step_costs(step(ParallelLayout(64, tp=8), zero=1, gathers_ahead=kind), slow)
        for kind in (False, True)
    )
    hidden = PHYSICS.data_overlap * 48 * waits.block.forward
    assert waits.gradients == ahead.gradients
    assert waits.gradients_exposed - ahead.gradients_exposed == pytest.approx(hidden)


def test_former_code_reduces_gradients_when_the_last_backward_pass_is_done():
    hidden, bare = (
        step_costs(step(ParallelLayout(64, tp=8), hides_reduction=kind), H100)
        for kind in (True, False)
    )
    assert bare.gradients_exposed == bare.gradients == hidden.gradients > 0
    behind = PHYSICS.data_overlap * 48 * hidden.block.backward
    assert bare.gradients_exposed - hidden.gradients_exposed == pytest.approx(behind)


def test_narrow_gradients_take_half_of_the_exchange_and_wide_copies_in_memory():
    wide, narrow = (step(ParallelLayout(64, tp=8), narrow_gradients=kind) for kind in (False, True))
    no_latency = replace(H100, link=Link(1e9, 0.0), network=Link(1e9, 0.0))
    seconds = [step_costs(work, no_latency).gradients for work in (wide, narrow)]
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert memory(wide, H100).gradients == memory(narrow, H100).gradients


@pytest.mark.parametrize(("m", "narrow", "moved"), [(1, False, 0), (4, False, 7.5), (4, True, 4.5)])
def test_former_code_adds_later_micro_batches_gradients_in_a_pass_of_their_own(m, narrow, moved):
    """3 of 4 move 2 + 4 + 4 bytes, or 2 + 2 + 2 of narrow ones."""
    fields = {"global_batch_size": m, "narrow_gradients": narrow}
    apart, fused = (
        step_costs(step(**fields, adds_in_gemm=kind), H100).busy for kind in (False, True)
    )
    seconds = moved * block_elements(step()).total / (H100.memory_bandwidth * PHYSICS.memory)
    assert apart.backward - fused.backward == pytest.approx(seconds)


def test_code_of_fp16_without_a_preprint_is_former_code():
    assert since("a model card", HIDDEN_REDUCTION) and not since("", HIDDEN_REDUCTION, former=True)
    assert not since("", FUSED_ACCUMULATION, former=True) and since("", FUSED_SOFTMAX, former=True)
    assert since("arXiv:2205.05198", FUSED_ACCUMULATION, former=True)
    assert not since("arXiv:2205.05198", HIDDEN_REDUCTION)
    assert since("arXiv:2205.05198", 2205)  # of the month itself


def test_a_token_crosses_to_a_node_once_for_all_of_its_experts_there():
    """Of two nodes, a token's two experts are in both in half of the cases: 1.5 of 2 copies."""
    moe = LARGE.model_copy(update={"num_experts": 16, "top_k": 2, "moe_ffn_hidden_size": 1024})
    device = replace(H100, node_size=8, link=Link(1e15, 0.0), network=Link(1e9, 0.0))
    every, once = (
        sent.expert_parallel(
            step(ParallelLayout(16, ep=16), model=moe, once_per_node=kind),
            device,
        )
        for kind in (False, True)
    )
    assert once.forward == pytest.approx(0.75 * every.forward)


def test_kernels_apart_move_half_as_much_again():
    apart, fused = (elementwise_bytes(step(fused=kind), H100) for kind in (False, True))
    assert apart == 1.5 * fused == 1.5 * elementwise_bytes(step(kind=Workload), H100)
