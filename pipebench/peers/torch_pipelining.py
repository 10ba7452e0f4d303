"""torch.distributed.pipelining on the same layers, weights, dropout and optimizer as the built-in engine.

Torch runs as it is: its own schedules in their own order, its split of a backward, its receives, its division of the
gradients by M at the end. Its stages are watched, not changed: a schedule calls one method of a stage for each action,
after what the action needs has arrived and before its result is sent, so a span around that method holds computing
alone, as one of the built-in engine does. Torch has no recompute of its own; a stage's forward under
torch.utils.checkpoint is what its users write, and it runs again inside the backward, so it is part of `B`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils.checkpoint import checkpoint

from pipebench.data.batch import MiniBatch
from pipebench.engine.backward import detachable
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import gradients_of, layers_of, parameters_of, sent_between_stages
from pipebench.engine.stage import Bundle, Bundles, Stage
from pipebench.engine.stopwatch import Stopwatch, TellSpans
from pipebench.engine.update import owned_parameters
from pipebench.engine.whereabouts import Whereabouts
from pipebench.errors import StageError, first_line
from pipebench.linear import adopt
from pipebench.peers.abilities import TORCH_SCHEDULES
from pipebench.peers.protocol import Parts
from pipebench.schedule.action import Action, Op, Row, Schedule


class TorchPipeline:
    """One rank of torch's pipeline. Micro-batches must be of equal size."""

    def __init__(self, parts: Parts) -> None:
        schedule, stages = parts.schedule, parts.stages
        for stage in stages.values():
            adopt(stage.module, None)  # torch splits a backward by its own means
        owned = owned_parameters(parameters_of(stages))
        self._optimizers = {number: parts.make_optimizer(own) if own else None for number, own in owned.items()}
        self.optimizers = [optimizer for optimizer in self._optimizers.values() if optimizer is not None]
        self.layers = layers_of(stages)
        self.sent_bytes: int | None = sent_between_stages(schedule, parts.rank, parts.bundles)
        self._rank = parts.rank
        self._has_first, self._last = 0 in stages, stages.get(schedule.num_stages - 1)
        self._log = _Log(parts.rank, schedule.num_micro_batches, parts.stopwatch, parts.whereabouts)
        self._modules = [_SeededStage(schedule, number, stage) for number, stage in stages.items()]
        self._watched = [
            _WatchedStage(module, number, schedule.num_stages, parts.device, parts.bundles, self._log)
            for number, module in zip(stages, self._modules, strict=True)
        ]
        chosen: Any = get_schedule_class(TORCH_SCHEDULES[schedule.name])
        held = self._watched[0] if issubclass(chosen, PipelineScheduleSingle) else self._watched
        self._schedule = chosen(held, schedule.num_micro_batches, loss_fn=self._loss)

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        loss = self._run(step, batch)
        for stage, optimizer in self._optimizers.items():
            self._log.start(Op.OPTIMIZER, stage, 0)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self._log.stop()
        return StepOutcome(self._log.step_done(), loss)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        loss = self._run(step, batch)
        return StepOutcome(self._log.step_done(), loss)

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)

    def held_bytes(self) -> int:
        """Torch receives each micro-batch's activations and gradients into a buffer of its own, made once.

        A split backward leaves gradients in the buffers' `.grad`; a neighbour on this rank is handed the same tensor.
        """
        buffers = [buffer for stage in self._watched for buffer in stage.buffers()]
        tensors = [*buffers, *(buffer.grad for buffer in buffers if buffer.grad is not None)]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def _run(self, step: int, batch: MiniBatch) -> float | None:
        """Run torch's schedule once; return the mini-batch's loss where the last stage lives."""
        for module in self._modules:
            module.step = step
        inputs = (batch.inputs,) if self._has_first else ()
        target = None if self._last is None else batch.targets
        losses: list[Tensor] = []
        try:  # without the outputs of the last stage, which torch would keep and join: nobody wants them
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        except Exception as error:
            if self._log.running is None:
                raise
            told = first_line(error.__cause__ or error)
            raise StageError(f"rank {self._rank} failed at {self._log.running}: {told}") from error
        return float(torch.stack(losses).detach().mean()) if losses else None

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return a micro-batch's mean loss, with which the last stage's forward ends; torch calls it right after."""
        assert self._last is not None, "only the last stage has a loss"
        loss = self._last.loss_of(output, target)
        self._log.stop()
        return loss


def build(parts: Parts) -> TorchPipeline:
    return TorchPipeline(parts)


class _Log:
    """What torch runs on this rank in one step, in its order, and when.

    After a first step it knows the order, and tells `whereabouts` what the rank waits for between two actions.
    """

    def __init__(self, rank: int, num_micro_batches: int, stopwatch: Stopwatch, whereabouts: Whereabouts) -> None:
        self.running: Action | None = None
        self._rank = rank
        self._num_micro_batches = num_micro_batches
        self._stopwatch = stopwatch
        self._whereabouts = whereabouts
        self._known: dict[tuple[Op, int], list[tuple[Action, int]]] = {}
        self._actions: list[Action] = []
        self._order: list[int] = []

    def start(self, op: Op, stage: int, micro_batch: int) -> None:
        """Begin an action; an optimizer's counts as one of micro-batch 0."""
        known = self._known.get((op, stage)) or self._learn(op, stage)
        self.running, code = known[micro_batch]
        self._actions.append(self.running)
        self._whereabouts.runs(code)
        self._stopwatch.start()

    def stop(self) -> None:
        self._stopwatch.stop()
        self.running = None
        if len(self._actions) < len(self._order):
            self._whereabouts.waits(self._order[len(self._actions)])
        else:
            self._whereabouts.between()

    def step_done(self) -> TellSpans:
        """Return what tells the step's spans, and begin anew."""
        spans = self._stopwatch.step_done(self._rank, self._actions)
        self._order = Row(self._actions).codes.tolist()
        self._actions = []
        self._whereabouts.between()
        return spans

    def _learn(self, op: Op, stage: int) -> list[tuple[Action, int]]:
        """Make a stage's actions with their codes once: a start has to cost little."""
        if op is Op.OPTIMIZER:
            row = Row([Action(op, stage)])
        else:
            row = Row([Action(op, stage, m) for m in range(self._num_micro_batches)])
        self._known[op, stage] = list(zip(row, row.codes.tolist(), strict=True))
        return self._known[op, stage]


