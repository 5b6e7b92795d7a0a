"""The planted faults can still be planted, and each row of the parity table has one to notice.

That they turn rows red is `python tests/plant_parity_faults.py`; docs/parity.md has its table.
"""

from pathlib import Path

from parity_faults import FAULTS, facts
from test_parity import TABLE

CORE = Path(__file__).parent.parent / "mtcli" / "core"


def test_a_fault_s_line_is_in_the_source_once_and_two_rows_can_tell():
    for fault in FAULTS:
        text = (CORE / fault.file).read_text()
        assert text.count(fault.old) == 1 and fault.new != fault.old, fault.what
        compile(text.replace(fault.old, fault.new), fault.file, "exec")
        assert sum(fault.on(facts(row)) for row in TABLE) >= 2, fault.what


def test_every_row_has_a_fault_to_notice():
    blind = [str(row) for row in TABLE if not any(fault.on(facts(row)) for fault in FAULTS)]
    assert blind == []


def test_the_docs_list_the_faults():
    page = (CORE.parent.parent / "docs" / "parity.md").read_text()
    assert [fault.what for fault in FAULTS if f"| {fault.what} |" not in page] == []
