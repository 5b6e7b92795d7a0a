"""The bytes of a grid of tp ranks are those that a step sends, layer by layer."""

from contextlib import closing

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.config.loading import load_config
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.engines import layer_factory
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers
from mtcli.core.plan.grid import grid_bytes_per_step, grid_traffic
from mtcli.core.plan.predict import predict
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.traffic import Traffic
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

SIXES = {"hidden_size": 24, "num_heads": 6}
WIDE = {"num_heads": 12, "num_kv_heads": 6, "ffn_hidden_size": 36}
LAYOUTS = {  # model, rows, columns, other parallel fields
    "gpt on a square": (GPT, 2, 2, {}),
    "llama on a square, all computed again": (LLAMA, 2, 2, {"recompute": "full"}),
    "llama on two rows of three": (LLAMA | SIXES | WIDE, 2, 3, {}),
    "gpt on three rows of one": (GPT | SIXES, 3, 1, {}),
    "a mixture's tokens on their way to the router": (MOE, 2, 2, {}),
}


def config_of(model, rows, columns, parallel, layers, precision="fp32"):
    tp = rows * columns
    sizes = {"seq_len": 8, "micro_batch_size": rows, "global_batch_size": 4 * rows}
    grid = {"tp": tp, "tp_mode": "2d", "tp_rows": rows} | parallel
    shape = model | {"num_layers": layers}
    return run_config(shape, parallel=grid, batch=sizes, train={"precision": precision})


def sent(runtime):
    """Of each grid of these ranks (bytes along the row, bytes down the column) of a step on a rank,
    of 1 and of 2 layers."""
    return {
        case: [_sent(runtime, config_of(*layout, layers)) for layers in (1, 2)]
        for case, layout in LAYOUTS.items()
        if layout[1] * layout[2] == runtime.world
    }


def _sent(runtime, config):
    trainer = Trainer(config, runtime)
    initialise(trainer)
    trainer.groups.world.recorder.traffic = traffic = Traffic()
    with closing(MicroBatchLoader(Samples(config), config, trainer.groups)) as loader:
        trainer.forward_backward(loader)
    return [sum(s.bytes for s in traffic.sent if s.axis == axis) for axis in ("tp", "tp_row")]


@pytest.mark.parametrize("world", [3, 4, 6])
def test_a_layer_of_a_grid_sends_the_planned_bytes(world):
    ranks = run_ranks(world, sent)
    for case in ranks[0]:
        work = Workload.of(config_of(*LAYOUTS[case], 1), world)
        for way, planned in enumerate(grid_bytes_per_step(work)):
            layers = [two[way] - one[way] for one, two in (rank[case] for rank in ranks)]
            # the counter rounds each of a layer's sums down to a byte
            slack = 8 * work.num_micro_batches
            assert sum(layers) / len(layers) == pytest.approx(planned, abs=slack), case


def test_a_grid_s_gemms_are_the_papers_but_for_the_mlp_s_inner_activations():
    """With h = n = k and 4 h: 4 bsh and 12 h^2 forward, 6 bsh and 24 h^2 backward; rings of 4."""
    layout = ParallelLayout(16, tp=16, tp_rows=4)
    model = load_config("gpt3-175b", []).model
    work = Workload(model, layout, 2048, micro_batch_size=16, global_batch_size=256)
    forward, backward = grid_traffic(work)
    h, tokens = model.hidden_size, 16 * 2048
    norms = 2 * 2 * 4 * tokens / 4 * 4 * 3 / 4
    assert forward.along - norms == pytest.approx(3 / 4 * 2 * 4 * tokens * h / 4)
    assert forward.down == pytest.approx(3 / 4 * 2 * 12 * h**2 / 4)
    assert backward.down == pytest.approx(2 * forward.down)
    assert backward.along == pytest.approx(
        3 / 4 * (2 * 6 * tokens * h / 4 + 2 * 4 * 4 * tokens / 4)
    )


@pytest.mark.parametrize(("q", "hiddens"), [(2, 2.57), (4, 1.20), (8, 0.58)])
def test_two_dimensions_move_less_than_one_from_some_multiple_of_h_tokens_on(q, hiddens):
    """Against 8 (p - 1)/p bsh: (10 bsh + 36 h^2) (q - 1)/q^2 on q x q ranks, and statistics."""
    model, ranks = load_config("gpt3-175b", []).model, q * q
    layout = ParallelLayout(ranks, tp=ranks, tp_rows=q)
    for factor, less in ((0.85, False), (1.2, True)):
        tokens = round(factor * hiddens * model.hidden_size / q)
        work = Workload(model, layout, tokens, micro_batch_size=q, global_batch_size=q)
        two = sum(sum(way) for way in grid_traffic(work))
        one = 8 * (ranks - 1) / ranks * work.stream_bytes
        assert (two < one) is less


def test_one_row_is_one_dimension_in_the_plan_and_in_the_engine():
    row = load_config("tiny", ["parallel.tp=4", "parallel.tp_mode=2d", "parallel.tp_rows=1"])
    plain = load_config("tiny", ["parallel.tp=4"])
    assert Workload.of(row, 4) == Workload.of(plain, 4)
    groups = make_groups(ParallelLayout(1), 0, "cpu", recorder=FlightRecorder())
    made = [layer_factory(c, groups, torch.float32, torch.device("cpu")) for c in (row, plain)]
    assert [type(engine) for engine in made] == [TensorParallelLayers] * 2


def test_a_plan_of_a_grid_has_its_time_and_its_state():
    chosen = ["parallel.tp=64", "parallel.pp=1", "model.num_heads=128", "model.num_layers=12"]
    chosen += ["batch.micro_batch_size=64", "batch.global_batch_size=64", "train.precision=bf16"]
    two, one = (
        predict(load_config("gpt3-175b", [*chosen, f"parallel.tp_mode={mode}"]), 64, "h100")
        for mode in ("2d", "1d")
    )
    assert two.work.layout_words.startswith("tp=64 (8 x 8)")
    assert two.communication_seconds["tp"] < one.communication_seconds["tp"]
    assert two.memory.weights < one.memory.weights  # which replicates positions, norms and biases
