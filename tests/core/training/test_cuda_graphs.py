"""Replayed micro-batches beside those that run as written, with a recorder that needs no GPU."""

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from tiny import BIASED, GPT, LLAMA, MOE, Samples, Weighted, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.cuda_graphs import CudaGraphPipeline, CudaGraphs
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))


class Again:
    """Calls a recorded function again, which does its work on the same tensors as a graph would."""

    def __init__(self):
        self.events, self.recorded = [], []

    @contextmanager
    def warm_up(self):
        assert [graph() for graph in self.recorded] == [None] * len(self.recorded), "memory twice"
        self.events.append("warm up")
        yield

    def record(self, run):
        self.events.append("record")

        def replay():
            self.events.append("replay")
            run()

        self.recorded.append(weakref.ref(replay))
        return replay


def curve(config, recorder=None, samples=Samples, runtime=ALONE):
    """[(loss, norm)] of three steps, and the spans of the last."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    if recorder:
        trainer.cuda_graphs = CudaGraphPipeline(trainer.pipeline, trainer.begin_from_zero, recorder)
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(3)]
    loader.close()
    return [(s.loss, s.grad_norm) for s in done], [span.op for span in trainer.pipeline.spans]


@pytest.mark.parametrize(
    ("model", "data", "precision"),
    [
        (GPT | {"dropout": 0.2}, {}, "fp32"),
        (LLAMA, {"document_positions": True}, "fp32"),
        (LLAMA | {"hidden_size": 64, "ffn_hidden_size": 128}, {}, "fp8"),
        (MOE, {}, "fp32"),
        (BIASED, {}, "fp32"),
    ],
    ids=[
        "gpt",
        "llama",
        "float8, whose scales are made in the graph",
        "mixtral",
        "experts whose loads move biases",
    ],
)
def test_replayed_micro_batches_give_the_steps_of_those_as_written(model, data, precision):
    config = run_config(model | {"num_layers": 2}, data=data, train={"precision": precision})
    recorder = Again()
    expected, replayed = curve(config), curve(config, recorder)
    assert replayed == expected
    assert recorder.events == ["warm up", "record", "record", *["replay"] * (3 * 4 * 2)]


def replayed_beside_written(runtime, model, parallel):
    config = run_config(model | {"num_layers": 2}, parallel=parallel)
    expected = curve(config, runtime=runtime)
    once = dict(runtime.recorder.counts)
    recorder = Again()
    replayed = curve(config, recorder, runtime=runtime)
    assert recorder.events.count("replay") == 3 * 4 * 2
    # Two warm-ups, and a recording that calls nothing here, come on top.
    assert runtime.recorder.counts["tp"] > 2 * once["tp"]
    return expected, replayed


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (GPT | {"dropout": 0.2}, {"tp": 2}),
        (LLAMA, {"tp": 2, "sequence_parallel": False}),
        (MOE, {"tp": 2}),
    ],
    ids=["gpt with dropout", "llama without sequence parallelism", "mixtral"],
)
def test_collectives_of_tensor_parallel_ranks_are_replayed_with_their_layers(model, parallel):
    for expected, replayed in run_ranks(2, replayed_beside_written, model, parallel):
        assert replayed == expected


def test_loss_weights_are_inputs_of_the_graph_and_other_sums_of_them_record_nothing_anew():
    config, recorder = run_config(GPT | {"num_layers": 2}), Again()
    replayed, _ = curve(config, recorder, Weighted)
    written, _ = curve(config, samples=Weighted)
    assert [s for pair in replayed for s in pair] == pytest.approx(sum(written, ()), rel=1e-6)
    assert replayed != curve(config)[0] and recorder.events.count("record") == 2


def test_another_loss_scale_is_recorded_anew():
    config = run_config(
        train={"precision": "fp16", "loss_scale_window": 1, "initial_loss_scale": 64.0}
    )
    recorder = Again()
    assert curve(config, recorder)[0] == curve(config)[0]
    assert recorder.events.count("record") == 3 * 2


class Unpadded(Weighted):
    def padding(self, start, count):
        return None


@pytest.mark.parametrize(("samples", "recordings"), [(Unpadded, 3), (Weighted, 1)])
def test_the_scale_of_auxiliary_losses_is_part_of_a_graph_unless_padding_moves_it_each_step(
    samples, recordings
):
    train = {"precision": "fp16", "loss_scale_window": 1, "initial_loss_scale": 64.0}
    config, recorder = run_config(MOE, train=train), Again()
    replayed, _ = curve(config, recorder, samples)
    written, _ = curve(config, samples=samples)
    assert [s for pair in replayed for s in pair] == pytest.approx(sum(written, ()), rel=2e-3)
    assert recorder.events.count("record") == recordings * 2


def test_each_recording_has_a_pool_of_its_own_which_both_of_its_graphs_share(monkeypatch):
    handles, pools = iter([(0, 1), (0, 2)]), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda s: None))
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool, **more: pools.append(pool) or nullcontext()
    )
    calls = FlightRecorder(mark=object)
    recorder, marks = CudaGraphs(calls), []
    for _ in range(2):
        with recorder.warm_up():
            pass
        for _ in "FB":
            recorder.record(lambda: marks.append(calls.mark))
    assert pools == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert marks == [None] * 4 and calls.mark is object, "marks in a graph could not be read"


def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(MtcliError, match="cuda_graphs=true, and there is no CUDA device here"):
        Trainer(run_config(train={"cuda_graphs": True, "device": "auto"}), ALONE)
