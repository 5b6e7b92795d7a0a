"""The source files of both packages, each of which is parsed once for all tests of a process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mtcli"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FUSED = sorted((ROOT / "fused" / "mtcli_fused").rglob("*.py"))  # which stands on it


@cache
def nodes(path):
    """All nodes of a file's syntax tree; its module is the first."""
    return list(ast.walk(ast.parse(path.read_text())))


def last_name(call):
    """The name that a call ends with: `load` of torch.load(x)."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
