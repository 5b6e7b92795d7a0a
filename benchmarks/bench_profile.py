"""C13: what the timers of `mtcli profile` cost a step, and how much of a step they account for.

One trainer on one rank; steps alternate between timed ones, as profile runs them, and bare ones
whose clock reads nothing, so both meet the same machine. The cost is the median of the differences
of neighbours over the median bare step.

    python benchmarks/bench_profile.py [--pairs 30] [--json FILE]
"""

import os
import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from arguments import Arguments, write_rows
from progress import each
from runs import SMALL

os.environ.setdefault("OMP_NUM_THREADS", "1")

GOAL_COST, GOAL_NAMED = 0.02, 0.95
WARMUP = 2


def main() -> None:
    parser = Arguments(__doc__, pairs=2)
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    rows = measure(args.pairs, SMALL if args.tiny else ())
    cost, named = rows["cost"], rows["accounted_for"]
    print(f"bare step        {1e3 * rows['bare_seconds']:9.2f} ms (median of {args.pairs})")
    print(f"timed step       {1e3 * rows['timed_seconds']:9.2f} ms")
    print(f"cost of timers   {cost:9.2%}    goal at most {GOAL_COST:.0%}: {met(cost <= GOAL_COST)}")
    print(f"of a step named  {named:9.2%}    goal {GOAL_NAMED:.0%}: {met(named >= GOAL_NAMED)}")
    write_rows(args.json, rows)


def met(held: bool) -> str:
    return "met" if held else "MISSED"


def measure(pairs: int, settings: Sequence[str]) -> dict[str, float]:
    from mtcli.core.config.loading import load_config
    from mtcli.core.profile.breakdown import attribute
    from mtcli.core.profile.clock import HostClock
    from mtcli.core.profile.measure import timed_step
    from mtcli.core.profile.records import Profiled, RankRecord
    from mtcli.core.runtime.launch import bring_up
    from mtcli.core.training.loader import synthetic_loader
    from mtcli.core.training.state import initialise
    from mtcli.core.training.step import Trainer

    batch = ["batch.global_batch_size=4", "batch.micro_batch_size=1"]
    config = load_config("tiny", [*batch, *settings])
    with bring_up("cpu", 60.0) as runtime:
        trainer = Trainer(config, runtime)
        initialise(trainer)
        loader, clock = synthetic_loader(config, trainer.groups), HostClock()
        bare, timed, records = [], [], []

        def run(with_timers: bool) -> None:
            trainer.pipeline.clock = clock if with_timers else (lambda: 0.0)
            start = perf_counter()
            if with_timers:
                records.append(timed_step(trainer, loader, clock, 0.0))
            else:
                trainer.train_step(loader)
            (timed if with_timers else bare).append(perf_counter() - start)

        orders = random.Random(7)
        for _ in each(range(WARMUP + pairs)):
            for with_timers in orders.sample((True, False), 2):
                run(with_timers)
        loader.close()
        bare, timed, records = bare[WARMUP:], timed[WARMUP:], records[WARMUP:]
        step = records[0]
        record = RankRecord(
            rank=0,
            pp_rank=0,
            speaks=True,
            steps=records,
            profiled=Profiled(step, {}, {}, 0.0, [], [], {}, []),
            state_bytes={},
            allocated_bytes=None,
            process_bytes=0,
            peak_flops=1.0,
        )
        spent = [
            attribute(record, [records[i]], i, trainer.pipeline.schedule) for i in range(pairs)
        ]
        others = [one["other"] / sum(one.values()) for one in spent]
    differences = [b - a for a, b in zip(bare, timed, strict=True)]
    return {
        "bare_seconds": median(bare),
        "timed_seconds": median(timed),
        "cost": median(differences) / median(bare),
        "accounted_for": 1.0 - median(others),
    }


if __name__ == "__main__":
    main()
