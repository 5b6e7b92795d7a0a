"""Seconds in which Muon's matrices are gathered, orthogonalised and sent back."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.matrices import matrix_stacks
from mtcli.core.mesh.sharding import Box
from mtcli.core.mesh.update_rules import update_of
from mtcli.core.plan.communication import collective_seconds
from mtcli.core.plan.elements import Run, parameter_copies
from mtcli.core.plan.gpu_time import gemm_seconds
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.traffic import Transfer
from mtcli.core.plan.workload import BlockCounts, Workload


class Matrices(NamedTuple):
    """Matrices [rows, columns] of the blocks of a stage."""

    rows: int
    columns: int
    number: int
    of_experts: bool


def muon_seconds(work: Workload, pp_rank: int, device: Device) -> float:
    """Seconds of a rank of a pipeline rank; 0 for other optimizers.

    The ranks that share matrices divide them evenly, and exchange them while they work on others.
    """
    blocks = work.block_counts(work.layout.stages(pp_rank))
    layout, total = work.layout, 0.0
    shared, run = layout.tp * layout.cp * layout.dp, work.run
    wide = "fp64" if work.precision == "fp64" else "fp32"
    work = replace(work, precision=wide if device.name == "cpu" or wide == "fp64" else "bf16")
    for of_experts, size in ((False, shared), (True, layout.etp * layout.edp)):
        busy = elements = 0.0
        for rows, columns, number, expert in _matrices(run, work.optimizer, blocks):
            if expert == of_experts:
                local = number / layout.ep if expert else number
                busy += local * _seconds(rows, columns, work, device)
                elements += local * rows * columns
        if not elements:
            continue
        ways = 2 if work.zero or layout.tp > 1 else 1  # else each rank has the momenta whole
        rank_bytes = elements * work.sizes.weight / (size if work.zero else layout.tp)
        sent = Transfer("all_to_all", rank_bytes, size, times=ways)
        total += max(busy / size, collective_seconds(sent, device))
    return total


def _seconds(rows: int, columns: int, work: Workload, device: Device) -> float:
    """Seconds of the iterations of one matrix. A GPU computes half of a symmetric GEMM."""
    short, long = sorted((rows, columns))
    part = 1.0 if device.name == "cpu" else 0.5
    symmetric = ((short, short, long), (short, short, short))
    one = part * sum(gemm_seconds(gemm, work, device) for gemm in symmetric)
    one += gemm_seconds((short, long, short), work, device)
    return work.optimizer.ns_steps * one


@cache
def _matrices(run: Run, optimizer: OptimizerConfig, blocks: BlockCounts) -> list[Matrices]:
    counts: dict[tuple[int, int, bool], int] = {}
    for parameter, times in parameter_copies(run, blocks, (False, False)):
        if not (parameter.trained and update_of(parameter, optimizer).rule.of_matrices):
            continue
        shape = Box.of(parameter.shape)
        for stack in matrix_stacks(parameter, shape, optimizer.muon_split_heads):
            key = stack.rows, stack.columns, parameter.is_expert
            counts[key] = counts.get(key, 0) + times * stack.num_matrices
    return [Matrices(rows, columns, n, expert) for (rows, columns, expert), n in counts.items()]
