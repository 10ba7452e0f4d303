"""The learning rate as a pure function of how many updates came before: nothing to keep, nothing to bring back."""

import math

from pipebench.config import OptimizerConfig


def lr_at(config: OptimizerConfig, update: int) -> float:
    """Return the rate of update number `update`, the first being 0.

    A warm-up of w updates grows evenly to `lr`: (update + 1) / w of it. Then the rate stays, or falls to `lr_floor`
    times itself, which it reaches after `lr_decay` updates, warm-up counted, and keeps: along a line, or along half a
    cosine (Loshchilov and Hutter 2017, equation 5, without restarts). An update skipped for overflow counts.
    """
    if update < config.lr_warmup:
        return config.lr * (update + 1) / config.lr_warmup
    if config.lr_decay is None:
        return config.lr
    done = min(1.0, (update - config.lr_warmup) / (config.lr_decay - config.lr_warmup))
    left = 1.0 - done if config.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.lr * (config.lr_floor + (1.0 - config.lr_floor) * left)
