"""A step by `mtcli plan --device cpu` over one of the real trainer, by processor time.

Other programs that use the machine make a step longer, and leave the processor time of its main
thread as it is. So this holds the plan to real steps on a busy machine too; bench_plan.py compares
seconds by the clock, on an idle one. Waits for another rank are not counted.

    python benchmarks/bench_cpu_rates.py [--steps 4] [--only 124m] [--tries 2]
"""

import multiprocessing
import os
import tempfile
from statistics import median
from time import thread_time

from arguments import Arguments, write_rows
from progress import each, say
from runs import SMALL

SHORT = ("batch.seq_len=128", "batch.micro_batch_size=2", "batch.global_batch_size=4")
# name: (preset, ranks, settings)
CASES = {
    "tiny, 1 rank": ("tiny", 1, ()),
    "tiny, dp=2": ("tiny", 2, ()),
    "tiny, tp=2": ("tiny", 2, ("parallel.tp=2",)),
    "124m, 1 rank": ("gpt2-124m", 1, SHORT),
    "124m, 1 rank, fp32": ("gpt2-124m", 1, (*SHORT, "train.precision=fp32")),
    "124m, dp=2, fp32": ("gpt2-124m", 2, (*SHORT, "train.precision=fp32")),
    "124m, tp=2, fp32": ("gpt2-124m", 2, (*SHORT, "train.precision=fp32", "parallel.tp=2")),
}
GOAL = 0.25


def main() -> None:
    parser = Arguments(__doc__, steps=1, only="tiny, 1 rank")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--only", default="", help="cases that hold this word")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # a thread that waits takes no processor time
    chosen = [name for name in CASES if args.only in name] * args.tries
    rows = []
    for name in each(chosen):
        preset, ranks, settings = CASES[name]
        settings = (*settings, *(SMALL if args.tiny else ()))
        with tempfile.TemporaryDirectory() as folder:
            spawn = multiprocessing.get_context("spawn")
            answers = spawn.Queue()
            given = (preset, settings, ranks, args.steps, folder)
            workers = [
                spawn.Process(target=_rank, args=(rank, *given, answers)) for rank in range(ranks)
            ]
            for worker in workers:
                worker.start()
            measured = max(answers.get()["seconds"] for _ in workers)
            for worker in workers:
                worker.join()
        planned = _planned(preset, settings, ranks)
        load = os.getloadavg()[0]
        ratio = planned / measured
        rows.append({"case": name, "planned_s": planned, "measured_s": measured, "load": load})
        verdict = "" if abs(ratio - 1) <= GOAL else f"  off by more than {GOAL:.0%}"
        say(f"{name:20} {planned:8.3f} s{measured:8.3f} s{ratio:7.2f}  load {load:4.1f}{verdict}")
    write_rows(args.json, rows)


def _planned(preset: str, settings: tuple[str, ...], ranks: int) -> float:
    from mtcli.core.config.loading import load_config
    from mtcli.core.plan.predict import predict

    return predict(load_config(preset, list(settings)), ranks, "cpu").step_seconds


def _rank(rank, preset, settings, ranks, steps, folder, answers) -> None:
    """Takes steps on one rank, with its share of the cores."""
    import torch
    import torch.distributed as dist

    from mtcli.core.config.loading import load_config
    from mtcli.core.runtime.launch import Runtime, cores, set_matmul
    from mtcli.core.training.loader import synthetic_loader
    from mtcli.core.training.state import initialise
    from mtcli.core.training.step import Trainer

    config = load_config(preset, list(settings))
    torch.set_num_threads(max(1, cores() // ranks))
    set_matmul(config.train.matmul)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    trainer = Trainer(config, Runtime(rank, ranks, rank, ranks, torch.device("cpu")))
    initialise(trainer)
    loader, seconds = synthetic_loader(config, trainer.groups), []
    for _ in range(1 + steps):
        begin = thread_time()
        trainer.train_step(loader)
        seconds.append(thread_time() - begin)
    answers.put({"seconds": median(seconds[1:])})
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
