"""The table of what updates each parameter, which `plan` and `train` show of optimizers with
several rules."""

import re
from collections.abc import Sequence

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, OptimizerConfig
from mtcli.core.mesh.matrices import matrix_stacks
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.sharding import Box, Parameter
from mtcli.core.mesh.update_rules import OF_MATRICES, update_of

TITLE = "What updates each parameter"
COLUMNS = ("update", "lr", "decay", "parameters", "matrices of a layer")


def update_table(
    model: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig
) -> Sequence[Sequence[str]]:
    """The rows of the table, those of matrices first; none where one rule updates all."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, parameter in run_parameters(model, lora).items():
        if not parameter.trained:
            continue
        update = update_of(parameter, optimizer)
        rule, settings = update.rule, update.settings(optimizer)
        decay = f"{settings.weight_decay * update.decays:g}"
        matrices = _matrices(parameter, optimizer.muon_split_heads) if rule.of_matrices else ""
        shared = names.setdefault((rule.name, f"{settings.lr:g}", decay, matrices), [])
        short = re.sub(r"^blocks\.\d+\.", "", name).removesuffix(".weight")
        short = "norms" if "norm" in short else "biases" if short.endswith(".bias") else short
        if short not in shared:
            shared.append(short)
    if len({update for update, *_ in names}) < 2 and not optimizer.group:
        return []
    rows = [[*figures, ", ".join(shared), last] for (*figures, last), shared in names.items()]
    return sorted(rows, key=lambda row: row[0] not in OF_MATRICES)


def _matrices(parameter: Parameter, split_heads: bool) -> str:
    """Words the matrices of a parameter: each one's role, if it has one, size and number."""
    stacks = matrix_stacks(parameter, Box.of(parameter.shape), split_heads)
    roles: list[str] = [matrix.role for matrix in parameter.matrices] or [""]
    parts = []
    for role, stack in zip(roles, stacks, strict=True):
        times = f"{stack.num_matrices} of " if stack.num_matrices > 1 else ""
        parts.append(f"{role} {times}{stack.rows} x {stack.columns}".strip())
    return ", ".join(parts)
