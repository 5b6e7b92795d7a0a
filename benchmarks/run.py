"""Runs every benchmark of this folder in turn, each in a process of its own: `make bench`.

Goes on past one that fails, and exits 1 at the end, naming those. Arguments choose some by name:

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
    for name in chosen or scripts:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, scripts[name]]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"error: these benchmarks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
