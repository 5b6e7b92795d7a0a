"""Where the host waits for the GPU in a step, counted on fake tensors: no layout waits more often.

`HOST_WAITS` has every wait of a step of two micro-batches and two layers, by kind (a read from the
device, or an upload of memory that is not pinned) and by file and function. A change that adds one
stalls a GPU; a change that removes one takes it out of the table.
"""

import importlib
import json
import sys
from math import prod
from pathlib import Path

import pytest
from tiny import DROPPING, GPT, LLAMA, MOE, run_config

from mtcli.core.config.loading import load_config
from mtcli.core.model.mlp import GatedMlp

ROOT = Path(__file__).parent.parent
LAYERS = MICRO_BATCHES = 2
FULL = {"capacity_factor": 1.0, "pad_to_capacity": True}
SHARED = MOE | {"shared_expert_ffn_hidden_size": 24}
SIZES = {"hidden_size": 64, "head_dim": 16, "moe_ffn_hidden_size": 48, "max_seq_len": 64}
LAYOUTS = {  # model, ranks, sections
    "dense": (LLAMA, 1, {}),
    "GPT with dropout": (GPT | DROPPING, 1, {}),
    "tp, sp": (LLAMA, 2, {"parallel": {"tp": 2}}),
    "zero 1": (LLAMA, 2, {"parallel": {"zero": 1}}),
    "zero 3": (LLAMA, 2, {"parallel": {"zero": 3}}),
    "pp": (LLAMA, 2, {"parallel": {"pp": 2}}),
    "cp": (LLAMA, 2, {"parallel": {"cp": 2}}),
    "ep": (MOE, 2, {"parallel": {"ep": 2}}),
    "ep with capacity": (MOE | FULL, 2, {"parallel": {"ep": 2}}),
    "ep with capacity, a shared expert": (SHARED | FULL, 2, {"parallel": {"ep": 2, "tp": 2}}),
    "experts of one rank": (MOE, 1, {}),
    "fp8": (LLAMA, 1, {"train": {"precision": "fp8"}}),
    "documents": (LLAMA, 1, {"data": {"document_mask": True}}),
    "packed documents": (LLAMA | SIZES, 1, {"data": {"document_mask": True}}),
    "Muon": (LLAMA, 1, {"optimizer": {"name": "muon"}}),
}
STEP = {"read core/training/step.py Trainer.train_step": 1}
EXCHANGED = {"read core/parallel/expert.py Dispatch._send": LAYERS * MICRO_BATCHES}
HOST_WAITS = dict.fromkeys(LAYOUTS, STEP) | {"ep": STEP | EXCHANGED}


