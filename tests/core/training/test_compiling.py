"""Compiled blocks beside the same blocks as written: same losses on every layout, same names."""

import shutil
from functools import partial

import pytest
import torch
from marks import slow, slow_cases
from ranks import run_ranks
from tiny import DOCUMENTS, DROPPING, GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training import step as training
from mtcli.core.training.compile import compile_blocks, compiler_errors
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.nonfinite import first_nonfinite
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
ROUNDED = 1e-6  # relative, of a loss or norm in float32; two layouts differ by 1e-7
TWO_LAYERS = {"num_layers": 2}
# rows whose block is one graph, exchanges in it
WHOLE = ("tp without sequence parallelism", "tp of one key-value head")
ROWS = {  # world, model, parallel, data
    "full recompute with dropout": (1, GPT | DROPPING, {"recompute": "full"}, {}),
    "tp without sequence parallelism": (2, GPT, {"tp": 2, "sequence_parallel": False}, {}),
    "tp of one key-value head": (2, LLAMA | {"num_kv_heads": 1}, {"tp": 2}, {}),
    "cp and selective recompute": (2, LLAMA, {"cp": 2, "recompute": "selective"}, DOCUMENTS),
    "ep and zero=3": (2, MOE, {"ep": 2, "zero": 3}, {}),
}


@pytest.fixture
def quickly(monkeypatch):
    """Trainers whose blocks are traced as always, and run without generated code."""
    quick = partial(compile_blocks, backend="aot_eager")
    monkeypatch.setattr(training, "compile_blocks", quick)


def config_of(model, parallel, data, compiled):
    sections = {"parallel": parallel, "data": data, "train": {"compile": compiled}}
    return run_config(model | TWO_LAYERS, batch={"micro_batch_size": 2}, **sections)


def curve(runtime, config, steps=2):
    """[(loss, norm)] of the first steps."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(steps)]
    loader.close()
    return [(step.loss, step.grad_norm) for step in done]


def both_ways(runtime, model, parallel, data, backend="aot_eager"):
    """(curve as written, curve compiled, graphs that were made of the blocks), once it is clear
    that as many collectives were written down in both ways."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    training.compile_blocks = partial(compile_blocks, backend=backend)  # of this fork alone
    counts = runtime.recorder.counts
    plain = curve(runtime, config_of(model, parallel, data, False))
    once = counts.get("tp", 0)
    compiled = curve(runtime, config_of(model, parallel, data, True))
    assert counts.get("tp", 0) == 2 * once, f"{counts} after {once} on tp"
    return plain, compiled, counters["stats"]["unique_graphs"]


KEPT = "tp of one key-value head"


@pytest.mark.parametrize(
    "row", [KEPT, *slow_cases("traced for 4 s", *(row for row in ROWS if row != KEPT))]
)
def test_compiled_blocks_give_the_losses_of_those_as_written(row):
    world, *settings = ROWS[row]
    for plain, compiled, graphs in run_ranks(world, both_ways, *settings):
        assert graphs == 1 if row in WHOLE else graphs > 0
        for found, expected in zip(compiled, plain, strict=True):
            assert found == pytest.approx(expected, rel=ROUNDED)


@slow("g++ compiles for 4 to 16 s")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_generated_code_gives_the_same_losses_and_one_graph_serves_every_block():
    ((plain, compiled, graphs),) = run_ranks(1, both_ways, LLAMA, {}, {}, "inductor")
    assert graphs == 1
    for found, expected in zip(compiled, plain, strict=True):
        assert found == pytest.approx(expected, rel=ROUNDED)


def test_a_compiled_model_keeps_its_names_and_names_the_module_of_a_fault(quickly):
    plain, compiled = (Trainer(config_of(GPT, {}, {}, c), ALONE) for c in (False, True))
    names = [list(trainer.stages[0].state_dict()) for trainer in (plain, compiled)]
    assert names[0] == names[1]
    initialise(compiled)
    loader = MicroBatchLoader(Samples(compiled.config), compiled.config, compiled.groups)
    loader.sample_ids = lambda step, micro_batch: []
    compiled.train_step(loader)
    weight = dict(compiled.stages[0].named_parameters())["blocks.1.mlp.up.weight"]
    weight.data[0, 0] = float("nan")
    assert compiled.train_step(loader).outcome == "fault"
    assert first_nonfinite(compiled, loader).startswith("the output of blocks.1.mlp.up on rank 0")
    loader.close()


@pytest.mark.parametrize(
    ("output", "said"),
    [("In file a.cpp:\n cc1plus: fatal error: no memory\nend", "cc1plus: fatal error: no memory")]
    + [("Killed\n", "Killed"), ("", "no output")],
)
def test_a_compiler_that_fails_is_an_error_in_its_own_words(monkeypatch, output, said):
    from torch._inductor.exc import CppCompileError

    def fail(graph, inputs):
        raise CppCompileError(["g++-9", "a.cpp"], output)

    torch._dynamo.reset()
    monkeypatch.setattr(training, "compile_blocks", partial(compile_blocks, backend=fail))
    with pytest.raises(MtcliError) as caught:
        curve(ALONE, config_of(GPT, {}, {}, True), steps=1)
    (problem,) = caught.value.problems
    assert problem.message == f"train.compile: g++-9 failed: {said}"
    assert caught.value.code == 1 and "CXX" in problem.hint


def test_other_errors_of_a_compiled_step_stay_as_they_are():
    for compiled in (True, False):
        with pytest.raises(RuntimeError, match="shapes"), compiler_errors(compiled):
            raise RuntimeError("shapes")
