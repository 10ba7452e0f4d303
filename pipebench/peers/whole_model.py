"""The whole model as one module, for engines that have no pipeline, and how they share a mini-batch out.

They run on the layers, weights, dropout and recompute segments of the pipeline they stand beside. Their recompute is
what their users have, `torch.utils.checkpoint`, so it happens inside a backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipebench.config import RunConfig
from pipebench.data.batch import MiniBatch
from pipebench.engine.executor import StepOutcome
from pipebench.engine.microbatch import micro_batch_sizes
from pipebench.engine.stage import Stage
from pipebench.engine.stopwatch import no_spans
from pipebench.schedule.builders import Recompute


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples of a mini-batch: `share` of them all, and whether to run their forward again for the backward."""

    index: int
    inputs: Tensor
    targets: Tensor
    share: float
    recomputed: bool


class WholeModel(nn.Module):
    """All stages in a row; a call returns a micro-batch's part of the mini-batch's mean loss."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self._stages = [stage for _, stage in sorted(stages.items())]
        self.stages = nn.ModuleList(stage.module for stage in self._stages)

    def forward(self, step: int, micro_batch: MicroBatch) -> Tensor:
        x = micro_batch.inputs
        for stage in self._stages:
            run = partial(_run, stage, step, micro_batch)
            # The generator's state need not be kept: a stage seeds it anew.
            x = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False) if micro_batch.recomputed else run(x)
        return x * micro_batch.share


def summed_over_ranks(loss: Tensor, meanwhile: Callable[[], None]) -> StepOutcome:
    """Return the mini-batch's loss from each rank's part of it, and let the ranks work while it is added up."""
    summed = dist.all_reduce(loss, async_op=True)
    meanwhile()
    summed.wait()
    return StepOutcome(no_spans, float(loss))


def _run(stage: Stage, step: int, micro_batch: MicroBatch, x: Tensor) -> Tensor:
    """Return the stage's output, or the micro-batch's mean loss on the last stage."""
    output = stage.forward(x, step, micro_batch.index)
    return output if stage.loss is None else stage.loss_of(output, micro_batch.targets)


def micro_batches_of_rank(config: RunConfig, batch: MiniBatch, rank: int, num_ranks: int) -> list[MicroBatch]:
    """Return the rank's contiguous share of the M micro-batches; numbers differ by at most one, larger ones first."""
    sizes = micro_batch_sizes(len(batch.inputs), config.micro)
    numbers = micro_batch_sizes(config.micro, num_ranks)
    first = sum(numbers[:rank])
    mine = range(first, first + numbers[rank])
    recomputed = {
        Recompute.NEVER: range(0),
        Recompute.EXCEPT_LAST: mine[:-1],
        Recompute.ALWAYS: mine,
    }[Recompute(config.recompute)]
    inputs, targets = batch.inputs.split(sizes), batch.targets.split(sizes)
    return [
        MicroBatch(index, inputs[index], targets[index], sizes[index] / len(batch.inputs), index in recomputed)
        for index in mine
    ]
