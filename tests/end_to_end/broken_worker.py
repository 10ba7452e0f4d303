"""Workers with a fault built in, for tests of what the bench makes of it.

`raise_while_measuring` and the like, every fault in every phase, are looked up by name. They happen on rank 1 of points
with one micro-batch alone, inside the phase's first action, or at once in a phase without actions, and leave the
second on the host's clock in a file `fault` in the results folder.
"""

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pipebench.engine.pipeline import Pipeline
from pipebench.engine.stage import Stage, StageOutput
from pipebench.harness.jobs import RankJob
from pipebench.harness.launch import Progress, Report
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


def fills_the_disk(job: RankJob, report: Report) -> RankRecord:
    """Leave no room in the temporary folder, and run into that; what a worker prints lies there too.

    Rank 0 does it: with two at it, either may be the first to fail.
    """
    if job.rank != 0:
        time.sleep(60)
    with (Path(job.store).parent / "large").open("wb", buffering=0) as file:
        while file.write(bytes(1024)):
            pass
    raise AssertionError("the disk is not full")


def talkative(job: RankJob, report: Report) -> RankRecord:
    print(f"rank {job.rank} of {job.config.stages} says so")
    return measure_rank(job, report)


def _raise() -> None:
    _ = 1 / 0


def _exit() -> None:
    os._exit(7)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(3600)


def _allocate() -> None:
    """Ask for more than a real limit leaves."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
    torch.ones(1 << 30)


def _nothing() -> None:
    """The loss goes wrong by itself, see `_Broken`."""


FAULTS = {
    "raise": _raise, "exit": _exit, "kill": _kill, "stop": _stop, "sleep": _sleep, "allocate": _allocate,
    "lose": _nothing,
}  # fmt: skip
PHASES = {
    "checking": "checking gradients", "warming": "warming up", "measuring": "measuring",
    "profiling": "profiling memory", "leaving": "leaving",
}  # fmt: skip


class _Broken:
    """A report that breaks its rank when a phase begins."""

    def __init__(self, report: Report, fault: str, phase: str, folder: Path) -> None:
        self.whereabouts = report.whereabouts
        self._report = report
        self._fault = fault
        self._phase = phase
        self._folder = folder

    def __call__(self, progress: Progress) -> None:
        self._report(progress)
        if progress.phase != self._phase or progress.done:
            return
        if self._phase == "leaving":
            self._happen()
            return
        run = Stage.run

        def broken(
            stage: Stage, value: torch.Tensor, kept: dict[str, torch.Tensor], step: int, micro_batch: int, again: bool
        ) -> StageOutput:
            self._happen()
            output = run(stage, value, kept, step, micro_batch, again)
            lost = output.value * float("nan") if self._fault == "lose" else output.value
            return dataclasses.replace(output, value=lost)

        Stage.run = broken  # type: ignore[method-assign]

    def _happen(self) -> None:
        (self._folder / "fault").write_text(str(time.perf_counter()))
        FAULTS[self._fault]()


def __getattr__(name: str) -> Callable[[RankJob, Report], RankRecord]:
    fault, between, phase = name.partition("_while_")
    if not between or fault not in FAULTS or phase not in PHASES:
        raise AttributeError(name)

    def worker(job: RankJob, report: Report) -> RankRecord:
        broken = job.rank == 1 and job.config.micro == 1
        if broken:
            report = _Broken(report, fault, PHASES[phase], Path(job.config.results_dir))  # type: ignore[assignment]
        return measure_rank(job, report)

    return worker
