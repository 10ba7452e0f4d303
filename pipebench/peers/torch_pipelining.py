"""torch.distributed.pipelining on the same layers, weights, dropout and optimizer as the built-in engine."""

import torch
from torch import Tensor, nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import gradients_of, layers_of, sent_between_stages
from pipebench.engine.stage import Stage, TensorSpec
from pipebench.peers.protocol import Parts


class TorchPipeline:
    """One rank of torch's pipeline; it records no spans. Micro-batches must be of equal size."""

    def __init__(self, parts: Parts) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        schedule, rank, stage = parts.schedule, parts.rank, parts.stages[parts.rank]
        parameters = list(stage.module.parameters())
        self.optimizers = [parts.make_optimizer(parameters)] if parameters else []
        self.layers = layers_of(parts.stages)
        self.sent_bytes: int | None = sent_between_stages(schedule, rank, parts.boundary_specs)
        self._rank = rank
        self._is_last = rank == schedule.num_stages - 1
        self._module = _SeededStage(stage, schedule.num_micro_batches)
        torch_stage = PipelineStage(
            self._module,
            rank,
            schedule.num_stages,
            parts.device,
            input_args=(_stand_in(parts.boundary_specs[rank][0]),),
            output_args=(_stand_in(parts.boundary_specs[rank + 1][0]),),
        )
        schedule_class = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule.name]
        loss = stage.loss_of if self._is_last else _no_loss
        self._schedule = schedule_class(torch_stage, schedule.num_micro_batches, loss_fn=loss)

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        outcome = self.accumulate(step, batch)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return outcome

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        self._module.begin(step)
        arguments = (batch.inputs,) if self._rank == 0 else ()
        if not self._is_last:
            self._schedule.step(*arguments)
            return StepOutcome((), None)
        losses: list[Tensor] = []
        self._schedule.step(*arguments, target=batch.targets, losses=losses)
        return StepOutcome((), float(torch.stack(losses).detach().mean()))

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)


def build(parts: Parts) -> TorchPipeline:
    return TorchPipeline(parts)


class _SeededStage(nn.Module):
    """A stage that counts its forwards, since torch does not tell which micro-batch it runs."""

    def __init__(self, stage: Stage, num_micro_batches: int) -> None:
        super().__init__()
        self.layers = stage.module
        self._stage = stage
        self._num_micro_batches = num_micro_batches
        self._step = self._calls = 0

    def begin(self, step: int) -> None:
        self._step, self._calls = step, 0

    def forward(self, x: Tensor) -> Tensor:
        micro_batch = self._calls % self._num_micro_batches
        self._calls += 1
        return self._stage.forward(x, self._step, micro_batch)


def _stand_in(spec: TensorSpec) -> Tensor:
    """Return what torch wants instead of inferring shapes; it sends gradients only where this asks for them."""
    tensor = spec.empty(torch.device("meta"))
    return tensor.requires_grad_(tensor.is_floating_point())


def _no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise AssertionError("only the last stage has a loss")
