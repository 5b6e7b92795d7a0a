"""Plants faults in copies of the package, one at a time, and sees tests turn red.

`python tests/plant_faults.py` plants those of parity_faults.py and prints docs/parity.md's table;
it ends with 1 where a fault was not seen, or a row saw none. A fault is run on FEW of its rows,
those first that saw none yet; a row that saw none in the end, on each of its faults. Each run is a
process that imports its own copy of the package (`--on COPY NUMBERS` runs rows there). The one-rank
run has the fault too.

`python tests/plant_faults.py --package [WORDS]` plants those of package_faults.py, or those whose
file or phrase has one of the words, and prints docs/faults.md's table; it ends with 1 where a
fault's test is green with it, or red without.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from package_faults import PACKAGE_FAULTS
from parity_faults import FAULTS, facts

ROOT = Path(__file__).parent.parent
FEW, STEPS = 4, 3  # rows of a fault; steps of its curve, as some faults are seen in the second
EXACT = 1e-10
BROKEN = 70  # the exit code of a fork that could not run its tests


def main():
    """Prints the table, then what nobody saw."""
    from test_parity import ROWS

    seen, unseen = set(), []
    print("| fault | red of tried | curve off by | gradients off by | rows |")
    print("|---|---|---|---|---|")
    for fault in FAULTS:
        concerned = [n for n, row in enumerate(ROWS) if fault.on(facts(row))]
        red = tried(fault, sorted(concerned, key=lambda n: n in seen)[:FEW])
        seen.update(red)
        if not red:
            unseen.append(fault.what)
    for number, row in enumerate(ROWS):  # those that no fault has come to, or that saw none
        for fault in FAULTS:
            if number not in seen and fault.on(facts(row)):
                seen.update(tried(fault, [number]))
    unseen += [str(row) for n, row in enumerate(ROWS) if n not in seen]
    print("\n".join(f"not red: {name}" for name in unseen) or "every fault and every row was red")
    return 1 if unseen else 0


def tried(fault, numbers):
    """Prints what a fault does to some rows, by their numbers; returns those that are red."""
    from test_parity import ROWS

    found = damage(fault, numbers)
    red = [n for n in numbers if not found[n] or not all(value < EXACT for value in found[n])]
    told = [found[n] for n in red if found[n]]
    worst = [f"{max(values):.1g}" for values in zip(*told, strict=True)] if told else ["fails"]
    names = "; ".join(str(ROWS[n]) for n in red)
    cells = [fault.what, f"{len(red)} of {len(numbers)}", *(worst * 2)[:2], names]
    print(f"| {' | '.join(cells)} |", flush=True)
    return red


def damage(fault, numbers):
    """{row number: (curve, gradients) off by, or None where it fails} with the fault planted."""
    with copied("core/" + fault.file, fault) as folder:
        command = [sys.executable, __file__, "--on", folder, *map(str, numbers)]
        environ = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, check=True)
    return {int(n): found for n, found in json.loads(done.stdout).items()}


@contextmanager
def copied(file="", fault=None):
    """A folder with a copy of the package, and in its file the fault, where there is one."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        shutil.copytree(ROOT / "mtcli", Path(folder) / "mtcli")
        if fault:
            path = Path(folder) / "mtcli" / file
            text = path.read_text()
            assert text.count(fault.old) == 1, f"{file}: {fault.old}"
            path.write_text(text.replace(fault.old, fault.new))
        yield folder


def measured(folder, numbers):
    """What `damage` reads: the rows' differences, in float64, in the copy that is imported."""
    from test_parity import ROWS

    import mtcli

    assert Path(mtcli.__file__).is_relative_to(folder), mtcli.__file__
    return {n: _difference(ROWS[n]) for n in numbers}


