"""Workers with a fault built in, for tests of what the bench makes of it."""

import os

from pipebench.engine.pipeline import Pipeline
from pipebench.harness.jobs import RankJob
from pipebench.harness.launch import Report
from pipebench.harness.worker import measure_rank
from pipebench.record import RankRecord


def scaled_gradient(job: RankJob, report: Report) -> RankRecord:
    """Rank 1's gradients are 0.1 % too large: a loss curve would not show it."""
    accumulate = Pipeline.accumulate

    def wrong(self, step, batch):  # type: ignore[no-untyped-def]
        outcome = accumulate(self, step, batch)
        for layer in self.layers.values():
            for parameter in layer.parameters():
                parameter.grad.mul_(1.001)
        return outcome

    if job.rank == 1:
        Pipeline.accumulate = wrong  # type: ignore[method-assign]
    return measure_rank(job, report)


def raising_layer(job: RankJob, report: Report) -> RankRecord:
    """Rank 1 raises in its training steps, once the gate is passed."""

    def fail(self, step, batch):  # type: ignore[no-untyped-def]
        stage = self._train._stages[1]
        stage.forward = lambda x, step, micro_batch: 1 / 0
        return self._train.run_step(step, batch.inputs, batch.targets, len(batch.inputs))

    if job.rank == 1:
        Pipeline.train = fail  # type: ignore[method-assign]
    return measure_rank(job, report)


def dying_rank(job: RankJob, report: Report) -> RankRecord:
    """Rank 1 is gone without a word."""
    if job.rank == 1:
        os._exit(7)
    return measure_rank(job, report)
