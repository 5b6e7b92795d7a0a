"""What a rank does at a start, in a save and for the watchdog, however many ranks there are.

benchmarks/bench_growth.py plays the ranks. Counts hold on a busy machine; seconds are its own.
"""

from pathlib import Path

import pytest
from marks import slow_cases

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_growth

    return bench_growth


@pytest.mark.parametrize("world", [128, *slow_cases("2,048 ranks are played for 15 s", 2048)])
def test_a_rank_s_opens_messages_and_requests_are_few(bench, tmp_path, world):
    row = bench.play(world, tmp_path)
    # manifest, its hash, config, the hashes of the own file, the own file; rank 0 also checks these
    assert row["opens_others"] == 5 and row["opens"] <= 8 < row["boxes"]
    assert row["received"] <= row["sockets"] <= 2 * bench.tree.FAN_OUT
    assert row["told_bytes"] < row["manifest_bytes"] + 4096 < 8e6
    assert row["received_bytes"] < row["manifest_bytes"]
    assert row["report_requests"] <= 8 + 2 * world.bit_length()
    limits = bench.MOST | {"start_seconds": 20.0, "save_seconds": 5.0}  # on a busy machine
    assert all(row[name] <= most for name, most in limits.items())


def test_a_rank_asks_the_store_as_often_whether_8_or_2048_meet(bench):
    """The rest of its requests are looks at the clock's pace for what is not there yet."""
    kinds = [bench.play_meeting(world)[0] for world in (8, 2048)]
    assert max(kinds) <= 24
