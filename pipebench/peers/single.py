"""One process that adds up the gradients of M micro-batches: what a user does on one device, and a loop to beat."""

import dataclasses

import torch
from torch import Tensor

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import gradients_of, layers_of
from pipebench.engine.update import Update, probe_scale
from pipebench.errors import StageError
from pipebench.peers.protocol import Parts
from pipebench.peers.whole_model import WholeModel, count_of, micro_batches_of_rank
from pipebench.schedule.action import Op, Row
from pipebench.schedule.builders import with_optimizer
from pipebench.schedule.catalogue import build as build_schedule


class SingleProcess:
    """Forward and backward of each micro-batch in turn, then the optimizer; a backward's span holds its recompute."""

    def __init__(self, parts: Parts) -> None:
        self.layers = layers_of(parts.stages)
        self.sent_bytes: int | None = 0
        self._parts = parts
        self._model = WholeModel(parts.stages)
        self.update = Update(parts.rules, {0: list(self._model.parameters())}, parts.make_optimizer)
        self.optimizers = list(self.update.optimizers.values())
        in_turn = build_schedule("naive", 1, parts.config.micro)
        self._accumulated, self._trained = in_turn.rows[0], with_optimizer(in_turn).rows[0]

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        self.update.begin(step)
        outcome = self._run(self._trained, step, batch, self.update.loss_factor)
        for stage in self._parts.stages.values():
            stage.batch_norms.commit()
        return dataclasses.replace(outcome, update=self.update.done)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        outcome = self._run(self._accumulated, step, batch, probe_scale(self._parts.config.optimizer))
        for stage in self._parts.stages.values():
            stage.batch_norms.forget()
        return outcome

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)

    def held_bytes(self) -> int:
        return 0

    def _run(self, row: Row, step: int, batch: MiniBatch, loss_factor: float) -> StepOutcome:
        parts, losses = self._parts, list[Tensor]()
        micro_batches = micro_batches_of_rank(parts.config, batch, 0, 1, count_of(parts.stages))
        loss = torch.empty(())
        for action, code in zip(row, row.codes.tolist(), strict=True):
            parts.whereabouts.runs(code)
            parts.stopwatch.start()
            try:
                match action.op:
                    case Op.FORWARD:
                        loss = self._model(step, micro_batches[action.micro_batch])
                    case Op.BACKWARD:
                        torch.autograd.backward(loss if loss_factor == 1.0 else loss * loss_factor)
                        losses.append(loss.detach())
                    case Op.OPTIMIZER:
                        self.update.prepare()
                        self.update.step(action.stage)
            except Exception as error:
                told = str(error) or type(error).__name__
                raise StageError(f"rank {parts.rank} failed at {action}: {told}") from error
            parts.stopwatch.stop()
        parts.whereabouts.between()
        return StepOutcome(parts.stopwatch.step_done(parts.rank, row), float(torch.stack(losses).sum()))


def build(parts: Parts) -> SingleProcess:
    return SingleProcess(parts)
