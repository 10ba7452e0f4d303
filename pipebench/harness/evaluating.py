"""Evaluations between training steps, outside of what is timed."""

import math
from collections.abc import Collection

import torch
import torch.distributed as dist

from pipebench.config import RunConfig
from pipebench.data import evaluation_batch
from pipebench.engine.pipeline import Pipeline
from pipebench.errors import LossError
from pipebench.peers.protocol import Engine
from pipebench.record import Evaluation


class Evaluations:
    """Evaluates the engine's weights where that is due, and keeps what came out, the same on every rank.

    `metrics` are the names of the model's. The whole group calls the methods, with the same steps.
    """

    def __init__(self, engine: Engine, config: RunConfig, metrics: Collection[str], device: torch.device) -> None:
        self.found: list[Evaluation] = []
        self._engine = engine
        self._every = config.evaluate_every
        self._batch = evaluation_batch(config) if self._every else None
        self._metrics = sorted(metrics)
        self._device = device

    def after(self, step: int) -> None:
        """Evaluate if that is due after so many training steps."""
        if self._every and step % self._every == 0:
            self._evaluate(step)

    def after_last(self, step: int) -> None:
        """Evaluate, unless that was just done."""
        if self._every and step % self._every:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        assert self._batch is not None
        assert isinstance(self._engine, Pipeline), "abilities let no other engine come here"
        outcome = self._engine.evaluate(self._batch.to(str(self._device)))
        if outcome.loss is not None and not math.isfinite(outcome.loss):
            raise LossError(f"rank {dist.get_rank()}: the loss of the evaluation after step {step} is {outcome.loss}")
        told = [outcome.loss or 0.0, *(outcome.metrics.get(name, 0.0) for name in self._metrics)]
        summed = torch.tensor(told, dtype=torch.float64)
        dist.all_reduce(summed)
        loss, *values = summed.tolist()
        self.found.append(Evaluation(step, loss, dict(zip(self._metrics, values, strict=True))))
