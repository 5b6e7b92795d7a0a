"""States how the optimizer updates each parameter: by which rule, with which state, if it decays.

The rules are files of `core/optim`. The optimizer, arrays of models and the plan read here what a
rule keeps of a parameter, and needs of it. All state is as wide as master weights: float32, or
float64 of float64 weights.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mtcli.core.config.schema import OptimizerConfig, OptimizerName
from mtcli.core.mesh.sharding import Parameter


class RuleFacts(NamedTuple):
    """What an update rule keeps of a parameter beside its master weights, and needs of it."""

    name: OptimizerName
    moments: tuple[str, ...]  # kinds of state as checkpoints name them, at most two
    norms: bool = False  # of whole parameters scale a step, so that state is read twice


class ParameterUpdate(NamedTuple):
    """How one parameter is updated."""

    rule: RuleFacts
    decays: bool


def update_of(parameter: Parameter, optimizer: OptimizerConfig) -> ParameterUpdate:
    """How an optimizer updates a parameter. Today's have one rule for all.

    Weight decay applies to matrices and tables, not to biases and norms.
    """
    decays = parameter.of_adapter or parameter.init in ("normal", "residual")
    if optimizer.name == "sgd":
        rule = RuleFacts("sgd", ("momentum",) if optimizer.momentum else ())
    else:
        norms = optimizer.name == "lamb"
        rule = RuleFacts(optimizer.name, ("exp_avg", "exp_avg_sq"), norms)
    return ParameterUpdate(rule, decays)


def moments_of(table: Mapping[str, Parameter], optimizer: OptimizerConfig) -> dict[str, set[str]]:
    """The kinds of moments of a run, each with the names of the parameters that have one."""
    names: dict[str, set[str]] = {}
    for name, parameter in table.items():
        for kind in update_of(parameter, optimizer).rule.moments if parameter.trained else ():
            names.setdefault(kind, set()).add(name)
    return names
