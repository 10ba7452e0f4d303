"""DeepSpeed's pipeline engine on the same layers, weights, dropout and optimizer as the built-in engine.

DeepSpeed cuts a list of layers by rules of its own, so it gets one layer for each stage, and only this rank's is real:
the cut is ours, and nothing is built twice. Its instructions are wrapped on the engine's instance, which tells when
each action ran and lets dropout know the micro-batch; DeepSpeed's code stays as it is.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.pipeline import gradients_of, layers_of, sent_between_stages
from pipebench.engine.stage import Stage
from pipebench.engine.stopwatch import TellSpans
from pipebench.engine.update import trained
from pipebench.peers.protocol import Parts
from pipebench.schedule.action import Action, Op, Row


class DeepSpeedPipeline:
    """One rank of DeepSpeed's 1F1B. A backward's span holds the recompute too: DeepSpeed runs them as one."""

    def __init__(self, parts: Parts) -> None:
        stage = parts.stages[parts.rank]
        parameters = trained(stage.module.parameters())
        self.optimizers = [parts.make_optimizer(parameters)] if parameters else []
        self.layers = layers_of(parts.stages)
        self.sent_bytes: int | None = sent_between_stages(parts.schedule, parts.rank, parts.bundles)
        self._num_micro_batches = parts.schedule.num_micro_batches
        self._is_last = parts.rank == parts.schedule.num_stages - 1
        self._module = _SeededStage(stage)
        self._watch = _Watch(parts, self._module)
        self._engine = _deepspeed_engine(parts, self._module, self.optimizers)
        self._train, self._accumulate = self._watch.wrapped(self._engine._INSTRUCTION_MAP)

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        return self._run(step, batch, self._train)

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        _forget_tensors(self._engine)
        return self._run(step, batch, self._accumulate)

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)

    def held_bytes(self) -> int:
        return 0

    def _run(self, step: int, batch: MiniBatch, instructions: "Instructions") -> StepOutcome:
        self._module.step = step
        self._engine._INSTRUCTION_MAP = instructions
        pieces = batch.split(micro_batch_sizes(len(batch), self._num_micro_batches))
        loss = self._engine.train_batch((piece.inputs, piece.targets) for piece in pieces)
        return StepOutcome(self._watch.step_done(), float(loss) if self._is_last else None)


Instructions = dict[type, Callable[..., None]]
"""What DeepSpeed's engine does for each instruction of its schedules; called with itself and a buffer's number."""


def build(parts: Parts) -> DeepSpeedPipeline:
    return DeepSpeedPipeline(parts)


class _SeededStage(nn.Module):
    """A stage that is told step and micro-batch; a forward run again in a backward is told that backward's."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.layers = stage.module
        self.step = self.micro_batch = 0
        self._stage = stage

    def forward(self, x: Tensor) -> Any:
        return self._stage.forward(x, self.step, self.micro_batch)


