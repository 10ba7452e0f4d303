"""torchgpipe on the same layers, weights, dropout and optimizer as the built-in engine.

It runs all stages in one process and gives each distinct device a thread. To it the CPU is one device, so there its
stages take turns, forward and backward; what the bench gives it instead is the cores of all stages for each of its
operations (`abilities.threads_each`). It cuts, recomputes and joins by itself and tells nobody, so there are no spans.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torchgpipe.pipeline
from torch import Tensor, nn
from torch.autograd import profiler
from torchgpipe import GPipe, is_checkpointing, is_recomputing

from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.pipeline import gradients_of, layers_of
from pipebench.engine.stage import Stage
from pipebench.engine.stopwatch import no_spans
from pipebench.engine.update import trained
from pipebench.peers.abilities import threads_each
from pipebench.peers.protocol import Parts


class TorchGPipe:
    """All stages of a point in one process, micro-batches as `torch.chunk` cuts them."""

    def __init__(self, parts: Parts) -> None:
        stages = [stage for _, stage in sorted(parts.stages.items())]
        parameters = trained(nn.ModuleList(stage.module for stage in stages).parameters())
        self.optimizers = [parts.make_optimizer(parameters)] if parameters else []
        self.layers = layers_of(parts.stages)
        self.sent_bytes: int | None = 0
        self._stages = [_SeededStage(stage) for stage in stages]
        self._loss_of = stages[-1].loss_of
        self._pipe = GPipe(
            nn.Sequential(*self._stages),
            balance=[1] * len(stages),
            devices=[parts.device] * len(stages),
            chunks=parts.config.micro,
            checkpoint=parts.config.recompute,
        )
        torch.set_num_threads(threads_each(parts.config))

    def train(self, step: int, batch: MiniBatch) -> StepOutcome:
        outcome = self.accumulate(step, batch)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return outcome

    def accumulate(self, step: int, batch: MiniBatch) -> StepOutcome:
        """Take the loss of the joined output: the mean over all samples, however they were cut."""
        for stage in self._stages:
            stage.begin(step)
        with _seen_by_profiler():
            output = self._pipe(batch.inputs)
        loss = self._loss_of(output, batch.targets)
        loss.backward()
        return StepOutcome(no_spans, float(loss.detach()))

    def gradients(self) -> dict[int, list[Tensor]]:
        return gradients_of(self.layers)

    def held_bytes(self) -> int:
        return 0


def build(parts: Parts) -> TorchGPipe:
    return TorchGPipe(parts)


class _SeededStage(nn.Module):
    """A stage that counts its forwards up and its recomputes down, since torchgpipe does not tell the micro-batch.

    Every stage runs its micro-batches in order and backward in the opposite order; torchgpipe ties them together so.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.layers = stage.module
        self._stage = stage
        self._step = 0
        self._recomputable: list[int] = []
        self._num_forwards = 0

    def begin(self, step: int) -> None:
        self._step, self._num_forwards = step, 0
        self._recomputable = []

    def forward(self, x: Tensor) -> Any:
        return self._stage.forward(x, self._step, self._micro_batch())

    def _micro_batch(self) -> int:
        if is_recomputing():
            return self._recomputable.pop()
        micro_batch = self._num_forwards
        self._num_forwards += 1
        if is_checkpointing():
            self._recomputable.append(micro_batch)
        return micro_batch


@contextlib.contextmanager
def _seen_by_profiler() -> Iterator[None]:
    """Where a profiler runs, let torchgpipe compute in this thread: allocations of its own threads are never reported.

    On one device the order of the work, and so what is alive when, stays the same.
    """
    spawn_workers = torchgpipe.pipeline.spawn_workers
    if profiler._is_profiler_enabled:
        torchgpipe.pipeline.spawn_workers = _no_workers
    try:
        yield
    finally:
        torchgpipe.pipeline.spawn_workers = spawn_workers


@contextlib.contextmanager
def _no_workers(devices: Sequence[torch.device]) -> Iterator[tuple[list["_AtOnce"], list["_AtOnce"]]]:
    queues = [_AtOnce() for _ in devices]
    yield queues, queues


class _AtOnce:
    """Stands for a worker's two queues: a task is computed when it is put in."""

    def __init__(self) -> None:
        self._done: deque[Any] = deque()

    def put(self, task: Any) -> None:
        self._done.append((True, (task, task.compute())))

    def get(self) -> Any:
        return self._done.popleft()
