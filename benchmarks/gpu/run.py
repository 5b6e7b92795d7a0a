"""`make bench-gpu`: every measurement that needs a GPU, into benchmarks/results.

    python benchmarks/gpu/run.py                       # all of it
    python benchmarks/gpu/run.py --budget 540          # what fits; the next run goes on
    python benchmarks/gpu/run.py --only step           # one part alone; PARTS has them
    python benchmarks/gpu/run.py --ship                # on any machine: choices.json from the files
    python benchmarks/gpu/run.py --device cpu --tiny --output FOLDER   # all of it, rehearsed

What matters most comes first: what the device and its libraries do, where the time of our step
goes, and a GPT-2 step beside transformers; then attention, experts, optimizers and the other
kernels, each at its best configuration, then every other step, and last arrays of fused models.
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

from record import ONLY_REHEARSED, RESULTS, ROOT

HERE = Path(__file__).parent
SHIPPED = ROOT / "mtcli" / "kernels" / "choices.json"
GRACE = 20.0  # seconds that a script may take longer than it was given
PARTS = {
    "first": ["first.py"],
    "profile": ["profile_step.py"],
    "gpt2": ["bench_step.py", "--only", "gpt2-124m", "--contenders", "mtcli-compile", "hf"],
    "kernels": ["bench_kernels.py", "--tune"],
    "step": ["bench_step.py"],
    "fused": ["../../fused/benchmarks/bench_fused_models.py"],
}
SHARES = {
    "first": 1 / 4,
    "profile": 1 / 4,
    "gpt2": 1 / 3,
    "kernels": 1 / 2,
    "step": 2 / 3,
}  # of the time that is left; the last part has all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1e9, help="seconds for everything")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--ship", type=Path, nargs="?", const=SHIPPED, metavar="FILE",
                        help="write choices.json, or a file like it; measure nothing")  # fmt: skip
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder of result files")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and inputs: a rehearsal")
    args = parser.parse_args()
    if args.ship:
        return ship(args.output, args.ship)
    if args.device == "cpu" and not args.tiny:
        print(f"error: {ONLY_REHEARSED}", file=sys.stderr)
        sys.exit(2)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU here: nothing is measured without one", file=sys.stderr)
        sys.exit(2)
    flags = ["--device", args.device, "--output", str(args.output), *["--tiny"] * args.tiny]
    if args.tiny:  # whose choices are nobody's
        os.environ["XDG_CACHE_HOME"] = str(args.output / "cache")
    end, failed = monotonic() + args.budget, []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        share = 1.0 if name == args.only[-1] else SHARES[name]
        if run([*PARTS[name], *flags], (end - monotonic()) * share):
            failed.append(name)
    if failed:
        sys.exit(f"error: not all was measured: {', '.join(failed)}")


def ship(results: Path, file: Path) -> None:
    """Puts the configs that were chosen into a table, such as comes with the kernels."""
    sys.path.insert(0, str(ROOT))
    from choosing import chosen

    from mtcli.kernels.autotune import write_table

    for path in sorted(results.glob("kernels-*.json")):
        record = json.loads(path.read_text())
        write_table(chosen(record["rows"]), record["device"], file)
        print(f"{path.name}: {record['device']}")
    print(f"wrote {file}")


def run(command: list[str], budget: float) -> int:
    """The exit code of a script, which finds our packages even where they are not installed."""
    ours = [str(ROOT), str(ROOT / "fused")]
    path = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    script, *flags = command
    words = [sys.executable, str(HERE / script), *flags, "--budget", f"{max(budget, 0.0):.0f}"]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path})
    with suppress(subprocess.TimeoutExpired):
        return process.wait(max(budget, 0.0) + GRACE)
    # Not at once by force: bench_step.py then ends the contenders that it has on the device.
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    process.kill()
    return process.wait()


if __name__ == "__main__":
    main()
