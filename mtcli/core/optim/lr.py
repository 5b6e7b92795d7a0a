"""Learning-rate curves as pure functions of the step, so that resuming needs no state."""

import math

from mtcli.core.spec.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 1 .. steps.

    A linear warm-up reaches `lr` at step `warmup_steps`. Then linear and cosine fall to `min_lr`
    over `decay_steps` (all that is left where 0) and stay there; wsd (arXiv:2404.06395) stays at
    `lr` and falls linearly over its last `decay_steps`.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    left = steps - config.warmup_steps
    decay = min(config.decay_steps or left, left)
    start = steps - decay if config.schedule == "wsd" else config.warmup_steps
    done = min(max(step - start, 0) / max(decay, 1), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr + (config.lr - config.min_lr) * share
