"""Facility location: speed beside apricot and submodlib, and the memory and time of large sets.

    python benchmarks/bench_select.py peers      # n = 8,000, k = 800, on the same similarities
    python benchmarks/bench_select.py memory     # n = 50,000, d = 64, k = 5,000: the peak
    python benchmarks/bench_select.py million    # n = 1,000,000, d = 64, k = 10,000

`peers` counts processor seconds, all contenders in turn in one process, the least of the repeats:
each is given the n x n similarities in memory, in the dtype it keeps them in (apricot float64, ours
and submodlib float32). Objectives are of float64. `million` also chooses 1 % of a sub-sample in
parts, and at once by lazy greedy, and compares their objectives. Peers are those of the test extra.
"""

import resource
import time
from collections.abc import Callable

import numpy as np
import torch
from arguments import Arguments, lacking, write_rows
from progress import in_turn, say
from tqdm import tqdm

from mtcli.core.parallel.groups import world_axis
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.select import coreset
from mtcli.core.select.coreset import Quota, Work, choose
from mtcli.core.select.facility_location import Goal, MatrixSimilarities, lazy_greedy

WIDTH, CENTRES = 64, 500


def main() -> None:
    parser = Arguments(__doc__, n=200, repeats=1, threads=1)
    parser.add_argument("what", choices=("peers", "memory", "million"), nargs="?", default="peers")
    parser.add_argument("--n", type=int, help="points [8000, 50000 or 1000000]")
    parser.add_argument("--k", type=int, help="picks [a tenth of them; of a million a hundredth]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n = args.n or {"peers": 8000, "memory": 50_000, "million": 1_000_000}[args.what]
    k = args.k or n // (100 if args.what == "million" else 10)
    rows = peers(n, k, args.repeats, args.threads) if args.what == "peers" else [large(n, k)]
    if args.what == "million":
        rows += parts_beside_all(min(n, 131_072))
    write_rows(args.json, rows)


def clusters(n: int, seed: int = 0) -> torch.Tensor:
    """Points [n, 64] around 500 centres, float32, as proxies of sequences lie."""
    random = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(CENTRES, WIDTH, generator=random)
    of = torch.randint(CENTRES, (n,), generator=random)
    return centres[of] + torch.randn(n, WIDTH, generator=random)


def peers(n: int, k: int, repeats: int, threads: int) -> list[dict]:
    """Prints and returns processor seconds and objectives of lazy greedy: ours, apricot's and
    submodlib's."""
    points = clusters(n).double()
    distances = torch.cdist(points, points)
    matrix = (distances.max() - distances).numpy()
    single = matrix.astype(np.float32)
    contenders = {"mtcli": _ours, "apricot": _apricot, "submodlib": _submodlib}
    missing = lacking({name: name for name in ("apricot", "submodlib")})
    contenders = {name: work for name, work in contenders.items() if name not in missing}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    values = {}
    for name in in_turn(contenders, repeats):
        torch.set_num_threads(threads)  # apricot's numba sets torch's OpenMP threads too
        begin = time.process_time(), time.perf_counter()
        chosen = contenders[name](matrix if name == "apricot" else single, k)
        times[name].append(time.process_time() - begin[0])
        values[name] = float(matrix[chosen].max(0).sum())
        wall = time.perf_counter() - begin[1]
        say(f"{name:12}{times[name][-1]:>9.2f} s of processor, {wall:.2f} s")
    rows: list[dict] = [{"contender": name, "skipped": why} for name, why in missing.items()]
    for name, seconds in times.items():
        ratio = min(seconds) / min(times["mtcli"])
        say(f"{name:12}{min(seconds):>9.2f} s{ratio:>8.1f} x   objective {values[name]:,.6f}")
        rows.append({"contender": name, "n": n, "k": k, "processor_s": seconds})
        rows[-1] |= {"ratio": ratio, "objective": values[name]}
    return rows


def _ours(matrix: np.ndarray, k: int) -> list[int]:
    similar = MatrixSimilarities(torch.from_numpy(matrix))
    return lazy_greedy(similar, torch.ones(len(matrix), dtype=torch.float64), Goal(k)).order


def _apricot(matrix: np.ndarray, k: int) -> list[int]:
    from apricot import FacilityLocationSelection

    made = FacilityLocationSelection(k, metric="precomputed", optimizer="lazy")
    return made.fit(matrix).ranking.tolist()


def _submodlib(matrix: np.ndarray, k: int) -> list[int]:
    from submodlib import FacilityLocationFunction

    made = FacilityLocationFunction(n=len(matrix), mode="dense", sijs=matrix, separate_rep=False)
    picks = made.maximize(budget=k, optimizer="LazyGreedy", show_progress=False)
    return [index for index, _ in picks]


def large(n: int, k: int) -> dict:
    """Chooses k of n points; prints and returns the time, and the peak of the process's memory."""
    points = clusters(n)
    say(f"{n:,} points, {k:,} picks: {coreset.planned_bytes([n], WIDTH) / 2**30:.2f} GiB planned")
    begin, spent = time.perf_counter(), time.process_time()
    chosen = _chosen(points, k)
    seconds, spent = time.perf_counter() - begin, time.process_time() - spent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"{seconds:.1f} s, {spent:.1f} s of processor, {peak:.2f} GiB at the peak of the process")
    say(f"objective {chosen.objective:,.1f}, L(S) {chosen.bound:,.1f}")
    row = {"n": n, "k": k, "seconds": seconds, "processor_s": spent, "peak_gib": peak}
    return row | {"objective": chosen.objective, "bound": chosen.bound}


def parts_beside_all(n: int) -> list[dict]:
    """Prints and returns the objective of 1 % of n points, chosen in parts, as a share of that
    of all."""
    points, k, most = clusters(n, seed=1), n // 100, coreset.MOST
    in_parts = _chosen(points, k)
    coreset.MOST = n
    at_once = _chosen(points, k)
    coreset.MOST = most
    drawn = coreset.random_orders([np.arange(n)], [k], seed=0)
    random = coreset.judge(points, [np.arange(n)], drawn, _work())
    rows = []
    for name, one in {"in parts": in_parts, "at random": random}.items():
        share = one.objective / at_once.objective
        say(f"{n:,} points, 1 % {name}: {share:.4f} of lazy greedy's objective over all of them")
        rows.append({"n": n, "k": k, "chosen": name, "of_lazy_greedy": share})
    say(f"L(S) {in_parts.bound:,.1f} in parts, {at_once.bound:,.1f} over all")
    return rows


def _work(advance: Callable[[int], object] = lambda done: None) -> Work:
    return Work(world_axis(0, 1, FlightRecorder()), torch.device("cpu"), 0, advance=advance)


def _chosen(points: torch.Tensor, k: int) -> coreset.Chosen:
    with tqdm(total=None, unit="step", leave=False) as bar:
        return choose(points, [np.arange(len(points))], Quota([k]), _work(bar.update))


if __name__ == "__main__":
    main()