@pytest.fixture
def trace_step(monkeypatch):
    """The script, which imports others of its folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    return importlib.import_module("trace_step")


def config_of(name):
    """(config, ranks) of a layout."""
    model, world, sections = LAYOUTS[name]
    layout = sections.get("parallel", {})
    data_ranks = world // prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    batch = {"seq_len": 16, "micro_batch_size": 1, "global_batch_size": MICRO_BATCHES * data_ranks}
    train = {"precision": "bf16", "device": "cuda"} | sections.get("train", {})
    sections = sections | {"batch": batch, "train": train}
    return run_config(model | {"num_layers": LAYERS}, **sections), world


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_waits_for_the_gpu_only_where_the_table_says(trace_step, name):
    config, world = config_of(name)
    rank = world - 1 if name == "pp" else 0
    assert (
        trace_step.waits_by_place(trace_step.step_events(config, world, rank)) == HOST_WAITS[name]
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_has_the_update_to_make_while_the_host_reads_loss_and_norm(trace_step, name):
    config, world = config_of(name)
    events = trace_step.step_events(config, world, world - 1 if name == "pp" else 0)
    places = [f"{event.kind} {event.place}" for event in events]
    later = {e.name for e in events[places.index(*STEP) + 1 :]} - {"aten._to_copy"}
    assert "mtcli.adamw_" in later if name == "Muon" else not later, later


def test_one_rank_s_embedding_is_a_lookup_alone(trace_step):
    ops = {}
    for name, world in (("dense", 1), ("tp, sp", 2)):
        events = trace_step.step_events(config_of(name)[0], world, 0)
        rows = [e.name for e in events if e.place.endswith("VocabEmbedding.own_rows")]
        ops[name] = set(rows)
    assert ops["dense"] == {"aten.embedding"}
    assert "aten.masked_fill" in ops["tp, sp"]


def test_layers_that_exchange_in_chunks_copy_no_activations(trace_step, monkeypatch):
    monkeypatch.setattr("mtcli.core.parallel.overlap.exchange_chunks", lambda moved: 2)
    events = trace_step.step_events(config_of("tp, sp")[0], 2, 0)
    summed = [e.name for e in events if e.place == "core/parallel/overlap.py _summed"]
    assert summed == ["aten.bmm"] * 2 * 2 * LAYERS * MICRO_BATCHES  # attention's output and MLP's


def test_a_wait_of_a_layer_is_seen_with_the_line_that_made_it(trace_step, monkeypatch):
    forward = GatedMlp.forward

    def look(mlp, x_TD, *options):
        assert x_TD.sum().item() > 0
        return forward(mlp, x_TD, *options)

    monkeypatch.setattr(GatedMlp, "forward", look)
    waits = trace_step.waits_by_place(trace_step.step_events(*config_of("dense"), 0))
    planted = {place: count for place, count in waits.items() if place not in STEP}
    assert planted == {"read core/model/block.py Block._with_mlp": LAYERS * MICRO_BATCHES}


def test_a_layer_launches_and_computes_what_arithmetic_says(trace_step):
    settings = ["batch.micro_batch_size=2", "batch.seq_len=64", "model.num_layers=4"]
    trace = trace_step.traced("tiny", 1, 0, settings)
    model, tokens = load_config("tiny", settings).model, 2 * 64
    layer = trace.sums()["layer"]
    assert layer["launches"] == layer["aten"] + layer["triton"]
    weights = 12 * model.hidden_size**2
    assert layer["gemm_flops"] == 3 * 2 * tokens * weights
    # two GEMMs forward and five backward, half of each under a causal mask
    assert layer["attention_flops"] == 7 * tokens * 64 * model.hidden_size
    assert layer["host_reads"] == layer["host_uploads"] == layer["collectives"] == 0
    assert trace.sums()["step"]["host_reads"] == 1


def test_a_layer_of_experts_computes_those_that_a_token_visits(trace_step):
    batch = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 2}
    train = {"steps": 4, "precision": "bf16"}
    trace = trace_step.traced({"model": MOE | SIZES, "batch": batch, "train": train}, 1, 0, [])
    attention = (4 + 2 * 2 + 4) * 16  # heads of queries, keys and values, and those of the output
    weights = 64 * (attention + MOE["num_experts"] + MOE["top_k"] * 3 * 48)
    assert trace.sums()["layer"]["gemm_flops"] == 3 * 2 * 2 * 64 * weights


def test_the_command_prints_a_table_that_aligns_and_writes_it(
    trace_step, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "counts.json"
    words = ["trace_step.py", "tiny", "--by", "op", "--json", str(path)]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", [*words, "--set", "batch.seq_len=64"])
    trace_step.main()
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines[2:6]}) == 1, lines[2:6]
    assert lines[-1] == f"wrote {path}" and any(line.startswith("aten.mm ") for line in lines)
    record = json.loads(path.read_text())
    assert record["parts"]["layer"]["launches"] > 10
    assert any(place.startswith("read core/") for place in record["waits"])


def test_the_page_has_the_published_counts(trace_step):
    table = importlib.import_module("table")
    record = json.loads((ROOT / "benchmarks" / "results" / "step-counts.json").read_text())
    assert [row["name"] for row in record["rows"]] == list(trace_step.PUBLISHED)
    assert table.page(record) in (ROOT / "docs" / "reference" / "performance.md").read_text()
