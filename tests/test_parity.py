"""The table of layouts: whatever the ranks, a run is that of its oracle, which has no parallelism.

Each row of parity_factors.py trains a tiny model on a layout and is compared in float64: initial
weights bit for bit, every first gradient of every rank (replicas, padding and the second copy of a
tied embedding too), every tensor of a checkpoint (optimizer, exchange and router biases too), and
the curve of losses and gradient norms, which goes on from that checkpoint on another row's layout.
`python tests/test_parity.py --table` prints the differences that docs/reference/parity.md shows;
words after it choose the rows that have all of them.
"""

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings
from marks import slow
from parity_factors import FACTORS, GATE, LAYOUT, MORE_ROWS, ROWS, row_of
from parity_runs import compare, curve_off, gradients_off, oracle, train_on
from ranks import run_ranks

EXACT, CLOSE = 1e-10, 1e-5  # relative, in float64 and float32
TABLE = [*ROWS, *MORE_ROWS]
LONG_ROWS = [row for row in TABLE if row.replicas == 1 and row.world == 4][::6]


def tiered(rows, reason, kept):
    """Cases of rows, slow but for some by name."""
    return [pytest.param(r, marks=() if str(r) in kept else slow(reason), id=str(r)) for r in rows]


@pytest.mark.parametrize("row", tiered(TABLE, "2 s, and its faults are seen by other rows", GATE))
def test_every_layout_is_the_run_without_parallelism(row):
    found = compare(row, row.then(TABLE))
    assert all(value < EXACT for value in found), found  # NaN is not


@pytest.mark.parametrize("row", tiered(LONG_ROWS, "20 steps of 4 ranks", {str(LONG_ROWS[0])}))
def test_twenty_steps_in_float32_have_the_curve_to_rounding(row):
    exact = oracle(row, "fp32", 20)
    losses = exact.replicas[0].losses
    for rank in run_ranks(row.world, train_on, row.config("fp32", 20), row.samples, 20):
        assert len(rank.losses) == 20 and rank.losses == pytest.approx(losses, rel=CLOSE, abs=0)
        # Norms of gradients are sums of squares of many small ones, and feel rounding more.
        assert curve_off(rank, exact) < 10 * CLOSE


@st.composite
def rows(draw):
    """Rows of any levels, whose layers lie on stages of any sizes, nearly all of them legal."""
    row = row_of({name: draw(st.sampled_from(list(levels))) for name, levels in FACTORS.items()})
    layers, stages = row.model["num_layers"], row.parallel.get("pp", 1) * row.parallel.get("vpp", 1)
    at = st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)
    ends = [0, *sorted(draw(at)), layers]
    sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    return row._replace(more={"parallel": {"stage_layers": sizes}})


@slow("8 random rows of up to 8 ranks")
@settings(max_examples=8, suppress_health_check=[HealthCheck.filter_too_much])
@given(rows())
def test_any_legal_row_with_stages_of_any_sizes_has_the_gradients_of_its_oracle(row):
    assume(row.is_legal)
    exact = oracle(row)
    ranks = run_ranks(row.world, train_on, row.config(), row.samples, 1)
    for number, rank in enumerate(ranks):
        assert curve_off(rank, exact) < EXACT and gradients_off(row, number, rank, exact) < EXACT


def print_table(words):
    """Prints the table of docs/reference/parity.md: differences of rows that have all words."""
    print("| row | goes on with | gradients | curve | checkpoint |\n|---|---|---|---|---|")
    for row in (row for row in TABLE if all(word in str(row) for word in words)):
        after = row.then(TABLE)
        layout = {f: after.level(f) for f in (*LAYOUT, "dp") if f in after.levels}
        layout |= after.more.get("parallel", {})
        cells = " ".join(f"{name}={value}" for name, value in layout.items()) or "one rank"
        cells += "".join(f" | {value:.1e}" for value in compare(row, after))
        print(f"| {row} | {cells} |", flush=True)


if __name__ == "__main__" and sys.argv[1:2] == ["--table"]:
    print_table(sys.argv[2:])
