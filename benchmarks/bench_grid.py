"""Two-dimensional tensor parallelism beside one-dimensional on the same CPU ranks: time and memory.

Every layout trains the same steps. Ranks measure their state, and what a step adds at its peak;
then four ranks are timed on 1 x 4 (Megatron-LM's layout), 2 x 2 and 4 x 1, in turns. Losses are
compared first. The best step counts, as other work on the machine only ever adds time.

    python benchmarks/bench_grid.py --repeats 3
"""

import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter

from arguments import Arguments, write_rows
from progress import say

from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from ranks import run_ranks
from tiny import Samples, run_config

STEPS = 4
MODEL = {"num_layers": 4, "hidden_size": 192, "num_heads": 12, "max_seq_len": 128}
MODEL |= {"architecture": "gpt", "vocab_size": 1100, "position": "rope"}
BATCH = {"seq_len": 128, "micro_batch_size": 12, "global_batch_size": 12}
GRIDS = [(1, 1), (2, 2), (3, 3)]  # whose memory is measured
FOUR = [(1, 4), (2, 2), (4, 1)]  # whose time is


def main() -> None:
    parser = Arguments(__doc__, repeats=0)
    parser.add_argument("--repeats", type=int, default=3, help="of the timing; 0 leaves it out")
    args = parser.parse_args()
    print(f"{'grid':8}{'state MiB':>11}{'of one rank':>13}{'step MiB':>13}{'of one rank':>13}")
    whole, found = None, {"memory": [], "seconds": []}
    for rows, columns in GRIDS[: 1 if args.tiny else None]:
        state, peak, _, _ = trained(rows, columns)
        whole = whole or (state, peak)
        shares = state / whole[0], peak / whole[1]
        sizes = f"{state / 2**20:11.2f}{shares[0]:13.3f}{peak / 2**20:13.2f}{shares[1]:13.3f}"
        say(f"{rows} x {columns}   {sizes}")
        found["memory"].append({"grid": [rows, columns], "state_bytes": state, "peak_bytes": peak})
    best: dict[tuple[int, int], float] = {}
    losses = {}
    for _ in range(args.repeats):
        for grid in FOUR:
            _, _, seconds, losses[grid] = trained(*grid)
            best[grid] = min(seconds, best.get(grid, seconds))
    found["seconds"] = [{"grid": grid, "seconds": seconds} for grid, seconds in best.items()]
    write_rows(args.json, found)
    if not args.repeats:
        return
    first = losses[FOUR[0]]
    assert all(abs(loss / first - 1) < 1e-5 for loss in losses.values()), losses
    print(f"{'4 ranks':8}{'ms a step':>11}{'of 1 x 4':>13}")
    for grid, seconds in best.items():
        say(f"{grid[0]} x {grid[1]}   {seconds * 1e3:11.1f}{seconds / best[FOUR[0]]:13.2f}")


def trained(rows: int, columns: int) -> tuple[float, float, float, float]:
    """(bytes of state, peak besides, seconds of the best step, last loss), the most of any rank."""
    ranks = run_ranks(rows * columns, _train, rows, deadline=600)
    return tuple(max(values) for values in zip(*ranks, strict=True))


def _train(runtime, rows):
    grid = {"tp": runtime.world, "tp_mode": "2d", "tp_rows": rows}
    config = run_config(MODEL, parallel=grid, batch=BATCH, train={"steps": STEPS})
    with LiveMemory() as live:
        trainer = Trainer(config, runtime)
        initialise(trainer)
        state = trainer.state_bytes()
        live.begin()
        before = live.bytes  # state, and what the ranks of this machine share to exchange by
        with closing(MicroBatchLoader(Samples(config), config, trainer.groups)) as loader:
            trainer.train_step(loader)
    with closing(MicroBatchLoader(Samples(config), config, trainer.groups)) as loader:
        took = []
        for _ in range(STEPS - 1):
            start = perf_counter()
            loss = trainer.train_step(loader).loss
            took.append(perf_counter() - start)
    return state, live.peak - before, min(took), loss


if __name__ == "__main__":
    main()
