"""States which rule updates each parameter, with which state, and whether it decays.

The rules are files of `core/optim`. The optimizer, arrays of models and the plan read here the
state that a rule has and the norms it needs. All state is as wide as master weights: float32, or
float64 for float64 weights; moments in bfloat16 where `train.moments` says so.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mtcli.core.config.schema import OptimizerConfig, OptimizerName
from mtcli.core.mesh.name_patterns import matched
from mtcli.core.mesh.sharding import Parameter


class RuleFacts(NamedTuple):
    """The state of an update rule besides master weights, and whether it needs norms."""

    name: OptimizerName
    moments: tuple[str, ...]  # kinds of state as checkpoints name them, at most two
    norms: bool = False  # the step is scaled by norms of whole parameters, so state is read twice
    of_matrices: bool = False  # the step is one of whole matrices, which ranks gather


ADAM = ("exp_avg", "exp_avg_sq")
# The rules of whole matrices, beside AdamW of the other parameters. Their momentum is the mean of
# gradients that AdamW has too, and so has AdamW's name.
OF_MATRICES: tuple[OptimizerName, ...] = ("muon",)


class ParameterUpdate(NamedTuple):
    """The rule that updates a parameter, whether weight decay applies, and the number of its
    group of the config; None is none."""

    rule: RuleFacts
    decays: bool
    group: int | None = None

    @property
    def together(self) -> tuple[RuleFacts, int | None]:
        """The settings that parameters share where one call updates them."""
        return self.rule, self.group

    def settings(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """The settings by which the rule updates: AdamW's beside Muon are `optimizer.other`, and a
        group has a learning rate and weight decay of its own."""
        settings = optimizer.of_others if self.rule.name != optimizer.name else optimizer
        if self.group is None:
            return settings
        group = optimizer.group[self.group]
        decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        changes = {"lr": settings.lr * group.lr_scale, "weight_decay": decay}
        return settings.model_copy(update=changes)


def update_of(parameter: Parameter, optimizer: OptimizerConfig) -> ParameterUpdate:
    """The update of a parameter; of one that is no matrix, AdamW's beside a rule of matrices.

    Weight decay applies to matrices and tables, not to biases and norms.
    """
    decays = parameter.of_adapter or parameter.init in ("normal", "residual")
    if optimizer.name == "sgd":
        rule = RuleFacts("sgd", ("momentum",) if optimizer.momentum else ())
    elif optimizer.name in OF_MATRICES:
        is_matrix = bool(parameter.matrices or parameter.of_adapter)
        of_matrices = RuleFacts(optimizer.name, ADAM[:1], of_matrices=True)
        rule = of_matrices if is_matrix else RuleFacts("adamw", ADAM)
    else:
        rule = RuleFacts(optimizer.name, ADAM, norms=optimizer.name == "lamb")
    groups = enumerate(optimizer.group)
    numbers = (number for number, group in groups if matched([parameter.name], group.match))
    return ParameterUpdate(rule, decays, next(numbers, None))


def moments_of(table: Mapping[str, Parameter], optimizer: OptimizerConfig) -> dict[str, set[str]]:
    """The names of the parameters that have each kind of moment, by kind."""
    names: dict[str, set[str]] = {}
    for name, parameter in table.items():
        for kind in update_of(parameter, optimizer).rule.moments if parameter.trained else ():
            names.setdefault(kind, set()).add(name)
    return names
