"""The whole model as one module, for engines that have no pipeline, and how they share a mini-batch out.

They run on the layers, weights, dropout and recompute segments of the pipeline they stand beside. Their recompute is
what their users have, `torch.utils.checkpoint`, so it happens inside a backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
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
from pipebench.values import Value, num_samples

Count = Callable[[Any], Tensor | int]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples of a mini-batch, and whether to run their forward again for the backward.

    They are `share` of all samples, and `loss_share` of what the loss is a mean of.
    """

    index: int
    inputs: Value
    targets: Value
    share: float
    loss_share: float
    recomputed: bool


class WholeModel(nn.Module):
    """All stages in a row; a call returns a micro-batch's part of the mini-batch's mean loss."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self._stages = [stage for _, stage in sorted(stages.items())]
        self.stages = nn.ModuleList(stage.module for stage in self._stages)

    def forward(self, step: int, micro_batch: MicroBatch) -> Tensor:
        value: Any = micro_batch.inputs
        kept, losses = dict[str, Tensor](), list[Tensor]()
        for stage in self._stages:
            run: Callable[..., Any] = partial(_run, stage, step, micro_batch, count())
            if micro_batch.recomputed:  # the generator's state need not be kept: a stage seeds it anew
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            value, kept, auxiliary = run(value, kept)
            if auxiliary is not None:
                losses.append(auxiliary * micro_batch.share)
        if micro_batch.loss_share:
            losses.append(value * micro_batch.loss_share)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=value.device)


def summed_over_ranks(loss: Tensor, meanwhile: Callable[[], None]) -> StepOutcome:
    """Return the mini-batch's loss from each rank's part of it, and let the ranks work while it is added up."""
    summed = dist.all_reduce(loss, async_op=True)
    meanwhile()
    summed.wait()
    return StepOutcome(no_spans, float(loss) if dist.get_rank() == 0 else None)


def _run(
    stage: Stage, step: int, micro_batch: MicroBatch, runs: "count[int]", value: Value, kept: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor], Tensor | None]:
    """Return the stage's value, the micro-batch's mean loss on the last stage, with all skips that are on their way.

    `runs` counts: every run but the first is a recompute.
    """
    output = stage.run(value, dict(kept), step, micro_batch.index, again=next(runs) > 0)
    value = output.value if stage.loss is None else stage.loss_of(output.value, micro_batch.targets)
    return value, output.kept, output.auxiliary


def count_of(stages: Mapping[int, Stage]) -> Count:
    """Return what counts the things that the model's loss is the mean of."""
    loss = stages[max(stages)].loss
    assert loss is not None, "only the last stage has a loss"
    return loss.count


def micro_batches_of_rank(
    config: RunConfig, batch: MiniBatch, rank: int, num_ranks: int, count_of: Count = num_samples
) -> list[MicroBatch]:
    """Return the rank's contiguous share of the M micro-batches; numbers differ by at most one, larger ones first.

    `count_of` says of how many things the loss is the mean, given its targets.
    """
    pieces = batch.split(micro_batch_sizes(len(batch), config.micro))
    counts = [int(count_of(piece.targets)) for piece in pieces]
    numbers = micro_batch_sizes(config.micro, num_ranks)
    first = sum(numbers[:rank])
    mine = range(first, first + numbers[rank])
    recomputed = {Recompute.EXCEPT_LAST: mine[:-1], Recompute.ALWAYS: mine}.get(Recompute(config.recompute), range(0))
    return [
        MicroBatch(
            index=index,
            inputs=pieces[index].inputs,
            targets=pieces[index].targets,
            share=len(pieces[index]) / len(batch),
            loss_share=counts[index] / sum(counts),
            recomputed=index in recomputed,
        )
        for index in mine
    ]
