"""What lies between two ranks: latency and bandwidth, from an almost empty and a large tensor."""

import torch
import torch.distributed as dist

from pipebench.engine.shared_memory import Room
from pipebench.engine.stage import TensorSpec
from pipebench.harness.jobs import LinkJob
from pipebench.harness.launch import Progress, Report
from pipebench.harness.setting import claim_cores
from pipebench.harness.wire import EMPTY_TENSOR, join_group, one_way_time, transport_between
from pipebench.schedule.simulate import Link

_LARGE = TensorSpec((1 << 20,), torch.float32)


def measure_link(job: LinkJob, report: Report) -> Link:
    """Measure on both ranks, and return what this one saw."""
    report(Progress("timing transfers"))
    store = join_group(job.config, job.rank, 2, job.store)
    device = claim_cores(job.config, job.cores, job.rank)
    edges = [(0, 1), (1, 0)]
    room = dict.fromkeys(edges, Room(1, _LARGE.num_bytes))
    transport = transport_between(edges, room, job.config, job.rank, device, store)
    empty_s, large_s = (one_way_time(transport, job.rank, 0, 1, spec) for spec in (EMPTY_TENSOR, _LARGE))
    dist.barrier()
    dist.destroy_process_group()
    return Link.through(empty_s, _LARGE.num_bytes, large_s)
