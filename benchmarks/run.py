"""Runs every benchmark of this folder in turn, each in a process of its own: `make bench`.

Rows come as they are measured, with a bar on stderr. Goes on past a benchmark that fails, and exits
1 at the end, naming those. Arguments choose some by name:

    python benchmarks/run.py startup eval
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    chosen = sys.argv[1:]
    folder = Path(__file__).parent
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if unknown := [name for name in chosen if name not in scripts]:
        sys.exit(f"error: no benchmark {', '.join(unknown)}\n\nhint: {', '.join(scripts)}")
    failed = []
    names = chosen or list(scripts)
    for number, name in enumerate(names, 1):
        print(f"\n== {name} ({number} of {len(names)})", flush=True)
        # -u: a row is shown when it is measured, in a pipe too
        if subprocess.run([sys.executable, "-u", scripts[name]]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"error: these benchmarks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
