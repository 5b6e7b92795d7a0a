"""Rehearses predictions: runs their real stages on fake tensors, in processes that import torch, as
this one does not. The user's cache keeps the results.
"""

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from mtcli.core.config.errors import failed
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.memory import each_stage
from mtcli.core.plan.predict import Prediction, predict_workload
from mtcli.core.plan.rank_bytes import RankBytes, StageBytes
from mtcli.core.plan.workload import BlockCounts, Workload
from mtcli.core.runtime.kept_answers import answer_key, keep_answer, kept_answer
from mtcli.core.runtime.launch import cores

Process = subprocess.Popen[str]
SERVE = "from mtcli.core.rehearse.stages import serve; serve()"
# first of its rank, of the model, the last one; its blocks
StageKind = tuple[bool, bool, bool, BlockCounts]


class Rehearsal(NamedTuple):
    """A pipeline rank to rehearse of a config on `world` devices, with a CPU's or GPU's kernels."""

    config: RunConfig
    world: int
    pp_rank: int
    on_cpu: bool
    widens: bool

    @classmethod
    def of(cls, config: RunConfig, world: int, device: Device, pp_rank: int) -> "Rehearsal":
        return cls(config, world, pp_rank, device.name == "cpu", device.widens)

    def as_json(self) -> str:
        """Formats the request to a process: the config and the other fields, as a list."""
        return json.dumps([self.config.model_dump(mode="json"), *self[1:]])

    @property
    def key(self) -> str:
        """A hash of all that the bytes depend on, the code included."""
        c = self.config
        sections = (c.model, c.parallel, c.batch, c.lora, c.sync, c.optimizer)
        facts = [section.model_dump(mode="json") for section in sections]
        train = c.train.model_dump(mode="json", exclude={"output"})
        return answer_key([*facts, train, c.data.document_mask, *self[1:]])


def rehearsed(plans: Sequence[tuple[RunConfig, Prediction]]) -> list[Prediction]:
    """The predictions of configs, with the bytes of their real stages. Without any, starts the
    processes, which import torch meanwhile.

    Raises MtcliError (exit 1) where a stage does not run.
    """
    if not plans:
        _pool(cores())
    ranks = [representatives(p.work) for _, p in plans]
    requests = [
        Rehearsal.of(config, p.work.layout.world, p.device, rank)
        for (config, p), some in zip(plans, ranks, strict=True)
        for rank in dict.fromkeys(some)
    ]
    found = _found(requests)
    predictions = []
    for (config, p), some in zip(plans, ranks, strict=True):
        world = p.work.layout.world
        of_rank = [found[Rehearsal.of(config, world, p.device, rank).key] for rank in some]
        stages = tuple(each_stage(p.work, p.device, of_rank.__getitem__))
        predictions.append(replace(p, stages=stages, is_rehearsed=True))
    return predictions


def planned(config: RunConfig, world: int, device: Device) -> Prediction:
    (prediction,) = rehearsed([(config, predict_workload(Workload.of(config, world), device))])
    return prediction


def representatives(work: Workload) -> list[int]:
    """For each pipeline rank the first one with stages of the same kinds."""
    first: dict[tuple[StageKind, ...], int] = {}
    return [
        first.setdefault(
            tuple(kind_of(work, rank, stage) for stage in work.layout.stages(rank)), rank
        )
        for rank in range(work.layout.pp)
    ]


def kind_of(work: Workload, pp_rank: int, stage: int) -> StageKind:
    """The kind of a stage: under one config, stages of one kind take the same bytes."""
    last = stage == work.layout.num_stages - 1
    return stage == pp_rank, stage == 0, last, work.block_counts([stage])


def _found(requests: Iterable[Rehearsal]) -> dict[str, RankBytes]:
    """The bytes by key, from the cache or else from rehearsals, whose results are cached."""
    by_key = {rehearsal.key: rehearsal for rehearsal in requests}
    found = {key: ranks for key in by_key if (ranks := _cached(key))}
    missing = [key for key in by_key if key not in found]
    for key, answer in zip(missing, _run([by_key[key] for key in missing]), strict=True):
        found[key] = _rank_bytes(answer)
        keep_answer("rehearsals", key, answer)
    return found


def _cached(key: str) -> RankBytes | None:
    with suppress(ValueError, TypeError, KeyError):
        return _rank_bytes(kept_answer("rehearsals", key))
    return None


def _rank_bytes(answer: Mapping[str, Any]) -> RankBytes:
    stages = [StageBytes(*map(float, stage)) for stage in answer["stages"]]
    return RankBytes(stages, float(answer["update"]), float(answer["standing"]))


def _run(rehearsals: Sequence[Rehearsal]) -> list[dict[str, Any]]:
    """Sends rehearsals to the processes in turn, and reads their answers."""
    pool = _pool(min(cores(), len(rehearsals)))
    for number, rehearsal in enumerate(rehearsals):
        process = pool[number % len(pool)]
        assert process.stdin, "a pipe"
        with suppress(BrokenPipeError):
            process.stdin.write(rehearsal.as_json() + "\n")
            process.stdin.flush()
    return [_answer(pool[number % len(pool)]) for number in range(len(rehearsals))]


def _answer(process: Process) -> dict[str, Any]:
    assert process.stdout and process.stderr, "pipes"
    if line := process.stdout.readline():
        answer: dict[str, Any] = json.loads(line)
        return answer
    _process.cache_clear()
    reason = (process.stderr.read().strip().splitlines() or ["it was killed"])[-1]
    message = f"the real stages could not be run on fake tensors: {reason}"
    raise failed(message, "report it, with the config")


def _pool(size: int) -> list[Process]:
    return [_process(number) for number in range(size)]


@cache
def _process(number: int) -> Process:
    """A process that rehearses until this one ends; there is one for each core at most."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVE], env=os.environ | environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(process.kill)
    return process
