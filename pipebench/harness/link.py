"""What lies between two ranks: latency and bandwidth, from round trips of a small and of a large tensor."""

import statistics

import torch
import torch.distributed as dist

from pipebench.engine.stage import TensorSpec
from pipebench.harness.jobs import LinkJob
from pipebench.harness.launch import Report
from pipebench.harness.setting import claim_cores
from pipebench.harness.wire import join_group, round_trip, transport_between
from pipebench.schedule.simulate import Link

_SMALL, _LARGE = 256, 1 << 20
"""Elements of four bytes."""


def measure_link(job: LinkJob, report: Report) -> Link:
    """Measure on both ranks; the medians of rank 0's round trips, halved, give the two unknowns."""
    join_group(job.config, job.rank, 2, job.store)
    device = claim_cores(job.config, job.cores, job.rank)
    transport = transport_between([(0, 1), (1, 0)], job.config, job.rank, 2, device)
    times = []
    for elements in (_SMALL, _LARGE):
        spec = TensorSpec((elements,), torch.float32)
        trips = [round_trip(transport, job.rank, 0, 1, spec) for _ in range(20)]
        times.append(statistics.median(trips) / 2)
    dist.barrier()
    dist.destroy_process_group()
    small_s, large_s = times
    bytes_per_s = 4 * (_LARGE - _SMALL) / max(large_s - small_s, 1e-9)
    return Link(small_s, bytes_per_s)
