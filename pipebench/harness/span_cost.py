"""What recording spans costs: the same steps with it and without, taking turns in one group of processes.

Two fresh groups differ by more than what is looked for, so both ways share weights, links and neighbours; only the
stopwatch differs.
"""

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from pipebench.engine.stopwatch import TellSpans, no_spans
from pipebench.harness.jobs import RankJob
from pipebench.harness.launch import Report
from pipebench.harness.worker import Phases, Steps, garbage_frozen, set_up
from pipebench.peers.registry import build_engine
from pipebench.schedule.action import Action


class IdleStopwatch:
    """Records nothing."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def step_done(self, rank: int, actions: Sequence[Action]) -> TellSpans:
        return no_spans


def span_cost(job: RankJob, report: Report) -> tuple[list[float], list[float]]:
    """Return this rank's seconds of each step with spans, and of each without; runs in a worker.

    They take turns in the order 0 1 1 0, so that neither always follows the other and a drift falls on both.
    """
    phases = Phases(report)
    with phases("starting"):
        bench, device = set_up(job, report)
        parts = bench.parts(device)
        engines = build_engine(parts), build_engine(dataclasses.replace(parts, stopwatch=IdleStopwatch()))
        ways = [Steps(engine, bench.mini_batch, device, phases) for engine in engines]
    with phases("warming up"):
        for way in ways:
            way.until_steady(job.config.warmup)
    step_s: tuple[list[float], list[float]] = [], []
    with phases("measuring"), garbage_frozen():
        for number in range(2 * job.config.steps):
            turn = (number + 1) // 2 % 2
            own_s, _ = ways[turn].timed(1)
            step_s[turn].extend(own_s)
    with phases("leaving"):
        dist.barrier()
        dist.destroy_process_group()
    return step_s
