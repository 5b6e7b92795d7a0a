"""Every script of benchmarks/ does what it says, through public names of the package."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("benchmarks", "fused/benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Named tuples have their methods under such names, and torch some of its operators.
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}


def private_names(source):
    """What a script reads of others under a name of theirs: `line: expression`."""
    tree = ast.parse(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtcli"):
            names = [alias.name for alias in node.names]
            names += (node.module or "").split(".")
        elif isinstance(node, ast.Attribute) and root_of(node) not in ("self", "torch"):
            names = [node.attr] if node.attr not in defined | PUBLIC else []
        else:
            continue
        if any(name.startswith("_") and not name.startswith("__") for name in names):
            yield f"{node.lineno}: {ast.unparse(node)}"


def root_of(node):
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def test_no_script_reads_a_private_name_of_the_package():
    assert len(SOURCES) > 60
    seen = {path.name: [*private_names(path.read_text())] for path in SOURCES}
    assert {name: lines for name, lines in seen.items() if lines} == {}


def test_a_private_name_is_seen_where_it_is_read_or_imported():
    sources = ["data._row(3)", "from mtcli.core.data.best_fit import _share", "a.b()._c.d"]
    assert all([*private_names(source)] for source in sources)