def _difference(row):
    import torch
    from parity_runs import slices, train_on, worst
    from ranks import run_ranks

    whole = _one_rank(row.model, row.config().batch.global_batch_size)
    try:
        ranks = run_ranks(row.world, train_on, row.config(), STEPS, deadline=60)
        pairs = [(worst(whole, m), slices(row, n, m, whole)) for n, m in enumerate(ranks)]
    except AssertionError as error:  # a rank that raised or hung, or other initial weights
        print(f"{row}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return torch.tensor(pairs, dtype=torch.float64).amax(0).tolist()  # NaN if any is


@cache
def _one_rank(model, global_batch_size):
    from parity_runs import Row, train_on
    from ranks import run_ranks

    row = Row(model, 1, {}, {"global_batch_size": global_batch_size})
    return run_ranks(1, train_on, row.config(), STEPS)[0]


def plant_in_package(words):
    """Prints a row for each fault of the package, and what its test said to stderr."""
    faults = [f for f in PACKAGE_FAULTS if not words or any(w in f.file + f.what for w in words)]
    tests = list(dict.fromkeys(fault.seen_by for fault in faults))
    with copied() as folder:
        code, output, total = tested(folder, tests)
    assert code == 0, f"red without a fault:\n{output}"
    survived = []
    print("| room | fault | one line made wrong | seen by | | seconds |")
    print("|---|---|---|---|---|---|")
    for fault in faults:
        with copied(fault.file, fault) as folder:
            code, output, seconds = tested(folder, [fault.seen_by], "-x")
        assert code in (0, 1), output
        total += seconds
        survived += [] if code else [fault.what]
        print(row_of(fault, "red" if code else "SURVIVED", seconds), flush=True)
        print("\n".join(re.findall("^E .*", output, re.MULTILINE)[:3]), file=sys.stderr, flush=True)
    print(f"{total} processor seconds, those of all tests without a fault among them")
    print("\n".join(f"survived: {what}" for what in survived) or "every fault was seen")
    return 1 if survived else 0


def tested(folder, tests, *options):
    """(exit code, output, processor seconds) of tests with the copy of the package in a folder.

    They run in a fork of this process, which has imported what is large and nothing of mtcli.
    """
    import conftest  # noqa: F401 - variables that come before torch
    import hypothesis.extra.numpy  # noqa: F401
    import pytest
    import torch.distributed  # noqa: F401

    assert "mtcli" not in sys.modules, "a fork imports the copy"
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if not pid:
            try:  # whatever happens, this process goes no further
                for descriptor in (1, 2):
                    os.dup2(file.fileno(), descriptor)
                os.chdir(folder)  # not ROOT, which a forkserver would find first
                os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT)])
                sys.path[:] = [folder, *sys.path, str(ROOT)]
                nodes = [str(ROOT / "tests" / test) for test in tests]
                setup = ["-c", str(ROOT / "pyproject.toml"), "--tb=short"]
                code = pytest.main([*setup, *options, *nodes])
                sys.stdout.flush()
                os._exit(code)
            except BaseException:
                traceback.print_exc()
                os._exit(BROKEN)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        output = file.read().decode(errors="replace")
    seconds = re.search(r"([\d,]+) processor seconds", output)
    return code, output, int(seconds[1].replace(",", "")) if seconds else 0


def row_of(fault, verdict, seconds):
    """A row of docs/faults.md."""
    line = f"`{fault.file}`: {code_of(fault.old)} -> {code_of(fault.new)}"
    return f"| {fault.room} | {fault.what} | {line} | {fault.seen_by} | {verdict} | {seconds} |"


def code_of(text):
    """Text of a program on one line of a table."""
    return f"`{' '.join(text.split())}`".replace("|", "\\|") if text.strip() else "nothing"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on"]:
        print(json.dumps(measured(sys.argv[2], [int(n) for n in sys.argv[3:]])))
    elif sys.argv[1:2] == ["--package"]:
        sys.exit(plant_in_package(sys.argv[2:]))
    else:
        sys.exit(main())
