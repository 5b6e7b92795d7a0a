"""A profile made by hand: two pipeline ranks, two micro-batches, every second known."""

from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.profile.records import KernelTime, MemorySample, Profiled, RankRecord, StepRecord
from mtcli.core.runtime.health.traffic import Sent
from mtcli.core.schedule.ops import Op
from mtcli.core.training.step import Phases

# 1F1B with pp = 2 and two micro-batches; F takes 1 s and B takes 2 s; a hop takes 0.25 s.
#   data ends at 0.5; rank 1 gets F0 at 1.75 although it was made at 1.5.
SPANS = {
    0: (("F0.0", 0.5, 1.5), ("F1.0", 1.5, 2.5), ("B0.0", 5.0, 7.0), ("B1.0", 8.0, 10.0)),
    1: (("F0.1", 1.75, 2.75), ("B0.1", 2.75, 4.75), ("F1.1", 4.75, 5.75), ("B1.1", 5.75, 7.75)),
}

ROWS = [  # of a finished run's metrics.jsonl
    {
        "step": step,
        "loss": 5.0 - step,
        "grad_norm": 1.0,
        "step_seconds": 2.0,
        "tokens_per_second": 8.0,
        "mfu": 0.25,
        "valid_loss": 5.5 - step,
    }
    for step in (1, 2, 3)
]


def op(text):
    return Op(text[0], int(text[1]), int(text[3]))


def step_of(rank, scale=1.0, tokens=16.0):
    phases = Phases(
        begin=0.0, data=0.5, pipeline=10.0, reduce=10.5, norm=10.75, agree=11.0, end=12.0
    )
    spans = tuple(OpSpan(op(o), scale * a, scale * b) for o, a, b in SPANS[rank])
    return StepRecord(Phases(*(scale * moment for moment in phases)), spans, tokens)


def record_of(rank, exchanging=None, steps=None):
    profiled = Profiled(
        step=step_of(rank),
        exchanging=exchanging or {"F": 0.0, "B": 0.0},
        communication={"gloo:all_reduce": 0.25},
        overlapped=0.125,
        kernels=[KernelTime("aten::mm", 4, 3.0), KernelTime("aten::add", 8, 1.0)],
        memory=[
            MemorySample(0.0, 0, 0),
            MemorySample(1.0, 2 * 2**20, 2**20),
            MemorySample(2.0, 0, 0),
        ],
        by_axis={},
        sent=[Sent("data", 1 - rank, 4096, 2), Sent("pp_forward", 1 - rank, 512 + rank, 2)],
    )
    return RankRecord(
        rank=rank,
        pp_rank=rank,
        speaks=True,
        steps=steps or [step_of(rank), step_of(rank), step_of(rank)],
        profiled=profiled,
        state_bytes={"weights": 4000, "gradients": 4000, "optimizer": 8000 + rank},
        allocated_bytes=None,
        process_bytes=2**30,
        peak_flops=1e9,
    )


def config_table(**parallel):
    return {
        "model": {
            "num_layers": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "vocab_size": 64,
            "max_seq_len": 8,
        },
        "parallel": {"pp": 2, **parallel},
        "batch": {"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 2},
    }
