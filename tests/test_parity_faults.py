"""The parity table has each pair of options, and each of its rows has a planted fault to notice.

That they turn rows red is `python tests/plant_parity_faults.py`; docs/reference/parity.md has its
table.
"""

import random
from pathlib import Path

from cover_parity import PAIRS, legal_row, pairs_of
from parity_factors import GATE, ROWS
from parity_faults import FAULTS, facts
from test_parity import TABLE

CORE = Path(__file__).parent.parent / "mtcli" / "core"


def test_a_fault_s_line_is_in_the_source_once_and_two_rows_can_tell():
    for fault in FAULTS:
        text = (CORE / fault.file).read_text()
        assert text.count(fault.old) == 1 and fault.new != fault.old, fault.what
        compile(text.replace(fault.old, fault.new), fault.file, "exec")
        assert sum(fault.on(facts(row)) for row in TABLE) >= 2, fault.what


def test_a_pair_of_levels_that_no_row_has_is_one_that_no_legal_row_has():
    """Where a level was added, `python tests/cover_parity.py` chooses rows with its pairs."""
    covered = set().union(*map(pairs_of, ROWS))
    left_out = [pair for pair in PAIRS if pair not in covered]
    found = [(pair, legal_row(pair, random.Random(0))) for pair in left_out]
    assert [f"{sorted(pair)}: {row}" for pair, row in found if row] == []
    assert len(covered) > 1200 and all(row.is_legal for row in ROWS)


def test_make_test_runs_rows_that_are_in_the_table():
    assert GATE and set(map(str, TABLE)) >= GATE


def test_every_row_has_a_fault_to_notice():
    blind = [str(row) for row in TABLE if not any(fault.on(facts(row)) for fault in FAULTS)]
    assert blind == []


def test_the_docs_list_the_faults():
    page = (CORE.parent.parent / "docs" / "reference" / "parity.md").read_text()
    assert [fault.what for fault in FAULTS if f"| {fault.what} |" not in page] == []
