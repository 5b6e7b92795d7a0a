"""Plants every fault of parity_faults.py in a copy of the package and sees rows turn red.

`python tests/plant_faults.py` prints docs/parity.md's table, and ends with 1 where a fault was not
seen, or a row saw none. A fault is run on FEW of its rows, those first that saw none yet; a row
that saw none in the end, on each of its faults. Each run is a process that imports its own copy
of the package (`--on COPY NUMBERS` runs rows there). The one-rank run has the fault too.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from parity_faults import FAULTS, facts

ROOT = Path(__file__).parent.parent
FEW, STEPS = 4, 3  # rows of a fault; steps of its curve, as some faults are seen in the second
EXACT = 1e-10


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
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        shutil.copytree(ROOT / "mtcli", Path(folder) / "mtcli")
        path = Path(folder) / "mtcli" / "core" / fault.file
        text = path.read_text()
        assert text.count(fault.old) == 1, f"{fault.file}: {fault.old}"
        path.write_text(text.replace(fault.old, fault.new))
        command = [sys.executable, __file__, "--on", folder, *map(str, numbers)]
        environ = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, check=True)
    return {int(n): found for n, found in json.loads(done.stdout).items()}


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on"]:
        print(json.dumps(measured(sys.argv[2], [int(n) for n in sys.argv[3:]])))
    else:
        sys.exit(main())
