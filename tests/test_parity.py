"""The table of layouts: whatever the ranks, a run is the one-rank run.

Each row trains a tiny model on a layout and is held to one process by itself: initial weights bit
for bit, every first gradient of every rank (replicas, padding and the second copy of a tied
embedding too), loss and gradient norm over 20 steps, and bit for bit what no gradient trains after
them. A new axis is a new row of ROWS.
`python tests/test_parity.py --table` prints the differences that docs/parity.md shows;
words after it choose the rows that hold all of them.
"""

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from parity_runs import MODELS, Row, compare, one_rank, slices, train_on, worst
from ranks import run_ranks

from mtcli.core.config import rules

EXACT, CLOSE = 1e-10, 1e-5  # relative, in float64 and float32

NO_SP = {"sequence_parallel": False}
TALL = {"micro_batch_size": 2}
SQUARE = {"tp": 4, "tp_mode": "2d"}
OBLONG = {"tp": 6, "tp_mode": "2d", "tp_rows": 2}
ROWS = [
    Row("gpt dropout", 2, {"tp": 2}, TALL),
    Row("llama", 2, {"tp": 2}, TALL),
    Row("gpt dropout", 2, {"tp": 2} | NO_SP, TALL),
    Row("llama dropout", 2, {"tp": 2, "recompute": "selective"} | NO_SP, TALL),
    Row("gpt", 2, {"pp": 2}),
    Row("gpt dropout", 2, {"pp": 2, "schedule": "gpipe"}),
    Row("llama deep", 2, {"pp": 2, "stage_layers": [1, 3]}),
    Row("gpt dropout", 4, {"pp": 4, "stage_layers": [0, 1, 1, 0]}),
    Row("llama deep", 2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    Row("gpt deep", 4, {"pp": 4, "vpp": 2, "schedule": "interleaved"}),
    Row("gpt", 2, {}),  # dp=2
    Row("llama dropout", 2, {"bucket_mib": 0.001}, TALL),
    Row("gpt dropout", 1, {"recompute": "full"}, TALL),
    Row("gpt dropout", 4, {"tp": 2, "pp": 2, "recompute": "selective"}, TALL),
    Row("llama dropout", 4, {"tp": 2, "pp": 2, "recompute": "full"} | NO_SP, TALL),
    Row("gpt dropout", 4, {"tp": 2}, TALL),
    Row("llama deep", 4, {"pp": 2, "stage_layers": [3, 1]}),
    Row("gpt dropout", 2, {"zero": 1}),
    Row("llama", 4, {"tp": 2, "zero": 1, "bucket_mib": 0.002}, TALL),
    Row("gpt dropout", 4, {"pp": 2, "zero": 1}),
    Row("llama", 1, {"zero": 1}),
    Row("llama", 2, {"cp": 2}),
    Row("gpt dropout", 2, {"cp": 2, "cp_mode": "all_gather"}),
    Row("llama", 2, {"cp": 2, "cp_mode": "a2a", "zero": 1}),
    Row("llama dropout", 4, {"tp": 2, "cp": 2}, TALL),
    Row("moe", 2, {"ep": 2}),
    Row("moe", 4, {"tp": 2, "ep": 2, "etp": 2, "zero": 1}, TALL),
    Row("moe", 4, {"cp": 2, "pp": 2, "etp": 2}),
    Row("gpt dropout", 2, {"pp": 2, "schedule": "zero_bubble"}),
    Row("llama", 4, {"tp": 2, "pp": 2, "schedule": "zero_bubble", "zero": 1}, TALL),
    Row("moe capped", 4, {"tp": 2, "cp": 2, "ep": 4}, TALL),
    Row("moe capped", 2, {"ep": 2, "dispatcher": "all_gather"}),
    Row("moe early", 4, {"tp": 2, "ep": 2, "etp": 2, "dispatcher": "all_gather"}, TALL),
    Row("moe early", 2, {"cp": 2, "ep": 2}),
    Row("gpt dropout", 2, {"zero": 3}),
    Row("llama", 4, {"tp": 2, "zero": 3, "recompute": "full"}, TALL),
    Row("gpt dropout", 4, {"pp": 2, "zero": 3, "schedule": "gpipe"} | NO_SP),
    Row("moe", 4, {"cp": 2, "ep": 2, "zero": 3}),
    Row("llama", 4, {"pp": 2, "zero": 3, "stage_layers": [0, 2]}),
    Row("moe capped", 4, {"tp": 2, "ep": 2, "etp": 2, "pp": 1, "zero": 3}, TALL),
    Row("moe wide", 8, {"tp": 2, "cp": 2, "ep": 8}, TALL),
    Row("moe wide", 4, {"tp": 4, "ep": 2, "etp": 2}, TALL),
    Row("llama documents", 4, {"tp": 2, "cp": 2}, TALL),
    Row("llama documents", 2, {"cp": 2, "cp_mode": "all_gather", "zero": 3}, TALL),
    Row("gpt dropout documents", 2, {"cp": 2, "cp_mode": "all_gather"}),
    Row("llama documents", 2, {"cp": 2, "cp_mode": "a2a", "recompute": "selective"}, TALL),
    Row("llama documents", 4, {"pp": 2, "cp": 2, "recompute": "full"}),
    Row("moe early documents", 2, {"cp": 2, "ep": 2}),
    Row("gpt full", 4, {"cp": 2, "zero": 1}),
    Row("llama full documents", 4, {"tp": 2, "cp": 2}, TALL),
    Row("moe biased", 4, {"tp": 2, "ep": 2, "etp": 2}, TALL),
    Row("moe biased", 2, {"cp": 2, "ep": 2}),
    Row("moe biased", 2, {"pp": 2, "schedule": "zero_bubble"}),
    Row("moe biased", 1, {"recompute": "full"}, TALL),
    Row("moe biased", 4, {"pp": 2, "ep": 2, "zero": 1}),
    Row("moe biased", 4, {"cp": 2, "etp": 2, "zero": 3, "recompute": "full"}),
    Row("gpt lamb", 2, {"tp": 2}, TALL),
    Row("gpt lamb", 2, {"pp": 2}),
    Row("llama lamb", 2, {"zero": 1}),
    Row("llama lamb", 4, {"tp": 2, "cp": 2, "zero": 3}, TALL),
    Row("moe lamb", 2, {"ep": 2}),
    Row("moe lamb", 4, {"tp": 2, "etp": 2, "zero": 1}, TALL),
    Row("llama", 4, {"tp": 4}, TALL),
    Row("llama dropout", 4, {"tp": 4, "recompute": "selective"} | NO_SP, TALL),
    Row("one key head", 4, {"tp": 4, "recompute": "full"}, TALL),
    Row("one key head dropout", 4, {"tp": 2, "pp": 2, "schedule": "zero_bubble"}),
    Row("one key head", 4, {"tp": 2, "zero": 1, "bucket_mib": 0.002}, TALL),
    Row("one key head", 4, {"tp": 2, "cp": 2, "zero": 3}, TALL),
    Row("moe", 4, {"tp": 4, "ep": 2, "etp": 2, "zero": 1}, TALL),
    Row("llama documents", 8, {"tp": 4, "cp": 2, "cp_mode": "all_gather"}, TALL),
    Row("gpt dropout", 4, SQUARE, TALL),
    Row("llama", 4, SQUARE, TALL),
    Row("llama", 4, SQUARE | {"zero": 1}, TALL),
    Row("moe", 4, SQUARE, TALL),
    Row("gpt dropout", 4, SQUARE | {"tp_rows": 1}, TALL),
    Row("llama dropout", 4, SQUARE | {"recompute": "full"}, TALL),
    Row("gpt", 2, {"tp": 2, "tp_mode": "2d", "tp_rows": 2, "recompute": "selective"}, TALL),
    Row("one key head", 8, {"tp": 8, "tp_mode": "2d", "tp_rows": 2}, TALL),
    Row("gpt of sixes dropout", 6, OBLONG, TALL),
    Row(
        "llama of sixes",
        6,
        {"tp": 6, "tp_mode": "2d", "tp_rows": 3},
        {"micro_batch_size": 3, "global_batch_size": 12},
    ),
    Row(
        "gpt of sixes dropout",
        9,
        {"tp": 9, "tp_mode": "2d"},
        {"micro_batch_size": 3, "global_batch_size": 12},
    ),
    Row("llama documents", 8, SQUARE | {"bucket_mib": 0.002, "zero": 1}, TALL),
    Row("gpt dropout", 8, SQUARE | {"pp": 2, "zero": 1}, TALL),
    Row("gpt deep", 8, SQUARE | {"pp": 2, "vpp": 2, "schedule": "interleaved"}, TALL),
    Row("llama", 8, SQUARE | {"pp": 2, "schedule": "zero_bubble"}, TALL),
    Row("gpt lamb", 4, SQUARE, TALL),
    Row("llama", 8, SQUARE | {"zero": 3}, TALL),
    Row("moe", 4, SQUARE | {"ep": 2, "etp": 2}, TALL),
    Row("moe wide", 8, SQUARE | {"ep": 8, "zero": 1}, TALL),
    Row("moe capped", 4, SQUARE | {"dispatcher": "all_gather"}, TALL),
    Row("moe biased", 4, SQUARE | {"ep": 4}, TALL),
    Row("gpt dropout", 8, {"tp": 2, "pp": 2}),
    Row("llama", 8, {"tp": 2, "cp": 2, "pp": 2, "zero": 1}),
    Row("moe", 8, {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2}),
    Row("bert dropout", 2, {"tp": 2}, TALL),
    Row("bert post", 2, {"tp": 2, "recompute": "selective"} | NO_SP, TALL),
    Row("bert", 2, {"cp": 2}),
    Row("bert", 2, {"cp": 2, "cp_mode": "a2a", "recompute": "full"}),
    Row("bert dropout", 2, {"pp": 2}),
    Row("bert post", 2, {"pp": 2, "schedule": "zero_bubble"}),
    Row("bert", 2, {"zero": 1}),
    Row("bert post", 4, {"tp": 2, "zero": 3}, TALL),
    Row("bert masked", 4, {"tp": 2, "cp": 2, "cp_mode": "all_gather"}, TALL),
    Row("bert", 4, {"tp": 2, "pp": 2, "recompute": "full"}, TALL),
    Row("bert classes", 2, {"tp": 2}, TALL),
    Row("bert classes", 4, {"cp": 2, "pp": 2}),
    Row("bert classes", 4, {"pp": 2, "zero": 3}),
    Row("bert choices", 4, {"tp": 2, "cp": 2}, TALL),
    Row("bert choices", 2, {"pp": 2, "zero": 1} | NO_SP),
    Row("bert dropout", 4, SQUARE, TALL),
    Row("bert post", 2, {"tp": 2, "tp_mode": "2d", "tp_rows": 2, "zero": 1}, TALL),
    Row("bert post", 8, SQUARE | {"pp": 2, "schedule": "zero_bubble"}, TALL),
    Row("bert masked", 8, SQUARE | {"pp": 2, "recompute": "full"}, TALL),
    Row("bert dropout", 8, SQUARE | {"zero": 3}, TALL),
    Row("bert classes", 4, SQUARE | {"recompute": "selective"}, TALL),
    Row("bert choices", 4, {"tp": 2, "tp_mode": "2d", "tp_rows": 2, "pp": 2}, TALL),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_layout_is_the_one_rank_run(row):
    found = compare(row)
    assert found.gradient_64 < EXACT and found.curve_64 < EXACT, found
    assert found.gradient_32 < CLOSE and found.curve_32 < CLOSE, found


ANY = sorted(MODELS)
DECODERS = [name for name in ANY if Row(name, 1, {}).config().model.head == "lm"]


@st.composite
def layouts(draw, models=ANY):
    """Layouts of 4 and 8 ranks of any of the models, nearly all of them legal."""
    name, world = draw(st.sampled_from(models)), draw(st.sampled_from([4, 8]))
    model = Row(name, world, {}).config().model
    dp = draw(st.sampled_from([1, 2]))
    sizes = doubled(draw, world // dp, {"tp": model.num_heads, "cp": 4, "pp": 4})
    tp, pp = sizes["tp"], sizes["pp"]
    if model.num_experts:
        most = {"ep": model.num_experts, "etp": 4, "edp": world}
        sizes |= doubled(draw, world // pp, most)
        del sizes["edp"]
    whole_heads = model.num_kv_heads % (tp * sizes["cp"]) == 0
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    vpp = 2 if schedule == "interleaved" else 1
    unsharded = schedule == "zero_bubble" or pp < vpp
    parallel = sizes | {
        "sequence_parallel": draw(st.sampled_from([True, tp == 1 or model.num_experts > 0])),
        "cp_mode": draw(st.sampled_from(["ring", "all_gather"] + ["a2a"] * whole_heads)),
        "dispatcher": draw(st.sampled_from(["all_to_all", "all_gather"])),
        "zero": draw(st.sampled_from([0, 1] + [3] * (not unsharded))),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "bucket_mib": draw(st.sampled_from([1e-6, 0.004, 25.0])),
        "schedule": schedule,
        "vpp": vpp,
    }
    stages = pp * vpp
    cuts = draw(
        st.lists(st.integers(0, model.num_layers), min_size=stages - 1, max_size=stages - 1)
    )
    ends = [0, *sorted(cuts), model.num_layers]
    parallel["stage_layers"] = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return Row(name, world, parallel, {"micro_batch_size": draw(st.sampled_from([1, 2]))})


def doubled(draw, ranks, most):
    """Sizes of axes, up to `most` of each, whose product is `ranks`, a power of two."""
    sizes = dict.fromkeys(most, 1)
    while ranks > 1:
        axis = draw(st.sampled_from([a for a in most if 2 * sizes[a] <= most[a]]))
        sizes[axis], ranks = 2 * sizes[axis], ranks // 2
    return sizes


@settings(max_examples=8)
@given(layouts())
def test_any_legal_layout_of_four_or_eight_ranks_has_the_one_rank_gradients(row):
    assume(not rules.problems(row.config(), row.world))
    exact, _ = one_rank(row.model)
    for rank, mine in enumerate(run_ranks(row.world, train_on, row.config("fp64"), 1)):
        assert worst(exact, mine) < EXACT
        assert slices(row, rank, mine, exact) < EXACT


def print_table(words):
    """Prints docs/parity.md's table: the measured differences of rows that hold all words."""
    print("| model and layout | gradients, fp64 | curve, fp64 | gradients, fp32 | curve, fp32 |")
    print("|---|---|---|---|---|")
    for row in (row for row in ROWS if all(word in str(row) for word in words)):
        print(f"| {row} | " + " | ".join(f"{value:.1e}" for value in compare(row)) + " |")


if __name__ == "__main__" and sys.argv[1:2] == ["--table"]:
    print_table(sys.argv[2:])
