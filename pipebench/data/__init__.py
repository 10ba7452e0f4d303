"""Mini-batches that depend on the seed and the step alone: the same for any K, M and schedule."""

import dataclasses
from collections.abc import Callable

from pipebench.config import CustomDataConfig, RunConfig, TextConfig, tokens_of
from pipebench.data.batch import MiniBatch
from pipebench.data.custom import custom_batches
from pipebench.data.teacher import teacher_batches
from pipebench.data.text import text_batches

EVALUATION_STEP = 2**31
"""The step whose mini-batch is evaluated: no training comes so far."""


def batches(config: RunConfig) -> Callable[[int], MiniBatch]:
    """Return the function from a step's number to its mini-batch, on the CPU."""
    match config.data:
        case TextConfig():
            num_tokens = tokens_of(config)
            assert num_tokens is not None
            return text_batches(config.data, num_tokens, config.batch, config.seed)
        case CustomDataConfig():
            return custom_batches(config.data, config.batch, config.seed)
        case _:
            return teacher_batches(config.model, config.batch, config.seed)


def evaluation_batch(config: RunConfig) -> MiniBatch:
    """Return what is evaluated, the same whenever it is, on the CPU."""
    return batches(dataclasses.replace(config, batch=config.evaluate_batch or config.batch))(EVALUATION_STEP)
