"""Times the index of a blend: picks per second of processor time, of the compiled loop and of
that in Python before it, on the same random weights. The time of compiling is printed by itself.

    python benchmarks/bench_blend.py --sets 2 32 200
"""

from time import process_time

import numpy as np
from arguments import Arguments, write_rows

from mtcli.core.data.blend import normalised
from mtcli.core.data.blend_order import blend_indices

COMPILED, PYTHON, REPEATS = 4_000_000, 100_000, 3


def main() -> None:
    parser = Arguments(__doc__, sets=[2])
    parser.add_argument("--sets", type=int, nargs="+", default=[2, 32, 200])
    args = parser.parse_args()
    begin = process_time()
    blend_indices([1.0], 1)
    print(f"loaded or compiled in {process_time() - begin:.2f} s")
    print(
        "| data sets | compiled, picks/s | Python, picks/s | of 1.8 G samples |\n|---|---|---|---|"
    )
    rows = []
    for sets in args.sets:
        weights = np.random.default_rng(0).random(sets).tolist()
        times = [[], []]
        for _ in range(REPEATS):  # alternated, so that a busy machine slows both
            begin = process_time()
            order = blend_indices(weights, COMPILED)
            middle = process_time()
            assert in_python(weights, PYTHON) == order.owner[:PYTHON].tolist()
            times[0].append(middle - begin)
            times[1].append(process_time() - middle)
        rates = COMPILED / min(times[0]), PYTHON / min(times[1])
        told = " and ".join(f"{1.8e9 / rate / 60:.1f}" for rate in rates)
        print(f"| {sets} | {rates[0]:,.0f} | {rates[1]:,.0f} | {told} min |")
        rows.append({"sets": sets, "compiled_per_s": rates[0], "python_per_s": rates[1]})
    write_rows(args.json, rows)


def in_python(weights: list[float], size: int) -> list[int]:
    """The dataset of each sample by the loop that the compiled one replaced."""
    shares, owners = normalised(weights), []
    drawn = [0] * len(shares)
    for step in range(size):
        step = step or 1
        behind = [weight * step - count for weight, count in zip(shares, drawn, strict=True)]
        owners.append(behind.index(max(behind)))
        drawn[owners[-1]] += 1
    return owners


if __name__ == "__main__":
    main()
