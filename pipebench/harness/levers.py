"""Ways to run a rank that differ from the engine's own in one thing each, and measure as ever.

They run in a worker, a process that measures one point and ends, so a part put in another's place (`vars`) stays there.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipebench.engine import backward, executor, optimizer, stage
from pipebench.engine.optimizer import OPTIMIZERS
from pipebench.engine.stage import Stage, StageOutput
from pipebench.harness import setting
from pipebench.harness.jobs import RankJob
from pipebench.harness.launch import Report
from pipebench.harness.worker import measure_rank
from pipebench.record import RankRecord
from pipebench.schedule.action import Row
from pipebench.values import Value

Measured = tuple[RankRecord, Row]


def as_it_is(job: RankJob, report: Report) -> Measured:
    return measure_rank(job, report)


def sockets(job: RankJob, report: Report) -> Measured:
    return measure_rank(_with_sockets(job), report)


def sockets_few_ahead(job: RankJob, report: Report) -> Measured:
    vars(executor)["RECEIVES_AHEAD"] = 0
    return measure_rank(_with_sockets(job), report)


def sockets_all_ahead(job: RankJob, report: Report) -> Measured:
    vars(executor)["RECEIVES_AHEAD"] = 1 << 20
    return measure_rank(_with_sockets(job), report)


def any_core(job: RankJob, report: Report) -> Measured:
    return measure_rank(dataclasses.replace(job, cores=()), report)


def memory_given_back(job: RankJob, report: Report) -> Measured:
    vars(setting)["_keep_freed_memory"] = lambda libc: None
    return measure_rank(job, report)


def foreach_optimizer(job: RankJob, report: Report) -> Measured:
    vars(optimizer)["OPTIMIZERS"] = {name: _unfused(kind, foreach=True) for name, kind in OPTIMIZERS.items()}
    return measure_rank(job, report)


def plain_optimizer(job: RankJob, report: Report) -> Measured:
    vars(optimizer)["OPTIMIZERS"] = {name: _unfused(kind, foreach=False) for name, kind in OPTIMIZERS.items()}
    return measure_rank(job, report)


def public_backward(job: RankJob, report: Report) -> Measured:
    def run_whole(roots: Sequence[backward.Root], gradients: Sequence[Tensor]) -> None:
        for root, gradient in zip(roots, gradients, strict=True):
            if root is not None:
                torch.autograd.backward(root, gradient)

    vars(executor)["run_whole"] = run_whole
    return measure_rank(job, report)


def weights_in_place(job: RankJob, report: Report) -> Measured:
    vars(stage)["backward_of"] = lambda module, *_: backward.backward_of(module, split=True, recomputed=False)
    return measure_rank(job, report)


def compiled_layers(job: RankJob, report: Report) -> Measured:
    """Layer by layer: each draws its dropout from a seed of its own, which a graph of several cannot set."""
    import torch._inductor.config  # seconds

    torch._inductor.config.fallback_random = True
    plain = Stage.run

    def run(
        self: Stage, value: Value, kept: dict[str, Tensor], step: int, micro_batch: int, again: bool
    ) -> StageOutput:
        if self._layers and self._layers[0] is self.module[0]:
            self._layers = [cast(nn.Module, torch.compile(layer)) for layer in self._layers]
        return plain(self, value, kept, step, micro_batch, again)

    Stage.run = run  # type: ignore[method-assign]
    return measure_rank(job, report)


def _with_sockets(job: RankJob) -> RankJob:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, transport="network"))


def _unfused(kind: type[Optimizer], foreach: bool) -> Callable[..., Optimizer]:
    def make(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
        return kind(groups, **{**settings, "fused": None, "foreach": foreach})

    return make
