"""The planted faults of the package can still be planted, and the tests that see them are there.

That they turn these tests red is `python tests/plant_faults.py`; docs/reference/faults.md has it.
"""

import ast
from pathlib import Path

from package_faults import PACKAGE_FAULTS

ROOT = Path(__file__).parent.parent


def test_each_fault_s_line_is_in_the_source_once():
    for fault in PACKAGE_FAULTS:
        text = (ROOT / fault.path).read_text()
        assert text.count(fault.old) == 1 and fault.new != fault.old, fault.what
        compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_the_test_that_sees_each_is_there():
    for fault in PACKAGE_FAULTS:
        file, _, test = fault.test.partition("::")
        nodes = ast.parse((ROOT / file).read_text()).body
        assert test in {getattr(node, "name", "") for node in nodes}, fault.seen_by


def test_every_room_of_the_package_has_one():
    folders = [ROOT / "mtcli", *(ROOT / "mtcli").rglob("*")]
    with_code = [f for f in folders if any(p.name != "__init__.py" for p in f.glob("*.py"))]
    parity = {"parallel"}  # parity_faults.py has its faults
    rooms = {fault.room for fault in PACKAGE_FAULTS} | parity
    names = [str(folder.relative_to(ROOT / "mtcli")).removeprefix("core/") for folder in with_code]
    assert [name for name in names if name.replace(".", "cli") not in rooms] == []


def test_the_docs_list_them():
    page = (ROOT / "docs" / "reference" / "faults.md").read_text()
    assert [fault.what for fault in PACKAGE_FAULTS if f"| {fault.what} |" not in page] == []