class _Watch:
    """Notes which action DeepSpeed's engine is at, for spans, for the seeds of dropout, and for whoever sees it hang.

    DeepSpeed names buffers and not micro-batches, but runs each op's micro-batches in their order.
    """

    def __init__(self, parts: Parts, module: _SeededStage) -> None:
        micro_batches = range(parts.schedule.num_micro_batches)
        self._actions = {
            Op.FORWARD: [Action(Op.FORWARD, parts.rank, m) for m in micro_batches],
            Op.BACKWARD: [Action(Op.BACKWARD, parts.rank, m) for m in micro_batches],
            Op.OPTIMIZER: [Action(Op.OPTIMIZER, parts.rank)],
        }
        self._codes = {op: Row(actions).codes.tolist() for op, actions in self._actions.items()}
        self._num_run = dict.fromkeys(self._actions, 0)
        self._ran: list[Action] = []
        self._module = module
        self._rank = parts.rank
        self._stopwatch = parts.stopwatch
        self._whereabouts = parts.whereabouts

    def step_done(self) -> TellSpans:
        """Return what tells the spans since the last call, and begin a step."""
        self._whereabouts.between()
        spans = self._stopwatch.step_done(self._rank, self._ran)
        self._ran = []
        self._num_run = dict.fromkeys(self._actions, 0)
        return spans

    def wrapped(self, instructions: Instructions) -> tuple[Instructions, Instructions]:
        """Return the instructions with this watch around what computes and waits: with the optimizer's, and without."""
        from deepspeed.runtime.pipe import schedule

        step_optimizer = instructions[schedule.OptimizerStep]

        def optimizer(engine: Any) -> None:
            with self._runs(Op.OPTIMIZER):
                step_optimizer(engine)

        accumulate = {
            **instructions,
            schedule.ForwardPass: self._running(Op.FORWARD, instructions[schedule.ForwardPass]),
            schedule.BackwardPass: self._running(Op.BACKWARD, instructions[schedule.BackwardPass]),
            schedule.RecvActivation: self._waiting(Op.FORWARD, instructions[schedule.RecvActivation]),
            schedule.RecvGrad: self._waiting(Op.BACKWARD, instructions[schedule.RecvGrad]),
            schedule.OptimizerStep: _leave_gradients,
        }
        return {**accumulate, schedule.OptimizerStep: optimizer}, accumulate

    def _running(self, op: Op, instruction: Callable[..., None]) -> Callable[..., None]:
        def execute(engine: Any, buffer_id: int) -> None:
            with self._runs(op):
                instruction(engine, buffer_id)

        return execute

    def _waiting(self, op: Op, instruction: Callable[..., None]) -> Callable[..., None]:
        def execute(engine: Any, buffer_id: int) -> None:
            self._whereabouts.waits(self._codes[op][self._num_run[op]])
            instruction(engine, buffer_id)

        return execute

    @contextlib.contextmanager
    def _runs(self, op: Op) -> Iterator[None]:
        index = self._num_run[op]
        self._num_run[op] += 1
        self._ran.append(self._actions[op][index])
        self._module.micro_batch = index
        self._whereabouts.runs(self._codes[op][index])
        self._stopwatch.start()
        yield
        self._stopwatch.stop()


def _leave_gradients(engine: Any) -> None:
    """Take the place of the optimizer's step, which would use the gradients up."""


def _deepspeed_engine(parts: Parts, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Return DeepSpeed's engine over the process group that there is; what it prints meanwhile is dropped."""
    os.environ["DS_ACCELERATOR"] = parts.device.type
    os.environ["LOCAL_RANK"] = str(parts.rank)  # it refuses to start without
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        # An all-reduce through shared memory is compiled at first use, and a pipeline without replicas never calls it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        num_stages = parts.schedule.num_stages
        layers = [module if stage == parts.rank else _elsewhere for stage in range(num_stages)]
        loss = parts.stages[parts.rank].loss_of
        pipeline = PipelineModule(layers, num_stages=num_stages, loss_fn=loss, partition_method="uniform")
        [optimizer] = optimizers
        engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=_config(parts))
    return engine


def _forget_tensors(engine: Any) -> None:
    """Drop the receive buffers and activations kept since the last step: memory is counted as a step allocates it."""
    engine.reset_activation_shape()
    engine.loss = None
    engine.pipe_buffers = {name: [None] * len(tensors) for name, tensors in engine.pipe_buffers.items()}


def _elsewhere(x: Tensor) -> Tensor:
    raise AssertionError("this stage lives on another rank")


def _config(parts: Parts) -> dict[str, Any]:
    """Return DeepSpeed's own configuration of the point.

    Where it is silent, DeepSpeed clips gradients to a norm of 1, which no other engine here does. Its reentrant
    recompute, also its default, fails on a first stage whose inputs are whole numbers, as tokens are.
    """
    config = parts.config
    return {
        "train_batch_size": config.batch,
        "gradient_accumulation_steps": config.micro,
        "gradient_clipping": 0.0,
        "pipeline": {"activation_checkpoint_interval": int(config.recompute == "always"), "use_reentrant": False},
    }
