"""Learning rates of B models as functions of the number of steps done: no state to save.

Every argument is one value for all models, or a list of B. `optimizer.lr = schedule(step)` before
each update, with step from 0, is what torch's scheduler of that name does to one model.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli_fused.optimizers import Values, per_model

Schedule = Callable[[int], list[float]]  # steps done -> learning rates [B]


def step_lr(lr: Values, step_size: Values, gamma: Values = 0.1) -> Schedule:
    """lr * gamma^(steps // step_size): torch's StepLR."""
    rows = _rows(lr=lr, step_size=step_size, gamma=gamma)
    return lambda step: [base * factor ** (step // size) for base, size, factor in rows]


def multi_step_lr(
    lr: Values, milestones: tuple[int, ...] | Sequence[tuple[int, ...]], gamma: Values = 0.1
) -> Schedule:
    """lr * gamma^(milestones reached): torch's MultiStepLR. Milestones of one model are a tuple."""
    rows = _rows(lr=lr, milestones=milestones, gamma=gamma)
    return lambda step: [base * f ** sum(step >= at for at in ends) for base, ends, f in rows]


def exponential_lr(lr: Values, gamma: Values) -> Schedule:
    """lr * gamma^steps: torch's ExponentialLR."""
    rows = _rows(lr=lr, gamma=gamma)
    return lambda step: [base * factor**step for base, factor in rows]


def cosine_lr(
    lr: Values, steps: Values, warmup_steps: Values = 0, min_lr: Values = 0.0
) -> Schedule:
    """A linear warm-up and a cosine to `min_lr` at `steps`: the curve of `mtcli train`."""
    rows = [
        (OptimizerConfig(lr=base, warmup_steps=warm, min_lr=least, schedule="cosine"), total)
        for base, total, warm, least in _rows(lr=lr, steps=steps, warmup=warmup_steps, low=min_lr)
    ]
    return lambda step: [learning_rate(config, step + 1, total) for config, total in rows]


def _rows(**values: Any) -> list[tuple[Any, ...]]:
    """The arguments of each model. Raises MtcliError for lists of different lengths."""
    size = max([len(v) for v in values.values() if isinstance(v, list)], default=1)
    return list(zip(*(per_model(v, size, name) for name, v in values.items()), strict=True))
