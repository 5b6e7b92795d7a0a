"""Plants the faults of parity_faults.py in copies of the package and sees rows turn red.

`python tests/plant_parity_faults.py` prints docs/reference/parity.md's table, and writes to
parity_rows.json the fewest rows in which each fault is red twice: those that `make test` runs. It
ends with 1 where a fault is red in less than two rows, or a row is red for no fault. A fault is
tried on a few of the rows that can tell, first on those that were red most often, until two are
red; a row that is red for none in the end, on each fault that it can tell. Each try is a process
that imports its own copy of the package (`--on COPY NUMBERS`), in which the oracle has the fault
too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from cover_parity import write
from parity_factors import GATE, ROWS
from parity_faults import FAULTS, facts
from plant_faults import copied

FEW, TWICE = 4, 2  # rows that a fault is tried on at a time, and red rows that are enough
EXACT = 1e-10


def main():
    """Prints the table and chooses the gate."""
    from test_parity import TABLE

    red = {number: set() for number in range(len(TABLE))}  # the faults that a row is red for
    print("| fault | red of tried | gradients | curve | checkpoint | rows |")
    print("|---|---|---|---|---|---|")
    for fault in FAULTS:
        waiting = concerned(fault, TABLE)
        waiting.sort(key=lambda n: (-len(red[n]), str(TABLE[n]) not in GATE, TABLE[n].world))
        while waiting and sum(fault.what in faults for faults in red.values()) < TWICE:
            now, waiting = waiting[:FEW], waiting[FEW:]
            for number in try_rows(fault, now, TABLE):
                red[number].add(fault.what)
    for fault in FAULTS:
        blind = [number for number in concerned(fault, TABLE) if not red[number]]
        for number in try_rows(fault, blind, TABLE) if blind else ():
            red[number].add(fault.what)
    rows = smallest(red, [row.world for row in TABLE])
    write([row.levels for row in ROWS], [str(TABLE[number]) for number in rows])
    print(f"\n{len(rows)} of {len(TABLE)} rows have each fault red twice, as far as it was tried")
    seen = [fault.what for faults in red.values() for fault in FAULTS if fault.what in faults]
    unseen = [fault.what for fault in FAULTS if seen.count(fault.what) < TWICE]
    unseen += [str(row) for number, row in enumerate(TABLE) if not red[number]]
    print("\n".join(f"not red: {name}" for name in unseen) or "every fault and every row was red")
    return 1 if unseen else 0


def concerned(fault, table):
    """The numbers of the rows that can tell a fault."""
    return [number for number, row in enumerate(table) if fault.on(facts(row))]


def smallest(red, ranks):
    """Rows, chosen greedily by new faults for each rank, that have every fault red TWICE if they
    can; `red` has the faults of each row."""
    needed = {what: TWICE for faults in red.values() for what in faults}
    chosen = []

    def gain(number):
        new = sum(needed[what] > 0 for what in red[number] if number not in chosen)
        return new / (2 + ranks[number])

    while gain(best := max(red, key=gain)):
        chosen.append(best)
        for what in red[best]:
            needed[what] -= 1
    return sorted(chosen)


def try_rows(fault, numbers, table):
    """Prints what a fault does to some rows, by their numbers; returns those that are red."""
    found = damage(fault, numbers)
    red = [n for n in numbers if not found[n] or not all(value < EXACT for value in found[n])]
    sizes = [found[n] for n in red if found[n]]
    columns = zip(*sizes, strict=True) if sizes else ()
    worst = [f"{max(column):.1g}" for column in columns] or ["fails"] * 3
    names = "; ".join(str(table[n]) for n in red)
    print("| " + " | ".join([fault.what, f"{len(red)} of {len(numbers)}", *worst, names]) + " |")
    sys.stdout.flush()
    return red


def damage(fault, numbers):
    """{row number: its Differences, or None where it fails} with a fault planted."""
    with copied("mtcli/core/" + fault.file, fault) as folder:
        command = [sys.executable, __file__, "--on", folder, *map(str, numbers)]
        environ = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, check=True)
    return {int(n): found for n, found in json.loads(done.stdout).items()}


def differences(folder, numbers):
    """What `damage` reads: the rows' Differences in the copy that is imported."""
    from parity_runs import compare
    from test_parity import TABLE

    import mtcli

    assert Path(mtcli.__file__).is_relative_to(folder), mtcli.__file__
    found = {}
    for number in numbers:
        row = TABLE[number]
        try:
            found[number] = compare(row, row.then(TABLE))
        except AssertionError as error:  # a rank that raised or hung, or other initial weights
            print(f"{row}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
            found[number] = None
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on"]:
        print(json.dumps(differences(sys.argv[2], [int(n) for n in sys.argv[3:]])))
    else:
        sys.exit(main())
