"""Every script of benchmarks/ runs, with one tiny row, and reads public names of the package.

Scripts are forks of the warm process, and so is what they start with their sys.executable.
"""

import ast
import json
import math
import re
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from command_line import stand_ins
from marks import slow

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("benchmarks", "fused/benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Named tuples have their methods under such names, torch's tensors and graph nodes their counters.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_version", "_sequence_nr"}
NOT_OURS = ("self", "sys", "torch", "aten", "func")  # the last two are torch's operators
# What a script replaces: `patch.object` fails where it is no more.
REPLACED = {
    "_milliseconds": "played.py has no GPU whose clock autotune could read",
    "_launch": "step_counts.py counts launches of kernels that fake tensors do not reach",
}


def private_names(source, package=""):
    """What a script reads of others under a private name, `line: expression`; also as a string,
    where that is a name in the package's source."""
    tree = ast.parse(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtcli"):
            names = [*(alias.name for alias in node.names), *(node.module or "").split(".")]
        elif isinstance(node, ast.Attribute) and root_of(node) not in NOT_OURS:
            names = {node.attr} - defined - PUBLIC
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(node.value)):
            defines = rf"(?:def|class) {node.value}\b|^ *{node.value}\b[^\n]*="
            names = {node.value} - REPLACED.keys() if re.search(defines, package, re.M) else []
        if any(map(is_private, names)):
            yield f"{node.lineno}: {ast.unparse(node)}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def root_of(node):
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def test_no_script_reads_a_private_name_of_the_package():
    assert len(SOURCES) > 60
    package = "".join(path.read_text() for path in (ROOT / "mtcli").rglob("*.py"))
    assert all(re.search(rf"\bdef {name}\b", package) for name in REPLACED)
    seen = {path.name: [*private_names(path.read_text(), package)] for path in SOURCES}
    assert {name: lines for name, lines in seen.items() if lines} == {}


def test_a_private_name_is_seen_where_it_is_read_or_imported():
    sources = ["data._row(3)", "from mtcli.core.data.best_fit import _share", "a.b()._c.d"]
    sources += ["setattr(OneBit, '_secret', 3)"]
    assert all([*private_names(source, "_secret = True")] for source in sources)


# Those of other folders, and the test that runs each.
ELSEWHERE = {
    "benchmarks/run.py": "tests/test_bench_run.py",
    "benchmarks/gpu/bench_kernels.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/bench_step.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/compile.py": "tests/kernels/test_compile.py",
    "benchmarks/gpu/first.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/profile_step.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/run.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/table.py": "tests/test_bench_gpu.py",
    "benchmarks/gpu/trace_step.py": "tests/test_trace_step.py",
    "fused/benchmarks/bench_fused_models.py": "fused/tests/test_fused_models.py",
}
SCRIPTS = {
    str(path.relative_to(ROOT)): path for path in SOURCES if "if __name__" in path.read_text()
}


@slow("3 s each, of an interpreter, models and a peer's import")
@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - ELSEWHERE.keys()))
def test_each_script_measures_a_tiny_row(name, tmp_path):
    rows = tmp_path / "rows.json"
    command = [stand_ins() / "python", SCRIPTS[name], "--tiny", "--json", rows]
    done = subprocess.run(command, cwd=tmp_path, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(rows.read_text())
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert any(math.isfinite(number) for number in numbers(found)), found
    docs, stem = performance_docs(), SCRIPTS[name].stem.removeprefix("bench_")
    if stem in docs.TABLES:
        rows = [*docs.rows_of(stem, {"status": 0, "rows": found})]
        assert rows and all(len(cells) == 4 and cells[1] for cells in rows)


def performance_docs():
    """The script that writes tables from rows."""
    path = ROOT / "scripts" / "performance_docs.py"
    spec = spec_from_file_location(path.stem, path)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def numbers(found):
    """The numbers of a JSON value."""
    if isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from numbers(part)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield found


def test_a_peer_that_is_not_installed_is_left_out_and_the_rows_say_so(monkeypatch, tmp_path):
    import arguments
    import bench_select

    there = arguments.find_spec
    monkeypatch.setattr(
        arguments, "find_spec", lambda name: None if name == "apricot" else there(name)
    )
    rows = {row["contender"]: row for row in bench_select.peers(20, 2, 1, 1)}
    assert rows["apricot"] == {"contender": "apricot", "skipped": "apricot is not installed"}
    assert rows["submodlib"]["objective"] == pytest.approx(rows["mtcli"]["objective"])

    with pytest.raises(SystemExit) as end:
        flags = ["--json", str(tmp_path / "rows.json")]
        arguments.Arguments("words", needs=("torch", "nothing_of_this_name")).parse_args(flags)
    why = {"skipped": "nothing_of_this_name is not installed"}
    assert end.value.code == 0 and json.loads((tmp_path / "rows.json").read_text()) == why


def test_scripts_that_other_tests_run_are_named_there():
    assert ELSEWHERE.keys() < SCRIPTS.keys()
    for name, test in ELSEWHERE.items():
        assert Path(name).stem in (ROOT / test).read_text(), f"{test} runs no {name}"
