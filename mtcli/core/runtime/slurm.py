"""Reads this process's task in a Slurm step, from the variables that srun sets.

A batch script has its job's variables without a step's, and SLURM_PROCID 0: no ranks were started
there, and `--nproc` starts them. So only a step's variables count.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from mtcli.core.config.errors import wrong


class SlurmTask(NamedTuple):
    """A task of a step that srun has started."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # tasks of its node
    first_host: str  # of the step's nodes, where its task 0 is; empty where nothing says
    nodes: int


def whole(name: str, value: str) -> int:
    """A launcher's variable as an integer. Raises MtcliError where it is not one."""
    if not value.isdecimal():
        raise wrong(f"{name}={value} is no number", "a launcher sets it; unset it otherwise")
    return int(value)


def slurm_task(environ: Mapping[str, str]) -> SlurmTask | None:
    """This process's task; None outside of steps of several tasks."""

    def number(name: str, default: str = "") -> int:
        return whole(name, environ.get(name, default))

    world = number("SLURM_STEP_NUM_TASKS", "1")
    if world == 1 or "SLURM_PROCID" not in environ:
        return None
    node = number("SLURM_NODEID", "0")
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
    return SlurmTask(
        rank=number("SLURM_PROCID"),
        world=world,
        local_rank=number("SLURM_LOCALID", "0"),
        local_world=per_node[min(node, len(per_node) - 1)],
        first_host=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        nodes=number("SLURM_STEP_NUM_NODES", "1"),
    )


def require_srun(nproc: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raises MtcliError in a batch script of several tasks where neither srun nor another launcher
    started ranks, unless `nproc` asks for ranks of this node."""
    job = environ.get("SLURM_NTASKS") or environ.get("SLURM_NPROCS") or "1"
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    started = "RANK" in environ or "SLURM_STEP_NUM_TASKS" in environ
    if "SLURM_JOB_ID" not in environ or started or nproc > 1:
        return
    if max(whole("SLURM_NTASKS", job), whole("SLURM_JOB_NUM_NODES", nodes)) == 1:
        return
    tasks = f"{job} tasks on {nodes} node{'s' if nodes != '1' else ''}"
    message = f"this Slurm job has {tasks}, and srun has started none: one process would train"
    raise wrong(message, "srun mtcli train ...; or --nproc N for N ranks of this node alone")


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node, parsed from a list like 4(x2),3: 4, 4 and 3."""
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in matches for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """The first host of a list like rack[1-2]n[07,09-11],gpu5: rack1n07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first, nodes  # it matches nothing too
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
