"""Learning-rate schedules as pure functions of the step, so that resuming needs no state."""

import math

from mtcli.core.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 1 .. steps.

    A linear warm-up reaches `lr` at step `warmup_steps`. Then linear and cosine decay to `min_lr`
    over `decay_steps` (0: all remaining steps) and stay there; wsd (arXiv:2404.06395) stays at `lr`
    and decays linearly over its last `decay_steps`. A decay longer than the remaining steps is cut
    off by the end of the run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    start = config.warmup_steps
    decay = config.steps_of_decay(steps)
    if config.schedule == "wsd":
        start = max(start, steps - decay)
    done = min(max(step - start, 0) / max(decay, 1), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + (config.lr - config.min_lr) * share
