"""`make bench-gpu`: every measurement that needs a GPU, into benchmarks/results.

    python benchmarks/gpu/run.py                       # all of it
    python benchmarks/gpu/run.py --budget 540          # what fits; the next run goes on
    python benchmarks/gpu/run.py --only step           # `kernels` or `step` alone

Kernels' configurations are chosen first, then kernels and the training step are measured. Needs no
make and no environment of its own: any Python with torch, triton and mtcli's dependencies will do.
What else is missing is left out with a line that says so.
"""

import argparse
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

HERE = Path(__file__).parent
KERNELS_SHARE = 0.5  # of the time; the step has all that they leave
GRACE = 20.0  # seconds that a script may take longer than it was given
PARTS = {"kernels": ["bench_kernels.py", "--tune"], "step": ["bench_step.py"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU here: nothing is measured without one", file=sys.stderr)
        sys.exit(2)
    end, failed = monotonic() + args.budget, []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        share = KERNELS_SHARE if (name, len(args.only)) == ("kernels", 2) else 1.0
        if run(PARTS[name], (end - monotonic()) * share):
            failed.append(name)
    if failed:
        sys.exit(f"error: not all was measured: {', '.join(failed)}")


def run(command: list[str], budget: float) -> int:
    """The exit code of a script, which finds mtcli beside it even where it is not installed."""
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    script, *flags = command
    words = [sys.executable, str(HERE / script), *flags, "--budget", f"{max(budget, 0.0):.0f}"]
    with suppress(subprocess.TimeoutExpired):
        longest = max(budget, 0.0) + GRACE
        return subprocess.run(
            words, env=os.environ | {"PYTHONPATH": path}, timeout=longest
        ).returncode
    return 1


if __name__ == "__main__":
    main()
