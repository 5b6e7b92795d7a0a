"""How many adapters an array is planned for, and what it has in memory for each more of them."""

from dataclasses import replace

import torch
from ranks import run_ranks
from tiny import GPT, run_config, write_run

from mtcli.core.mesh.parameters import count_adapters, count_parameters
from mtcli.core.plan.hardware import HERE
from mtcli.core.plan.memory import memory
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime
from mtcli.core.sweep import capacity
from mtcli.core.sweep.array import ModelArray
from mtcli.core.sweep.rules import trains_in_turn
from mtcli.core.sweep.run_plan import SweepRequest, sweep_plan
from mtcli.core.sweep.sweep import Sweep
from mtcli.core.training.step import run_groups

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
CONFIG = run_config(GPT | {"hidden_size": 64, "vocab_size": 1024}, lora={"rank": 2})
BASE = 4 * count_parameters(CONFIG.model)
ADAPTER = 16 * count_adapters(CONFIG.model, CONFIG.lora)  # weights, gradients and two moments


def test_an_array_of_adapters_has_its_base_once():
    for count in (1, 2, 5):
        array = ModelArray([CONFIG] * count, run_groups(CONFIG, ALONE))
        assert array.memory.bytes == BASE + count * ADAPTER


def test_an_array_of_adapters_is_planned_with_its_base_once(monkeypatch):
    need = memory(Workload.of(CONFIG, 1), HERE)
    steps = need.activations + need.working + need.reserved - HERE.reserved_bytes
    assert need.weights + need.gradients + need.optimizer == BASE + ADAPTER < 10 * ADAPTER
    usable = HERE.reserved_bytes + BASE + 7.5 * (ADAPTER + steps)
    share = HERE.usable_bytes / HERE.memory_bytes
    device = replace(HERE, memory_bytes=usable / share)
    monkeypatch.setattr(capacity, "_device", lambda runtime: device)
    assert capacity.capacity(CONFIG, ALONE) == 7


def _arrays(runtime, config, output):
    request = SweepRequest(config, (), output, ["optimizer.lr=1e-3,2e-3,3e-3"])
    sweep = Sweep(sweep_plan(request, runtime.world), runtime)
    capacity._device = lambda runtime: replace(
        HERE, memory_bytes=HERE.memory_bytes * 2**runtime.rank
    )
    own = capacity.capacity(sweep.plan.trials[0].config, runtime)
    return own, sweep.capacity(sweep.plan.trials[0].config)


def test_ranks_agree_on_arrays_though_each_reads_other_free_memory(tmp_path):
    (least, agreed), (most, same) = run_ranks(
        2, _arrays, str(write_run(tmp_path)), tmp_path / "out"
    )
    assert agreed == same == least < most


def test_models_whose_gemms_fill_a_core_are_trained_one_after_another():
    sizes = {"hidden_size": 256, "ffn_hidden_size": 1024, "vocab_size": 8192, "max_seq_len": 256}
    batch = {"seq_len": 256, "micro_batch_size": 8, "global_batch_size": 16}
    large, small = run_config(GPT | sizes, batch=batch), run_config(GPT)
    assert capacity.capacity(large, ALONE) == 1 < capacity.capacity(small, ALONE)
    assert not trains_in_turn(large, "cuda")
    adapters = large.model_copy(update={"lora": CONFIG.lora})
    assert not trains_in_turn(adapters, "cpu")