class _WatchedStage(PipelineStage):
    """A stage of torch's that logs the methods which all of torch's schedules call for an action."""

    def __init__(
        self,
        module: "_SeededStage",
        number: int,
        num_stages: int,
        device: torch.device,
        bundles: Bundles,
        log: _Log,
    ) -> None:
        arriving, leaving = (_stand_in(bundles[edge][0]) for edge in ((number - 1, number), (number, number + 1)))
        super().__init__(module, number, num_stages, device, input_args=(arriving,), output_args=(leaving,))
        self._seeded = module
        self._log = log

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._seeded.micro_batch = fwd_chunk_id
        self._log.start(Op.FORWARD, self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:  # there the loss is still to come
            self._log.stop()
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        op = Op.BACKWARD if full_backward else Op.INPUT_GRADIENT
        self._log.start(op, self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._log.stop()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._log.start(Op.WEIGHT_GRADIENT, self.stage_index, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._log.stop()

    def buffers(self) -> list[Tensor]:
        """Return the tensors that activations and gradients were received into."""
        received = [*self.args_recv_info.values(), *self.grad_recv_info.values()]
        return [info.buffer for infos in received for info in infos if info.buffer is not None]


class _SeededStage(nn.Module):
    """What torch takes for a stage's module: it must be told step and micro-batch, which torch does not pass on."""

    def __init__(self, schedule: Schedule, number: int, stage: Stage) -> None:
        super().__init__()
        self.layers = stage.module
        self.step = self.micro_batch = 0
        self._stage = stage
        self._splits = schedule.splits_backward(number)
        self._recomputed = [schedule.runs(Op.RECOMPUTE, number, m) for m in range(schedule.num_micro_batches)]

    def forward(self, x: Tensor) -> Tensor:
        run, step, micro_batch = self._stage.forward, self.step, self.micro_batch
        if not self._recomputed[micro_batch]:
            output = run(x, step, micro_batch)
            return detachable(output) if self._splits else output
        # The stage seeds its layers itself, so there is no state of the random generator to bring back.
        again: Tensor = checkpoint(run, x, step, micro_batch, use_reentrant=False, preserve_rng_state=False)
        return again


def _stand_in(bundle: Bundle) -> Tensor:
    """Return what torch wants instead of inferring shapes; it sends gradients only where this asks for them."""
    [spec] = bundle.tensors
    tensor = spec.empty(torch.device("meta"))
    return tensor.requires_grad_(tensor.is_floating_point())
