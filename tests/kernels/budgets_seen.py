"""Whether kernels were compiled as they are, and kept their budgets: `python budgets_seen.py`.

What a kernel compiles to depends on the files and versions of FILES and PACKAGES alone.
budgets_seen.json has their hashes as of the last time that all kernels kept their budgets;
`--compile` (`make budgets`) compiles all of them, and writes it where they do.
"""

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEN = Path(__file__).with_suffix(".json")
LAUNCHED_BY = ("recipes", "harness", "scores", "mixture", "updates", "elementwise")
FILES = (
    "mtcli/kernels/**/*.py",
    "mtcli/kernels/**/*.json",
    "tests/kernels/budgets.py",
    *(f"benchmarks/gpu/{name}.py" for name in ("compile", "machine_code", *LAUNCHED_BY)),
)
PACKAGES = ("triton", "torch")


def hashes():
    """Of each file its hash, of each package its version."""
    paths = sorted(path for pattern in FILES for path in ROOT.glob(pattern))
    found = {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES} | found


def changes():
    """The names of files and packages that are not as they were last seen green."""
    seen, now = json.loads(SEEN.read_text()), hashes()
    return sorted(name for name in seen | now if seen.get(name) != now.get(name))


def line():
    """One line: whether something has changed, and what is compiled."""
    changed = changes()
    if changed:
        names = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
        return f"kernel budgets: changed ({names}): all are compiled until `make budgets` is run"
    total = hashlib.sha256(SEEN.read_bytes()).hexdigest()[:12]
    return f"kernel budgets: unchanged since last seen green (hash {total}), a handful is compiled"


def compile_all():
    """Compiles all kernels, and keeps the hashes of what they were made of. Ends with 1 for any
    that is over its budget."""
    from budgets import ROWS, over_budget

    now = hashes()
    if found := over_budget(ROWS):
        sys.exit("\n".join(["error: kernels are over their budgets", "", *found]))
    SEEN.write_text(json.dumps(now, indent=1) + "\n")
    print(f"{len(ROWS)} kernels keep their budgets; wrote {SEEN.name}, to be committed")


if __name__ == "__main__":
    compile_all() if sys.argv[1:] == ["--compile"] else print(line())
