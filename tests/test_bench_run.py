"""`make bench`: one file with machine, versions and the rows of every script, which goes on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
COMMON = ("run.py", "progress.py", "arguments.py", "machine.py", "gpu/record.py")
SCRIPT = """
from pathlib import Path
from arguments import Arguments, write_rows
parser = Arguments(__doc__, steps=1)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()
with Path(__file__).with_suffix(".ran").open("a") as file:
    file.write("x")
write_rows(args.json, [{"steps": args.steps}])
"""
FAILS = SCRIPT + "if not Path(__file__).with_name('mended').exists(): raise SystemExit(3)\n"


@pytest.fixture
def bench(tmp_path):
    """A function that runs the scripts "good" and "bad": (exit code, stderr, the file's JSON)."""
    (tmp_path / "gpu").mkdir()
    for name in COMMON:
        shutil.copy(FOLDER / name, tmp_path / name)
    (tmp_path / "bench_bad.py").write_text(FAILS)
    (tmp_path / "bench_good.py").write_text(SCRIPT)
    path = tmp_path / "bench.json"

    def run(*words):
        command = [sys.executable, tmp_path / "run.py", "--json", path, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr, json.loads(path.read_text())

    return run


def test_a_failing_script_is_named_and_stops_no_other_and_a_run_goes_on(bench, tmp_path):
    code, errors, found = bench()
    assert code == 1 and errors.endswith("error: these benchmarks failed: bad\n")
    bad, good = (found["scripts"][name] for name in ("bad", "good"))
    assert (bad["status"], good["status"]) == (3, 0)
    assert good["rows"] == [{"steps": 5}] and good["arguments"] == [] and good["seconds"] >= 0
    assert found["machine"]["cores"] > 0 and found["machine"]["memory_gib"] > 0
    assert found["versions"]["python"] == sys.version.split()[0] and found["versions"]["numpy"]

    (tmp_path / "mended").touch()
    code, _, again = bench("--resume")
    assert code == 0 and again["scripts"]["bad"]["status"] == 0
    assert again["scripts"]["good"] == good
    assert (tmp_path / "bench_good.ran").read_text() == "x"
    assert (tmp_path / "bench_bad.ran").read_text() == "xx"


def test_a_file_is_neither_replaced_nor_continued_with_other_facts(bench, tmp_path):
    assert bench("good", "--tiny")[2]["scripts"]["good"]["rows"] == [{"steps": 1}]
    code, errors, _ = bench("good")
    assert code == 1 and "is there\n\nhint: --resume goes on with it" in errors
    code, errors, _ = bench("good", "--resume")
    assert code == 1 and "bench.json has another tiny\n\nhint: --json" in errors
    assert (tmp_path / "bench_good.ran").read_text() == "x"
