"""`make bench-gpu`: every measurement that needs a GPU, into benchmarks/results.

    python benchmarks/gpu/run.py                       # all of it
    python benchmarks/gpu/run.py --budget 540          # what fits; the next run goes on
    python benchmarks/gpu/run.py --only step           # `gpt2`, `kernels` or `step` alone
    python benchmarks/gpu/run.py --ship                # on any machine: choices.json from the files

What matters most comes first: the step of the two small GPT-2 beside transformers, then attention,
experts, optimizers and the other kernels, each at its best configuration, then every other step.
`--ship` has everybody's kernels take those configurations. Needs no make and no environment of its
own: any Python with torch, triton and mtcli's dependencies will do. What else is missing is left
out with a line that says so.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

from record import RESULTS, ROOT

HERE = Path(__file__).parent
GRACE = 20.0  # seconds that a script may take longer than it was given
PARTS = {
    "gpt2": ["bench_step.py", "--only", "gpt2-124m", "gpt2-355m", "--contenders", "hf"],
    "kernels": ["bench_kernels.py", "--tune"],
    "step": ["bench_step.py"],
}
SHARES = {"gpt2": 1 / 3, "kernels": 1 / 2}  # of the time that is left; the last part has all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--ship", action="store_true", help="write choices.json; measure nothing")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of --ship's files"
    )
    args = parser.parse_args()
    if args.ship:
        return ship(args.results)
    import torch

    if not torch.cuda.is_available():
        print("error: torch sees no GPU here: nothing is measured without one", file=sys.stderr)
        sys.exit(2)
    end, failed = monotonic() + args.budget, []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        share = 1.0 if name == args.only[-1] else SHARES[name]
        if run(PARTS[name], (end - monotonic()) * share):
            failed.append(name)
    if failed:
        sys.exit(f"error: not all was measured: {', '.join(failed)}")


def ship(results: Path) -> None:
    """Puts the configs that were chosen into the table that comes with the kernels."""
    sys.path.insert(0, str(ROOT))
    from choosing import chosen

    from mtcli.kernels.autotune import SHIPPED, write_table

    for path in sorted(results.glob("kernels-*.json")):
        record = json.loads(path.read_text())
        write_table(chosen(record["rows"]), record["device"], SHIPPED)
        print(f"{path.name}: {record['device']}")
    print(f"wrote {SHIPPED}")


def run(command: list[str], budget: float) -> int:
    """The exit code of a script, which finds mtcli beside it even where it is not installed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
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
