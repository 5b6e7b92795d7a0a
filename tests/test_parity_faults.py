"""The planted faults can still be planted, and each row of the parity table has one to notice.

That they turn rows red is `python tests/plant_faults.py`, some minutes long; docs/parity.md has it.
"""

from pathlib import Path

import pytest
from parity_faults import FAULTS, facts
from test_parity import ROWS

CORE = Path(__file__).parent.parent / "mtcli" / "core"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_s_line_is_in_the_source_once_and_some_row_can_tell(fault):
    text = (CORE / fault.file).read_text()
    assert text.count(fault.old) == 1 and fault.new != fault.old
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert any(fault.on(facts(row)) for row in ROWS)


def test_every_row_has_a_fault_to_notice():
    blind = [str(row) for row in ROWS if not any(fault.on(facts(row)) for fault in FAULTS)]
    assert blind == []


def test_the_docs_list_the_faults():
    page = (CORE.parent.parent / "docs" / "parity.md").read_text()
    assert [fault.what for fault in FAULTS if f"| {fault.what} |" not in page] == []
